"""What weft puts around every conversation before it is rendered: a constant system text, and
before each reply what is known of it (Open-Assistant's system tags).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.data.messages import CONTEXT, FACTS, Message
from weft.errors import DataError

SHARES = ("quality", "humor", "creativity")  # facts that are numbers from 0 to 1
WORD = re.compile(r"\w+")
WORDS_A_STEP = 5  # of the tag `length`


@dataclass(frozen=True)
class Dress:
    """`prefix` is the system text of every conversation, before its own one.

    `tags`: a system message before each reply that says its language, labels and context, with
    `length` also how long it is. Each of these is left out with probability `dropout`, where
    something is drawn. Without `label_masking` every token is trained.
    """

    prefix: str | None = None
    tags: bool = False
    length: bool = False
    dropout: float = 0.0
    label_masking: bool = True

    def of(self, messages: Sequence[Message], draw: np.random.Generator | None) -> list[Message]:
        """The messages with all that. Without a `draw` every tag is there, in a fixed order."""
        made = list(messages)
        if self.tags:
            made = [each for message in made for each in (*self._tag(message, draw), message)]
        return made if self.prefix is None else with_prefix(made, self.prefix)

    def _tag(self, message: Message, draw: np.random.Generator | None) -> list[Message]:
        if message["role"] != "assistant":
            return []
        text = tag_text(message, draw, self.dropout, length=self.length)
        return [{"role": "system", "content": text}] if text else []


def with_prefix(messages: Sequence[Message], prefix: str) -> list[Message]:
    """The messages after the system text `prefix`; a system message of their own follows it, a
    blank line below.
    """
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{prefix}\n\n{messages[0]['content']}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": prefix}, *messages]


def tag_text(
    message: Mapping[str, Any], draw: np.random.Generator | None, dropout: float, *, length: bool
) -> str:
    """Lines `name: value` on a reply: its language and labels in random order, then its context,
    which may have lines of its own; "" where none is left. Raises `DataError` for a label that is
    no number from 0 to 1.
    """
    lines = [
        f"{name}: {_value(name, message[name])}" for name in FACTS if message.get(name) is not None
    ]
    if length:
        lines.append(f"length: {len(WORD.findall(message['content'])) // WORDS_A_STEP + 1}")
    lines = [line for line in lines if not line.endswith(": ")]
    if draw is not None:
        lines = [lines[place] for place in draw.permutation(len(lines))]
    context = message.get(CONTEXT)
    if isinstance(context, str) and context.strip():
        lines.append(f"{CONTEXT}: {context}")
    if draw is not None:
        lines = [line for line in lines if draw.random() >= dropout]
    return "\n".join(lines)


def _value(name: str, value: Any) -> str:
    if name not in SHARES:
        return str(value).strip()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise DataError(
            f"a reply has {name}={value!r}; dataset.system_tags needs a number from 0 to 1 there"
        )
    return f"{value:0.1f}"
