"""The generic inference call: log-probs, entropy, values or scores of given completions, by a role's network.

A role whose tokenizer is not the one that made the batch, or that has a prompt form of its own, reads the *text*, put into that
form and tokenized again (`_own_form.py`). Such a role returns one score a completion, no value a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.algorithms.base import Output, host_array
from weft.data.sample import SequenceSample
from weft.errors import ConfigError
from weft.host.base import HostContext
from weft.host.reward import record_rewards
from weft.interfaces._own_form import has_own_form, in_own_form, same_tokens
from weft.interfaces.base import MFCResult, Model
from weft.registry import register_interface

TOKENWISE = ("logprobs", "entropy", "values")


@register_interface("infer")
class Infer:
    """`outputs`: what the network is asked for; each becomes a key of that name. `temperature`: as in the sampler.

    `prompt_prefix` and `prompt_suffix` stand around the prompt's text in the form that the role's model was trained on; without
    them prompts that are messages are rendered with the role's own chat template.
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
        read = batch
        if self._reads_text(model, batch):
            tokenwise = sorted(self.outputs.intersection(TOKENWISE))
            if tokenwise:
                raise ConfigError(
                    f"role {model.role!r} has another tokenizer or prompt form than the data, so it cannot give "
                    f"{', '.join(tokenwise)} for the data's tokens; use one tokenizer, and no prompt_prefix or prompt_suffix"
                )
            read = in_own_form(model, batch, self.prompt_prefix, self.prompt_suffix)
        made = model.engine.forward(read, self.outputs, temperature=self.temperature)
        return MFCResult(made.select(keys=sorted(self.outputs)), _metrics(made))

    def _reads_text(self, model: Model, batch: SequenceSample) -> bool:
        if self.prompt_prefix or self.prompt_suffix:
            return True
        if self.outputs.isdisjoint(TOKENWISE):
            return has_own_form(model, batch)
        return not same_tokens(model.tokenizer, model.data_tokenizer)


def _metrics(made: SequenceSample) -> Mapping[str, float]:
    """The mean of what was computed; of scores also the spread, under the names of reward nodes."""
    context = HostContext()
    for key in ("entropy", "values"):
        if key in made.data:
            context.record(key, float(made.data[key].double().mean()))
    if "scores" in made.data:
        record_rewards(host_array(made.data["scores"]).astype("float64"), made.group_of("scores"), context)
    return context.metrics
