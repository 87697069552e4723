"""Parts of the assistant's trained turns that a chat template omits, and how to keep them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from weft.data.messages import REASONING, Message
from weft.data.rendered import END_OF_THOUGHT, has_text, iterate_arguments, remove_whitespace
from weft.data.turns import TemplateFunctions
from weft.errors import DataError
from weft.reading import shorten

TAGS = re.compile(r"</?think>")
MARK = "weft-looks-for-this-part"  # probe text that a template either writes or omits
VERBATIM_TEMPLATE = "chatml"  # weft's template that writes content unchanged


@dataclass(frozen=True)
class TemplateOmission:
    """Part of an assistant turn that is not trained on because the chat template omits it.

    The part is missing from one or more turns. `message`, `example`, `row` and `place` describe the
    first of them.

    Attributes:
        part: name of the part, such as "content"
        keep: advice for the user on how to keep the part
        template: name of the tokenizer that has the template
        message: number of the turn in its conversation, counted from 1
        example: text that is omitted
        row: row number, counted from 0
        turns: number of turns in which the part is missing
        place: file and line of the row
    """

    part: str
    keep: str
    template: str
    message: int
    example: str
    row: int = 0
    turns: int = 1
    place: str = ""

    def __str__(self) -> str:
        turns = f"{self.turns:,} trained turn{'' if self.turns == 1 else 's'}"
        return (
            f"the chat template of {self.template} leaves {self.part} out of {turns}, so it is "
            f"not learned; first in "
            f"{self.place}, message {self.message}: {self.example!r}; to keep it, {self.keep}"
        )


def merge_omissions(cuts: Iterable[TemplateOmission]) -> tuple[TemplateOmission, ...]:
    """Merge omissions that have the same part, advice and template, adding up their `turns`.

    A merged omission has the location and the example of the first of these omissions.
    """
    omissions: dict[tuple[str, str, str], TemplateOmission] = {}
    for cut in cuts:
        key = cut.part, cut.keep, cut.template
        first = omissions.get(key)
        omissions[key] = cut if first is None else replace(first, turns=first.turns + cut.turns)
    return tuple(omissions.values())


@dataclass(frozen=True)
class TrainedTurn:
    """Assistant turn that the model is trained on.

    Attributes:
        template: chat template
        messages: messages of the whole conversation
        tools: tool schemas of the conversation, or None
        index: index of the turn in `messages`
        written: text of the turn as the template renders it
    """

    template: TemplateFunctions
    messages: Sequence[Message]
    tools: Any
    index: int
    written: str

    @property
    def message(self) -> Message:
        return self.messages[self.index]

    def find_omissions(self, lost: Set[str]) -> Iterator[TemplateOmission]:
        """Yield an omission for each part of the turn that is missing from the rendered text.

        `lost` are the fields of the message that the template does not render.
        """
        message = self.message
        # Reasoning in a separate field.
        if message.get(REASONING) and (
            REASONING in lost or not has_text(self.written, message[REASONING])
        ):
            yield self._build_omission(
                REASONING,
                self._advise_on_reasoning(),
                find_missing_words(self.written, message[REASONING]),
            )
        # The content, or the reasoning at its beginning.
        if "content" in lost:
            yield self._build_omission(
                "content",
                self._advise_other_template(),
                find_missing_words(self.written, message["content"]),
            )
        else:
            thoughts = TAGS.split(message["content"].rpartition(END_OF_THOUGHT)[0])
            cut = []
            for thought in thoughts:
                if not has_text(self.written, thought):
                    cut.append(thought)
            if cut:
                yield self._build_omission(
                    f"what precedes {END_OF_THOUGHT} in content",
                    self._advise_on_content(),
                    find_missing_words(self.written, cut[0]),
                )
        # Arguments of tool calls.
        for number, call in enumerate(message.get("tool_calls") or ()):
            for path, value in iterate_arguments(call, number):
                if path in lost or not _has_argument(self.written, value):
                    named = re.sub(r"\[\d+\]", "[]", path)
                    yield self._build_omission(
                        named, self._advise_other_template(), shorten(str(value))
                    )

    def _build_omission(self, part: str, keep: str, example: str) -> TemplateOmission:
        return TemplateOmission(part, keep, self.template.name, self.index + 1, example)

    def _advise_on_reasoning(self) -> str:
        """Return advice on how to keep reasoning that is in a separate field."""
        own = {}
        for key, value in self.message.items():
            if key != REASONING:
                own[key] = value
        inside = {**own, "content": f"<think>\n{MARK}\n</think>\n\n{own['content']}"}
        if self._is_written_when_last({**self.message, REASONING: MARK}):
            return "let the row end with that turn"
        if self._is_written(inside):
            return f"write it into content, between <think> and {END_OF_THOUGHT}"
        return f"{self._advise_other_template()} (such as {VERBATIM_TEMPLATE}, with <think>...{END_OF_THOUGHT} in content)"

    def _advise_on_content(self) -> str:
        """Return advice on how to keep the reasoning that the template omits.

        The reasoning is at the start of the message's content.
        """
        _, _, answer = self.message["content"].rpartition(END_OF_THOUGHT)
        apart = {**self.message, "content": answer.strip(), REASONING: MARK}
        inside = {**self.message, "content": f"<think>\n{MARK}\n</think>\n\n{answer.strip()}"}
        if self._is_written_when_last(inside):
            return "let the row end with that turn"
        if self._is_written(apart):
            return f"give the thoughts as {REASONING}"
        return f"{self._advise_other_template()} (such as {VERBATIM_TEMPLATE})"

    def _advise_other_template(self) -> str:
        return f"set {self.template.option}.chat_template to a template that writes it"

    def _is_written_when_last(self, message: Message) -> bool:
        """Return whether the rendered text contains `MARK` if the conversation ends with `message`.

        `message` is a copy of this turn in which the probe text `MARK` replaces the omitted
        reasoning. If the result is True, the user can keep the reasoning by ending the row with
        this turn. Returns False if this turn is already the last one.
        """
        return self.index < len(self.messages) - 1 and self._is_mark_rendered(
            [*self.messages[: self.index], message]
        )

    def _is_written(self, message: Message) -> bool:
        return self._is_mark_rendered(
            [*self.messages[: self.index], message, *self.messages[self.index + 1 :]]
        )

    def _is_mark_rendered(self, messages: Sequence[Message]) -> bool:
        try:
            return MARK in self.template.render(messages, self.tools, False)
        except DataError:
            return False


def find_missing_words(text: str, content: str) -> str:
    """Return the words of `content` that are missing from `text`, shortened for a message.

    The result is `content` without the longest prefix and the longest suffix that occur in `text`,
    or the whole `content` if no words are left.
    """
    words = content.split()
    packed = remove_whitespace(text)
    before = _find_largest(len(words), lambda count: "".join(words[:count]) in packed)
    after = _find_largest(len(words), lambda count: "".join(words[len(words) - count :]) in packed)
    return shorten(" ".join(words[before : len(words) - after] or words))


def _find_largest(count: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number up to `count` for which `holds` is true, by binary search.

    Once `holds` is false, it must be false for all larger numbers.
    """
    low = 0
    high = count
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _has_argument(text: str, value: Any) -> bool:
    """Return whether a text contains a tool call's argument `value`, in JSON or Python notation."""
    if isinstance(value, str):
        return has_text(text, value)
    return any(form in text for form in (json.dumps(value), str(value)))
