"""System texts added to a conversation: a fixed prefix, and a tag before each reply.

A tag is a system message that describes the reply by lines such as `quality: 0.8`, like
Open-Assistant's system tags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.data.messages import CONTEXT, FACTS, Message
from weft.errors import DataError

FRACTION_FACTS = ("quality", "humor", "creativity")  # labels with a value from 0 to 1
WORD = re.compile(r"\w+")
WORDS_PER_LENGTH_UNIT = 5  # words per unit of the tag `length`


@dataclass(frozen=True)
class ConversationAdditions:
    """Options for system texts that are added to a conversation.

    Attributes:
        prefix: system text put before the conversation's own system message, or None
        tags: add a system message (a tag) before each reply, with one line each for the reply's
            language, labels and context
        length: add a line with the length of the reply to each tag
        dropout: probability of dropping a line, drawn separately for each line of a tag
        label_masking: compute the loss only on the assistant's text; if False, on all tokens
    """

    prefix: str | None = None
    tags: bool = False
    length: bool = False
    dropout: float = 0.0
    label_masking: bool = True

    def apply(self, messages: Sequence[Message], draw: np.random.Generator | None) -> list[Message]:
        """Return the messages with the added system texts.

        `draw` makes the random choices. If it is None, no line of a tag is dropped, and the lines
        are in a fixed order.
        """
        conversation = list(messages)
        if self.tags:
            conversation = [
                each
                for message in conversation
                for each in (*self._build_tag(message, draw), message)
            ]
        return conversation if self.prefix is None else prepend_prefix(conversation, self.prefix)

    def _build_tag(self, message: Message, draw: np.random.Generator | None) -> list[Message]:
        if message["role"] != "assistant":
            return []
        text = format_tag(message, draw, self.dropout, length=self.length)
        return [{"role": "system", "content": text}] if text else []


def prepend_prefix(messages: Sequence[Message], prefix: str) -> list[Message]:
    """Return the messages with the system text `prefix` in front.

    If there is a system message already, its text follows the prefix after a blank line.
    """
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{prefix}\n\n{messages[0]['content']}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": prefix}, *messages]


def format_tag(
    message: Mapping[str, Any], draw: np.random.Generator | None, dropout: float, *, length: bool
) -> str:
    """Return lines of the form `name: value` that describe a reply, or "" if there are none.

    The lines give the reply's language, its labels and, if `length` is set, its length. If the
    message has a context, a line with the context is added at the end. `draw` shuffles the lines
    before the context, and drops each line with probability `dropout`. If `draw` is None, the order
    is fixed and no line is dropped. Raises `DataError` if a label is not a number from 0 to 1.
    """
    lines = []
    for name in FACTS:
        if message.get(name) is not None:
            lines.append(f"{name}: {_format_value(name, message[name])}")
    if length:
        lines.append(
            f"length: {len(WORD.findall(message['content'])) // WORDS_PER_LENGTH_UNIT + 1}"
        )
    lines = [line for line in lines if not line.endswith(": ")]
    if draw is not None:
        lines = [lines[place] for place in draw.permutation(len(lines))]
    context = message.get(CONTEXT)
    if isinstance(context, str) and context.strip():
        lines.append(f"{CONTEXT}: {context}")
    if draw is not None:
        lines = [line for line in lines if draw.random() >= dropout]
    return "\n".join(lines)


def _format_value(name: str, value: Any) -> str:
    if name not in FRACTION_FACTS:
        return str(value).strip()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise DataError(
            f"a reply has {name}={value!r}; dataset.system_tags needs a number from 0 to 1 there"
        )
    return f"{value:0.1f}"
