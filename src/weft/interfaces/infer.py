"""Interface `infer`: computes log-probs, entropy, values or scores of given completions.

If a role's tokenizer or prompt format differs from the data's, the text of prompts and completions
is converted to the role's format and tokenized again (`convert_to_own_tokens`). Such a role can return one
score per completion, but no values per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.algorithms.base import Output, to_host_array
from weft.data.datasets.prompt import MESSAGES, PLAIN_TEXT
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.data.turns import count_common_prefix
from weft.errors import ConfigError, UserError
from weft.host.base import HostContext, record_rewards
from weft.interfaces.base import MFCResult, Model, have_same_tokens
from weft.models.network.event_outputs import TOP_OUTPUTS
from weft.models.network.packed import TopIds
from weft.registry import register_interface

Ids = list[int]
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


# -- roles whose tokenizer or chat template differs from the data's


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


def convert_to_own_tokens(
    model: Model, batch: SequenceSample, prefix: str = "", suffix: str = ""
) -> SequenceSample:
    """Return the batch re-encoded for the role's tokenizer and chat template.

    Sample ids and numbers of completions are unchanged; each id must have one prompt. Prompts that
    are messages are rendered with the role's chat template, and their completions as the
    assistant's turn. All other prompts, or all prompts if `prefix` or `suffix` is set, are encoded
    as plain text between `prefix` and `suffix`: the text in the metadata column `prompt_text` if
    there is one, else that of the prompt's tokens. Only completions that ended get an end token.
    The key `finished` marks these; without this key, a completion has ended if its last token is a
    stop token.

    The metadata column `left_out` lists, for each id, the parts of its messages that the role's
    template does not render. Raises `ConfigError` naming the role and the id if the role has no
    template, or if its template rejects the messages or omits a part that a reply depends on.
    """
    # Collect the completions of each id, and whether they ended.
    owner = batch.group_of("completion")
    if "finished" in batch.data:
        finished = batch.data["finished"].tolist()
    else:
        finished = [None] * len(owner)
    completions: list[list[tuple[Ids, bool]]] = [[] for _ in batch.ids]
    stop_ids = model.data_tokenizer.list_stop_ids()
    for index, sequence, flag in zip(owner, batch.sequences("completion"), finished, strict=True):
        ids = sequence.tolist()
        ended = flag > 0 if flag is not None else bool(ids) and ids[-1] in stop_ids
        completions[int(index)].append((ids, ended))
    # Encode each id's prompt and completions with the role's tokenizer.
    nothing = (None,) * batch.num_ids
    given = [batch.metadata.get(name, nothing) for name in (MESSAGES, "tools", PLAIN_TEXT)]
    encoded = []
    left_out = list[list[str]]()
    for id, prompt, group, messages, tools, plain in zip(
        batch.ids, batch.sequences("prompt"), completions, *given, strict=True
    ):
        texts = [
            (model.data_tokenizer.decode_after(prompt.tolist(), ids, True), ended)
            for ids, ended in group
        ]
        if messages is None or prefix or suffix:
            if plain is None:
                plain = model.data_tokenizer.decode(prompt.tolist(), skip_special=True)
            encoded.append(_encode_as_text(model.tokenizer, prefix + plain + suffix, texts))
            left_out.append([])
        else:
            context, missing = _render_prompt(model, id, messages, tools)
            encoded.append(_render_as_turns(model, context, messages, tools, texts))
            left_out.append(sorted(missing))
    # Pack the sequences into a new sample.
    lengths = {
        "prompt": [[len(prompt)] for prompt, _ in encoded],
        "completion": [[len(ids) for ids in group] for _, group in encoded],
    }
    flat = [ids for _, group in encoded for ids in group]
    data = {
        "prompt": _concatenate([prompt for prompt, _ in encoded]),
        "completion": _concatenate(flat),
    }
    return SequenceSample.from_groups(batch.ids, lengths, data, {"left_out": left_out})


def _encode_as_text(
    tokenizer: Tokenizer, prompt: str, completions: Sequence[tuple[str, bool]]
) -> tuple[Ids, list[Ids]]:
    """Return the token ids of a prompt and of its completions, encoded as plain text.

    `completions` has the text of each completion and whether it ended. Completions that ended get
    the tokenizer's EOS token.
    """
    completion_ids = []
    for text, ended in completions:
        own = tokenizer.encode(text, bos=False)
        completion_ids.append([*own, tokenizer.require_eos()] if ended else own)
    return tokenizer.encode(prompt), completion_ids


def _render_prompt(
    model: Model, id: str, messages: Sequence[Mapping[str, Any]], tools: Any
) -> tuple[Ids, frozenset[str]]:
    """Render a prompt with the role's chat template.

    Returns its token ids and the names of the message parts that the template omits. Raises
    `ConfigError` if the role has no template or if the template rejects the messages.
    """
    if model.tokenizer.chat_template is None:
        raise ConfigError(
            f"role {model.role!r} has another tokenizer than the data and no chat template, so it "
            f"cannot read prompts that are messages; set "
            f"{model.role}.tokenizer.chat_template to a jinja file, or "
            f"{model.role}.prompt_suffix (and "
            "prompt_prefix) to the text that surrounds a prompt"
        )
    try:
        return model.tokenizer.encode_context(messages, tools)
    except UserError as error:
        raise ConfigError(
            f"role {model.role!r} cannot read the prompt of row {id!r}: {error}; set "
            f"{model.role}.tokenizer.chat_template to another template; with "
            f"{model.role}.prompt_suffix (and "
            f"prompt_prefix) it reads plain text"
        ) from error


def _render_as_turns(
    model: Model,
    prompt: Ids,
    messages: Sequence[Mapping[str, Any]],
    tools: Any,
    completions: Sequence[tuple[str, bool]],
) -> tuple[Ids, list[Ids]]:
    """Return the token ids of a prompt and of its completions, rendered with the role's template.

    Each completion is rendered as the last turn after `messages`. `completions` has (text, ended)
    for each completion; `ended` is False if the completion was truncated. `prompt` has the token
    ids of `messages` alone, in the same template.

    White space that the chat template of the data's tokenizer adds around a reply is removed from
    the text. Text that the role's template adds after the end token of the last turn is cut off.
    """
    tokenizer = model.tokenizer
    before, after = _find_template_blanks(model.data_tokenizer)
    wholes = []
    for whole, ended in completions:
        text = whole.removeprefix(before)
        text = text.removesuffix(after) if ended else text
        ids = tokenizer.encode_chat([*messages, {"role": "assistant", "content": text}], tools)
        wholes.append(
            _cut_at_end_token(tokenizer, ids, count_common_prefix(prompt, ids), ended=ended)
        )
    shared = min(count_common_prefix(prompt, *wholes), *(len(ids) - 1 for ids in wholes))
    return wholes[0][:shared], [ids[shared:] for ids in wholes]


def _find_template_blanks(tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the white space that a chat template adds before a reply and before its end token."""
    before, after = tokenizer.text_around_reply
    after = after.partition(tokenizer.turn_end)[0] if tokenizer.turn_end else ""
    return (before if before.isspace() else ""), (after if after.isspace() else "")


def _cut_at_end_token(tokenizer: Tokenizer, ids: Ids, start: int, *, ended: bool) -> Ids:
    """Return the token ids of a conversation up to the end token of its last turn.

    The end token is searched for from the index `start`. It is kept if the turn `ended`, and
    otherwise removed.
    """
    if tokenizer.turn_end is None:
        stop = None
    else:
        stop = tokenizer.find_special_id(tokenizer.turn_end)
    last = next((at for at in range(len(ids) - 1, start - 1, -1) if ids[at] == stop), None)
    body = ids if last is None else ids[:last]
    if not ended:
        return body
    end = tokenizer.require_eos() if last is None else ids[last]
    return body if body and body[-1] == end else [*body, end]


def _concatenate(sequences: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    return np.array([token for ids in sequences for token in ids], dtype=np.int64)
