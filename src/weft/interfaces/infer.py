"""The generic inference call: log-probs, entropy, values or scores of given completions, by a role's network.

A role whose tokenizer is not the one that made the batch, or that has a prompt form of its own, reads the *text*: prompt and
completion are decoded, put into that form and tokenized again. Such a role returns one score a completion, no value a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weft.algorithms.base import Output, host_array
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError
from weft.host.base import HostContext
from weft.host.reward import record_rewards
from weft.interfaces.base import MFCResult, Model
from weft.registry import register_interface

TOKENWISE = ("logprobs", "entropy", "values")


@register_interface("infer")
class Infer:
    """`outputs`: what the network is asked for; each becomes a key of that name. `temperature`: as in the sampler.

    `prompt_prefix` and `prompt_suffix` stand around the prompt in the form that the role's model was trained on.
    """

    def __init__(
        self,
        outputs: Sequence[Output],
        temperature: float = 1.0,
        prompt_prefix: str = "",
        prompt_suffix: str = "",
    ) -> None:
        self.outputs = frozenset(outputs)
        self.temperature = temperature
        self.prompt_prefix, self.prompt_suffix = prompt_prefix, prompt_suffix

    def inference(self, model: Model, batch: SequenceSample) -> MFCResult:
        """Keys by id: `[L]` log-probs and entropy, `[L + 1]` values, one score a completion. Raises `ConfigError` where a
        role with another tokenizer is asked for a value a token."""
        if not self._reads_text(model):
            read = batch
        else:
            tokenwise = sorted(self.outputs.intersection(TOKENWISE))
            if tokenwise:
                raise ConfigError(
                    f"role {model.role!r} has another tokenizer or prompt form than the data, so it cannot give "
                    f"{', '.join(tokenwise)} for the data's tokens; use one tokenizer, and no prompt_prefix or prompt_suffix"
                )
            read = self.rendered(model, batch)
        made = model.engine.forward(read, self.outputs, temperature=self.temperature)
        return MFCResult(made.select(keys=sorted(self.outputs)), _metrics(made))

    def rendered(self, model: Model, batch: SequenceSample) -> SequenceSample:
        """The batch in the role's own tokens: same ids, one prompt an id, as many completions."""
        owner = batch.group_of("completion")
        given = [p.tolist() for p in batch.sequences("prompt")]
        prompts = [model.data_tokenizer.decode(p, skip_special=True) for p in given]
        prompt_ids = [model.tokenizer.encode(self.prompt_prefix + p + self.prompt_suffix) for p in prompts]
        completions: list[list[list[int]]] = [[] for _ in batch.ids]
        for index, ids in zip(owner, batch.sequences("completion"), strict=True):
            completions[int(index)].append(_own_completion(model, given[int(index)], ids.tolist()))
        lengths = {
            "prompt": [[len(p)] for p in prompt_ids],
            "completion": [[len(c) for c in group] for group in completions],
        }
        flat = [c for group in completions for c in group]
        data = {"prompt": _packed(prompt_ids), "completion": _packed(flat)}
        return SequenceSample.from_groups(batch.ids, lengths, data)

    def _reads_text(self, model: Model) -> bool:
        form = bool(self.prompt_prefix or self.prompt_suffix)
        return form or not same_tokens(model.tokenizer, model.data_tokenizer)


def same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether the same ids mean the same tokens; chat templates and habits may differ."""
    return one is other or one.fingerprint == other.fingerprint or one.hf.get_vocab() == other.hf.get_vocab()


def _own_completion(model: Model, prompt: Sequence[int], ids: Sequence[int]) -> list[int]:
    """A completion in the role's tokens; one that was ended gets the role's own end token."""
    ended = len(ids) > 0 and ids[-1] in model.data_tokenizer.stop_ids()
    own = model.tokenizer.encode(model.data_tokenizer.decode_after(prompt, ids, skip_special=True), bos=False)
    return [*own, model.tokenizer.require_eos()] if ended else own


def _packed(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor([token for ids in sequences for token in ids], dtype=torch.int64)


def _metrics(made: SequenceSample) -> Mapping[str, float]:
    """The mean of what was computed; of scores also the spread, under the names of reward nodes."""
    context = HostContext()
    for key in ("entropy", "values"):
        if key in made.data:
            context.record(key, float(made.data[key].double().mean()))
    if "scores" in made.data:
        record_rewards(host_array(made.data["scores"]).astype("float64"), made.group_of("scores"), context)
    return context.metrics
