"""Location of the assistant's turns in a rendered conversation, and parts that a template omits.

A turn begins after the generation prompt, the text that a template appends for the model to
continue. The generation prompt is found by rendering the messages before the turn. Many templates
render a turn differently if other turns follow (they leave out reasoning, use another end token, or
move tools to a later place). Such a turn is located by rendering the conversation again with other
words in place of the message's text.

`count_common_prefix` counts the ids, or characters, at the start that several sequences share.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from weft.data.messages import REASONING, Message
from weft.data.rendered import (
    END_OF_THOUGHT,
    has_content,
    has_text,
    iterate_arguments,
    remove_whitespace,
)
from weft.errors import DataError
from weft.reading import shorten

Span = tuple[int, int]

# Replacement of a message's text. It begins and ends with a character that texts do not use, so the
# difference between two renderings is exactly the text.
OTHER_WORDS = "\u2042 weft \u2042"
# Characters that are allowed between the last words of a turn and its end token.
CLOSING = " \t\r\n\"')]}"


@dataclass(frozen=True)
class TemplateFunctions:
    """Functions and tokens of a tokenizer that are needed to apply its chat template.

    Attributes:
        render: function from (messages, tools, add_generation_prompt) to the rendered text; raises
            `DataError` if the template rejects the messages
        encode: function from a text to its token ids
        offsets: function from a text to (token ids, character span of each token), or to None if
            the tokenizer does not provide spans
        marked: function from (messages, tools) to the character spans of the template's
            `{% generation %}` blocks, or to None if it has none
        turn_end: token that the template renders after a reply, or None
        added: all added tokens of the tokenizer
        name: name of the tokenizer in error messages
        option: prefix of the tokenizer's options in error messages
    """

    render: Callable[[Sequence[Message], Any, bool], str]
    encode: Callable[[str], list[int]]
    offsets: Callable[[str], tuple[list[int], list[Span]] | None]
    marked: Callable[[Sequence[Message], Any], list[Span] | None]
    turn_end: str | None = None
    added: Sequence[str] = ()
    name: str = "the tokenizer"
    option: str = "tokenizer"


def find_leading_token(text: str, added: Sequence[str]) -> str | None:
    """Return the longest added token that a text begins with, or None if it begins with none."""
    return max(
        (token for token in added if token and text.startswith(token)), key=len, default=None
    )


def find_assistant_spans(
    template: TemplateFunctions,
    messages: Sequence[Message],
    tools: Any,
    text: str,
    turns: Sequence[int],
) -> list[Span]:
    """Return the character span [start, stop) of each turn in `text`, including its end token.

    `text` is the rendered conversation, and `turns` are the indices of the assistant messages to
    find. Raises `DataError` if a turn cannot be located.
    """
    conversation = _RenderedConversation(template, messages, tools, text)
    spans: list[Span] = []
    for index in turns:
        start = conversation.find_start(index, spans[-1][1] if spans else 0)
        spans.append((start, conversation.find_stop(index, start)))
    return spans


@dataclass(frozen=True)
class _RenderedConversation:
    """Conversation and its rendered text, with methods that find the turns in the text."""

    template: TemplateFunctions
    messages: Sequence[Message]
    tools: Any
    text: str
    # content spans found so far, by message index
    content_spans: dict[int, Span | None] = field(default_factory=dict)

    def find_start(self, index: int, at: int) -> int:
        """Return the position in the text at which turn `index` begins.

        `at` is the end of the previous trained turn, or 0. Raises `DataError` if the position
        cannot be determined.
        """
        # Render the messages before the turn, with and without the generation prompt.
        text = self.text
        content = self.messages[index]["content"].strip()
        rendering = self._render_beginning(index, prompt=True)
        plain = self._render_beginning(index, prompt=False)
        # The conversation begins with this rendering.
        if rendering is not None and text.startswith(rendering):
            if rendering != plain:
                return len(rendering)
            return self._skip_header(index, len(rendering))
        # The template has no generation prompt, or refuses these messages: use the positions of
        # the previous message's content and of the turn's own content.
        content_span = self._find_content(index)
        before = self._find_content(index - 1)
        if (
            rendering is None
            or plain is None
            or not rendering.startswith(plain)
            or rendering == plain
        ):
            closing = self._find_text_after_content(index - 1, plain)
            if before and closing is not None and text.startswith(closing, before[1]):
                return self._skip_header(index, before[1] + len(closing))
            if content_span is None or not content or content_span[0] < at:
                raise self._build_error(index, "begins")
            return content_span[0]
        if text.startswith(plain):
            return self._find_header_end(rendering[len(plain) :], len(plain))
        # The messages before the turn are rendered differently in the whole conversation, so the
        # header is searched between their text and the turn's own text.
        low = max(at, before[1] if before else 0)
        high = content_span[0] if content_span else len(text)
        header = rendering[len(plain) :]
        mark = (
            find_leading_token(header.lstrip(), self.template.added)
            or header.strip().split("\n")[0]
        )
        mark_position = text.rfind(mark, low, high) if content_span else text.find(mark, low)
        if mark_position < 0 or not mark:
            raise self._build_error(index, "begins")
        return self._find_header_end(header[header.find(mark) :], mark_position)

    def find_stop(self, index: int, start: int) -> int:
        """Return the position directly after the end token of turn `index`.

        `start` is the position at which the turn begins. Raises `DataError` if the end of the turn
        cannot be determined.
        """
        # The conversation begins with the rendering up to this turn.
        text = self.text
        end = self.template.turn_end
        rendering = self._render_beginning(index + 1, prompt=False)
        if rendering is not None and text.startswith(rendering):
            end_position = text.rfind(end, start, len(rendering)) if end else -1
            if end and end_position >= 0:
                return end_position + len(end)
            return max(start, len(text[: len(rendering)].rstrip()))
        # Otherwise search after the turn's text, before the text of the next message.
        content_span = self._find_content(index)
        following = self._find_content(index + 1)
        if content_span is None or content_span[1] < start:
            raise self._build_error(index, "ends")
        if following and following[0] >= content_span[1]:
            limit = following[0]
        else:
            limit = self._find_next_content(index, content_span[1])
        text_after = text[content_span[1] : limit]
        closing = self._find_text_after_content(index, rendering)
        if closing is not None and text_after.startswith(closing.rstrip()):
            return content_span[1] + len(closing.rstrip())
        # A turn followed by others can end differently: with the usual token after other text, or
        # with another token directly after the turn's text.
        if end and end in text_after:
            token: str | None = end
        else:
            token = find_leading_token(text_after.lstrip(CLOSING), self.template.added)
        if end is None or token is None:
            raise self._build_error(index, "ends")
        return content_span[1] + text_after.find(token) + len(token)

    def _skip_header(self, index: int, position: int) -> int:
        """Return the start of turn `index` for a template that has no generation prompt.

        `position` is the end of the text of the earlier messages. Any text other than white space
        between `position` and the turn's content is a header, which is skipped: the turn starts at
        its content. Without a header, or if the content is empty or cannot be found, the turn
        starts at `position`.
        """
        content_span = self._find_content(index)
        content = self.messages[index]["content"]
        if (
            content_span is None
            or not content.strip()
            or not has_content(self.text[slice(*content_span)], content)
        ):
            return position
        return content_span[0] if self.text[position : content_span[0]].strip() else position

    def _render_beginning(self, count: int, *, prompt: bool) -> str | None:
        """Render only the first `count` messages, with a generation prompt if `prompt` is set.

        Returns None if `count` is 0, or if the template rejects these messages.
        """
        return _try_render(self.template, self.messages[:count], self.tools, prompt)

    def _find_content(self, index: int) -> Span | None:
        """Return the span of the content of message `index` in the text, or None if unknown."""
        if index not in self.content_spans:
            self.content_spans[index] = (
                self._locate_content(index) if 0 <= index < len(self.messages) else None
            )
        return self.content_spans[index]

    def _find_text_after_content(self, index: int, rendering: str | None) -> str | None:
        """Return the text after the content of message `index` in `rendering`.

        `rendering` is the rendered conversation up to and including message `index`. Returns None
        if `rendering` is None, or if the template rejects the messages.
        """
        changed = [*self.messages[:index], _replace_words(self.messages[index])]
        other = _try_render(self.template, changed, self.tools, False)
        if rendering is None or other is None:
            return None
        return rendering[_find_changed_span(rendering, other)[1] :]

    def _locate_content(self, index: int) -> Span | None:
        changed = [
            *self.messages[:index],
            _replace_words(self.messages[index]),
            *self.messages[index + 1 :],
        ]
        other = _try_render(self.template, changed, self.tools, False)
        if other is None or other == self.text:
            return None
        return _find_changed_span(self.text, other)

    def _find_next_content(self, index: int, at: int) -> int:
        """Return the position of the content of the first non-empty message after message `index`.

        The text is searched from position `at`. Returns `at` if there is no such message, and the
        end of the text if its content is not found.
        """
        words = (message["content"].strip() for message in self.messages[index + 1 :])
        position = self.text.find(next(filter(None, words), ""), at)
        return position if position >= 0 else len(self.text)

    def _find_header_end(self, header: str, position: int) -> int:
        """Return the end of the generation prompt `header`, which begins at `position`.

        If the text contains only the beginning of the generation prompt (for example because an
        empty think block is missing), returns the position at which the two diverge.
        """
        following = self.text[position:]
        shared = count_common_prefix(self.template.encode(header), self.template.encode(following))
        return position + _count_characters(self.template, following, shared)

    def _build_error(self, index: int, event: str) -> DataError:
        return DataError(
            f"the chat template of {self.template.name} renders message {index + 1} so that it "
            f"does not show where the "
            f"assistant's part {event}; put {{% generation %}} markers into the template"
        )


def _replace_words(message: Message) -> Message:
    """Return a copy of a message with `OTHER_WORDS` as content, reasoning and call arguments."""
    calls = message.get("tool_calls") or []
    keys = ([REASONING] if message.get(REASONING) else []) + (
        ["content"] if message["content"] or not calls else []
    )
    changed = {**message, **dict.fromkeys(keys, OTHER_WORDS)}
    if calls:
        functions = [{**call["function"], "arguments": {"x": OTHER_WORDS}} for call in calls]
        changed["tool_calls"] = [
            {**call, "function": f} for call, f in zip(calls, functions, strict=True)
        ]
    return changed


def _find_changed_span(text: str, other: str) -> Span:
    """Return the span of `text` in which it differs from `other`."""
    stop = len(text) - count_common_start(text[::-1], other[::-1])
    return min(count_common_start(text, other), stop), stop


def _try_render(
    template: TemplateFunctions, messages: Sequence[Message], tools: Any, prompt: bool
) -> str | None:
    try:
        return template.render(messages, tools, prompt) if messages else None
    except DataError:
        return None  # some templates refuse incomplete conversations


def _count_characters(template: TemplateFunctions, text: str, tokens: int) -> int:
    """Return the number of characters in the first `tokens` tokens of `text`."""
    encoding = template.offsets(text)
    if encoding is not None:
        return encoding[1][tokens][0] if tokens < len(encoding[1]) else len(text)
    low = 0
    high = len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if len(template.encode(text[:middle])) <= tokens else (low, middle - 1)
        )
    return low


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
        rendered_text: text of the turn as the template renders it
    """

    template: TemplateFunctions
    messages: Sequence[Message]
    tools: Any
    index: int
    rendered_text: str

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
            REASONING in lost or not has_text(self.rendered_text, message[REASONING])
        ):
            yield self._build_omission(
                REASONING,
                self._advise_on_reasoning(),
                find_missing_words(self.rendered_text, message[REASONING]),
            )
        # The content, or the reasoning at its beginning.
        if "content" in lost:
            yield self._build_omission(
                "content",
                self._advise_other_template(),
                find_missing_words(self.rendered_text, message["content"]),
            )
        else:
            thoughts = TAGS.split(message["content"].rpartition(END_OF_THOUGHT)[0])
            cut = []
            for thought in thoughts:
                if not has_text(self.rendered_text, thought):
                    cut.append(thought)
            if cut:
                yield self._build_omission(
                    f"what precedes {END_OF_THOUGHT} in content",
                    self._advise_on_content(),
                    find_missing_words(self.rendered_text, cut[0]),
                )
        # Arguments of tool calls.
        for number, call in enumerate(message.get("tool_calls") or ()):
            for path, value in iterate_arguments(call, number):
                if path in lost or not _has_argument(self.rendered_text, value):
                    named = re.sub(r"\[\d+\]", "[]", path)
                    yield self._build_omission(
                        named, self._advise_other_template(), shorten(str(value))
                    )

    def _build_omission(self, part: str, keep: str, example: str) -> TemplateOmission:
        return TemplateOmission(part, keep, self.template.name, self.index + 1, example)

    def _advise_on_reasoning(self) -> str:
        """Return advice on how to keep reasoning that is in a separate field."""
        other_fields = {}
        for key, value in self.message.items():
            if key != REASONING:
                other_fields[key] = value
        inside = {
            **other_fields,
            "content": f"<think>\n{MARK}\n</think>\n\n{other_fields['content']}",
        }
        if self._is_written_when_last({**self.message, REASONING: MARK}):
            return "let the row end with that turn"
        if self._is_written(inside):
            return f"write it into content, between <think> and {END_OF_THOUGHT}"
        return (
            f"{self._advise_other_template()} (such as {VERBATIM_TEMPLATE}, with "
            f"<think>...{END_OF_THOUGHT} in content)"
        )

    def _advise_on_content(self) -> str:
        """Return advice on how to keep the reasoning that the template omits.

        The reasoning is at the start of the message's content.
        """
        _, _, answer = self.message["content"].rpartition(END_OF_THOUGHT)
        separated = {**self.message, "content": answer.strip(), REASONING: MARK}
        inside = {**self.message, "content": f"<think>\n{MARK}\n</think>\n\n{answer.strip()}"}
        if self._is_written_when_last(inside):
            return "let the row end with that turn"
        if self._is_written(separated):
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


def count_common_prefix(*sequences: Sequence[int]) -> int:
    """Return the number of leading values that all sequences have in common."""
    shared = 0
    for column in zip(*sequences, strict=False):
        if any(value != column[0] for value in column):
            break
        shared += 1
    return shared


def count_common_start(text: str, other: str) -> int:
    """Return the number of leading characters that two texts have in common."""
    low = 0
    high = min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text[low:middle] == other[low:middle] else (low, middle - 1)
    return low
