"""`preference`: a chosen and a rejected reply, as texts, message lists or whole dialogues. Also single labelled replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.data import dialogue
from weft.data.chat import Message, normalise
from weft.data.datasets.base import TableDataset, answered, continued, ended, grouped, prompt_keys
from weft.data.lengths import Encoded
from weft.data.rows import ANSWER_KEYS, MESSAGE_KEYS, BadRow, Row, first_of, need, number, text
from weft.data.tokenizer import Tokenizer
from weft.registry import register_dataset

CHOSEN = ("chosen", "chosen_messages")
REJECTED = ("rejected", "rejected_messages")


@dataclass(frozen=True)
class Preference:
    """Without a prompt the two are whole dialogues: their common beginning is the prompt, split at the last assistant's turn
    that both share (`\\n\\nAssistant:` in texts, messages in lists). A row `{prompt, completion, label}` or
    `{messages, label}` is a single reply that is wanted (true) or not."""

    prompt_key: str | None = None
    chosen_key: str | None = None
    rejected_key: str | None = None
    id_key: str = "id"

    def check(self, tokenizer: Tokenizer) -> None:
        tokenizer.require_eos()

    def encode(self, row: Row, tokenizer: Tokenizer) -> list[Encoded]:
        margin = 0.0 if row.get("margin") is None else number(row["margin"], "margin")
        if row.get("label") is not None and not any(key in row for key in (*CHOSEN, self.chosen_key)):
            if not isinstance(row["label"], bool):
                raise BadRow(f"'label' must be true or false, not {row['label']!r}")
            values = {"rank": [0.0], "comparison": [0.0], "margin": [margin], "label": [float(row["label"])]}
            return [self._single(row, tokenizer, values)]
        chosen = row[need(row, (self.chosen_key,) if self.chosen_key else CHOSEN, "preference")]
        rejected = row[need(row, (self.rejected_key,) if self.rejected_key else REJECTED, "preference")]
        values = {"rank": [0.0, 1.0], "comparison": [0.0] * 2, "margin": [margin] * 2, "label": [1.0, 0.0]}
        prompt_key = first_of(row, prompt_keys(self.prompt_key)) or first_of(row, MESSAGE_KEYS)
        prompt = None if prompt_key is None else row[prompt_key]
        if isinstance(chosen, str) and isinstance(rejected, str) and (prompt is None or isinstance(prompt, str)):
            replies = [text({"chosen": chosen}, "chosen"), text({"rejected": rejected}, "rejected")]
            if prompt is None:
                return [_dialogues(tokenizer, replies, values)]
            sequences = [ended(tokenizer, prompt + reply) for reply in replies]
            return [answered(tokenizer.encode(prompt), sequences, values=values)]
        context = _messages(prompt, "user") if prompt is not None else []
        talks = [_messages(chosen, "assistant"), _messages(rejected, "assistant")]
        shared = _shared(talks) if prompt is None else 0
        context, talks = context + talks[0][:shared], [talk[shared:] for talk in talks]
        return [continued(tokenizer, context, talks, row.get("tools"), values=values)]

    def _single(self, row: Row, tokenizer: Tokenizer, values: Mapping[str, list[float]]) -> Encoded:
        key = first_of(row, MESSAGE_KEYS)
        if key is not None:
            messages = normalise(row[key])
            last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=0)
            return continued(tokenizer, messages[:last], [messages[last:]], row.get("tools"), values=values)
        prompt = row[need(row, prompt_keys(self.prompt_key), "preference")]
        reply = row[need(row, ANSWER_KEYS, "preference")]
        if isinstance(prompt, str) and isinstance(reply, str):
            reply = text({"completion": reply}, "completion")
            return answered(tokenizer.encode(prompt), [ended(tokenizer, prompt + reply)], values=values)
        return continued(
            tokenizer, _messages(prompt, "user"), [_messages(reply, "assistant")], row.get("tools"), values=values
        )


def _messages(value: Any, role: str) -> list[Message]:
    """A text (said by `role`), one message, or a list of them."""
    if isinstance(value, str):
        return normalise([{"role": role, "content": value}])
    return normalise([value] if isinstance(value, Mapping) else value)


def _shared(talks: Sequence[Sequence[Message]]) -> int:
    """How many leading messages two conversations share, a reply to go on with left over."""
    shared = 0
    for one, other in zip(*talks, strict=False):
        if one != other:
            break
        shared += 1
    return min(shared, *(len(talk) - 1 for talk in talks))


def _dialogues(tokenizer: Tokenizer, contents: Sequence[str], values: Mapping[str, list[float]]) -> Encoded:
    """Two dialogues as texts: after what they share, the assistant's turns are trained.

    A last turn without words is a reply too (hh-rlhf has some): its EOS alone is trained.
    """
    prompt = dialogue.shared_prompt(*contents)
    sequences, masks = [], []
    for content in contents:
        spans = dialogue.assistant_spans(content)
        if spans == [(0, len(content))]:
            spans = [(dialogue.shared_words(*contents), len(content))]
        after = [span for span in spans if span[0] >= len(prompt)]
        if not after or after[-1][1] < len(content):
            raise BadRow("one of the dialogues does not end with the assistant's turn")
        ids, mask = tokenizer.encode_with_spans(content, after)
        sequences.append([*ids, tokenizer.require_eos()])
        masks.append([*mask, True])
    return grouped(sequences, masks, values=values)


@register_dataset("preference")
class PreferenceDataset(TableDataset):
    """Rows `{chosen, rejected}` as groups of two completions, the chosen first.

    Keys `prompt`, `completion`, `loss_mask`, `rank`, `comparison`, `margin`, `label`.
    `options`: prompt_key, chosen_key, rejected_key, id_key, max_seqlen, max_prompt_len, overlong, truncate_side.
    """

    form = Preference
