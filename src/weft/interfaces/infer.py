"""Interface `infer`: computes log-probs, entropy, values or scores of given completions.

If a role's tokenizer or prompt format differs from the data's, the text of prompts and completions
is converted to the role's format and tokenized again (`_own_form.py`). Such a role can return one
score per completion, but no values per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.algorithms.base import Output, to_host_array
from weft.data.datasets.prompt import MESSAGES
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError
from weft.host.base import HostContext, record_rewards
from weft.interfaces._own_form import convert_to_own_tokens
from weft.interfaces.base import MFCResult, Model, have_same_tokens
from weft.models.network.event_outputs import TOP_OUTPUTS
from weft.models.network.packed import TopIds
from weft.registry import register_interface

TOKENWISE = ("logprobs", "entropy", "values", "top1", *sorted(TOP_OUTPUTS))


@register_interface("infer")
class InferInterface:
    """Interface that runs a role's network on completions and returns the requested `outputs`.

    Logits are divided by `temperature`, as in the sampler. `top_k` is the number of token ids per
    position in the outputs `top_ids` and `top_logprobs`.

    If the role's model was trained on another prompt format, `prompt_prefix` and `prompt_suffix`
    can be set; they are added before and after the prompt's text. Without them, prompts that are
    messages are rendered with the role's own chat template. The key `finished` marks completions
    that ended; without this key, a completion has ended if its last token is a stop token.
    """

    def __init__(
        self,
        outputs: Sequence[Output],
        temperature: float = 1.0,
        prompt_prefix: str = "",
        prompt_suffix: str = "",
        top_k: int | None = None,
    ) -> None:
        self.outputs = frozenset(outputs)
        top_outputs = self.outputs & TOP_OUTPUTS
        if (top_k is None) != (not top_outputs) or (top_k is not None and top_k < 1):
            rule = f"at least 1 with the outputs {' and '.join(sorted(TOP_OUTPUTS))}, and absent without them"
            raise ConfigError(
                f"top_k={top_k} with the outputs {', '.join(sorted(self.outputs))}: must be {rule}"
            )
        self.top_k = top_k
        self.temperature = temperature
        self.prompt_prefix = prompt_prefix
        self.prompt_suffix = prompt_suffix

    def check_tokens(self, role: str, own: Tokenizer, data: Tokenizer) -> None:
        """Raise `ConfigError` if an output has values per token, but the role's tokens differ from
        the data's.

        Outputs such as `logprobs` must have one value for each of the data's tokens. The role's
        tokens differ if its tokenizer has another vocabulary, or if `prompt_prefix` or
        `prompt_suffix` is set.
        """
        tokenwise = sorted(self.outputs.intersection(TOKENWISE))
        if tokenwise and (self._has_form or not have_same_tokens(own, data)):
            raise ConfigError(
                f"role {role!r} has another tokenizer or prompt form than the data, so it cannot "
                f"give {', '.join(tokenwise)} for the data's tokens; use one tokenizer, and no "
                f"prompt_prefix or prompt_suffix"
            )

    def inference(self, model: Model, batch: SequenceSample) -> MFCResult:
        """Return the requested outputs, one key each.

        For a completion of L tokens, `logprobs`, `entropy` and `top1` (1 where the token is the
        most likely one, otherwise 0) have the shape [L], `values` has [L + 1], and `scores` has one
        value. With K ids per token, `top_ids` has the shape [L, K] and `top_logprobs` [L, K + 1],
        where the last value is for all other ids together. Top ids are chosen among the ids of the
        data's tokenizer.

        Raises `ConfigError` if an output has values per token and the role's tokenizer or prompt
        format differs from the data's.
        """
        self.check_tokens(model.role, model.tokenizer, model.data_tokenizer)
        read = batch
        if self._has_form or (self.outputs.isdisjoint(TOKENWISE) and has_own_tokens(model, batch)):
            read = convert_to_own_tokens(model, batch, self.prompt_prefix, self.prompt_suffix)
        outputs = model.engine.forward(
            read,
            self.outputs,
            temperature=self.temperature,
            top=self._choose_top_ids(model),
            max_tokens=model.max_tokens,
        )
        left_out = read.metadata.get("left_out", ()) if read is not batch else ()
        return MFCResult(
            outputs.select(keys=sorted(self.outputs)),
            _compute_metrics(model.gather(OutputSums.from_outputs(outputs, left_out))),
        )

    def _choose_top_ids(self, model: Model) -> TopIds | None:
        """Return the request for the K likeliest ids of each row, or None if `top_k` is not set.

        Only ids below the vocabulary size of the data's tokenizer are considered. A network can
        have outputs for more ids, and networks that share a tokenizer can differ in their number of
        outputs. K is `top_k`, but at most the vocabulary size minus 1, so that at least one id is
        not among the top K.
        """
        known = model.data_tokenizer.vocab_size
        if self.top_k is None:
            return None
        return TopIds(min(self.top_k, known - 1), below=known)

    @property
    def _has_form(self) -> bool:
        return bool(self.prompt_prefix or self.prompt_suffix)


@dataclass(frozen=True)
class OutputSums:
    """Data from one rank's part of a batch, from which the metrics are computed.

    Attributes:
        sums: Pairs (sum, number of elements) for the outputs `entropy` and `values`, if computed.
        scores: Score of each completion, or None if the call computes no scores.
        owners: Sample id of each scored completion; empty if there are no scores.
        ids: Number of sample ids.
        cut: Number of sample ids for which the chat template omitted a part of the prompt, or None
            if it omitted nothing.
    """

    sums: Mapping[str, tuple[float, int]]
    scores: npt.NDArray[np.float64] | None
    owners: list[str]
    ids: int
    cut: int | None

    @classmethod
    def from_outputs(cls, outputs: SequenceSample, left_out: Sequence[Sequence[str]]) -> OutputSums:
        """Compute the sums over the outputs of one rank.

        `left_out` lists, for each id, the message parts that the role's template omits.
        """
        values = {}
        for key in ("entropy", "values"):
            if key in outputs.data:
                values[key] = to_host_array(outputs.data[key]).astype(np.float64)
        if "scores" in outputs.data:
            scores = to_host_array(outputs.data["scores"]).astype(np.float64)
        else:
            scores = None
        if scores is not None:
            owners = [outputs.ids[group] for group in outputs.group_of("scores")]
        else:
            owners = []
        sums = {key: (float(value.sum()), len(value)) for key, value in values.items()}
        return cls(
            sums,
            scores,
            owners,
            outputs.num_ids,
            sum(map(bool, left_out)) if any(left_out) else None,
        )


def _compute_metrics(parts: Sequence[OutputSums]) -> Mapping[str, float]:
    """Return the metrics of an inference call over all ranks.

    If the call computes `entropy` or `values`, their means are included. If it computes scores, the
    metrics of `record_rewards`, such as `reward_std`, are included. `prompts_in_part` is the
    fraction of prompts that the role's template does not render completely; it is omitted if all
    prompts are rendered completely.
    """
    context = HostContext()
    for key in parts[0].sums:
        total, count = (sum(part.sums[key][n] for part in parts) for n in (0, 1))
        context.record(key, total / count)
    if parts[0].scores is not None:
        owners = np.unique([owner for part in parts for owner in part.owners], return_inverse=True)[
            1
        ]
        record_rewards(
            np.concatenate([part.scores for part in parts if part.scores is not None]),
            owners,
            context,
        )
    if any(part.cut for part in parts):
        context.record(
            "prompts_in_part",
            sum(part.cut or 0 for part in parts) / sum(part.ids for part in parts),
        )
    return context.metrics


def has_own_tokens(model: Model, batch: SequenceSample) -> bool:
    """Return whether the batch must be converted before the role can read it.

    This is the case if the role's vocabulary differs from the data's, or if the prompts are
    messages and the role has a chat template that differs from the data's.
    """
    if not have_same_tokens(model.tokenizer, model.data_tokenizer):
        return True
    template = model.tokenizer.chat_template
    return (
        MESSAGES in batch.metadata
        and template is not None
        and template != model.data_tokenizer.chat_template
    )
