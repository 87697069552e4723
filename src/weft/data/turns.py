"""Location of the assistant's turns in a rendered conversation.

A turn begins after the generation prompt, the text that a template appends for the model to
continue. The generation prompt is found by rendering the messages before the turn. Many templates
render a turn differently if other turns follow (they leave out reasoning, use another end token, or
move tools to a later place). Such a turn is located by rendering the conversation again with other
words in place of the message's text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.data.lengths import count_common_end, count_common_prefix, count_common_start
from weft.data.messages import REASONING, Message
from weft.data.rendered import has_content
from weft.errors import DataError

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
    option: str = "tokenizer"  # prefix of this tokenizer's options, as a user writes them


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
    talk = _RenderedConversation(template, messages, tools, text)
    spans: list[Span] = []
    for index in turns:
        start = talk.find_start(index, spans[-1][1] if spans else 0)
        spans.append((start, talk.find_stop(index, start)))
    return spans


@dataclass(frozen=True)
class _RenderedConversation:
    """Conversation and its rendered text, with methods that find each turn's position in the text."""

    template: TemplateFunctions
    messages: Sequence[Message]
    tools: Any
    text: str
    words: dict[int, Span | None] = field(default_factory=dict)  # spans found so far, by message

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
        # The template has no generation prompt, or refuses these messages: use the texts around.
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
        rest = text[content_span[1] : limit]
        closing = self._find_text_after_content(index, rendering)
        if closing is not None and rest.startswith(closing.rstrip()):
            return content_span[1] + len(closing.rstrip())
        # A turn followed by others can end differently: with the usual token after other text, or
        # with another token directly after the turn's text.
        if end and end in rest:
            token: str | None = end
        else:
            token = find_leading_token(rest.lstrip(CLOSING), self.template.added)
        if end is None or token is None:
            raise self._build_error(index, "ends")
        return content_span[1] + rest.find(token) + len(token)

    def _skip_header(self, index: int, at: int) -> int:
        """Return the start of turn `index` for a template that has no generation prompt.

        `at` is the end of the text of the earlier messages. Any text other than white space between
        `at` and the turn's content is a header, which is skipped: the turn starts at its content.
        Without a header, or if the content is empty or cannot be found, the turn starts at `at`.
        """
        content_span = self._find_content(index)
        content = self.messages[index]["content"]
        if (
            content_span is None
            or not content.strip()
            or not has_content(self.text[slice(*content_span)], content)
        ):
            return at
        return content_span[0] if self.text[at : content_span[0]].strip() else at

    def _render_beginning(self, count: int, *, prompt: bool) -> str | None:
        """Render only the first `count` messages, with a generation prompt if `prompt` is set.

        Returns None if `count` is 0, or if the template rejects these messages.
        """
        return _try_render(self.template, self.messages[:count], self.tools, prompt)

    def _find_content(self, index: int) -> Span | None:
        """Return the span of the content of message `index` in the text, or None if unknown."""
        if index not in self.words:
            self.words[index] = (
                self._locate_content(index) if 0 <= index < len(self.messages) else None
            )
        return self.words[index]

    def _find_text_after_content(self, index: int, rendering: str | None) -> str | None:
        """Return the text after the content of message `index` in `rendering`.

        `rendering` is the rendered conversation up to and including message `index`. Returns None
        if `rendering` is None, or if the template rejects the messages.
        """
        talk = [*self.messages[:index], _replace_words(self.messages[index])]
        other = _try_render(self.template, talk, self.tools, False)
        if rendering is None or other is None:
            return None
        return rendering[_find_changed_span(rendering, other)[1] :]

    def _locate_content(self, index: int) -> Span | None:
        talk = [
            *self.messages[:index],
            _replace_words(self.messages[index]),
            *self.messages[index + 1 :],
        ]
        other = _try_render(self.template, talk, self.tools, False)
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

    def _find_header_end(self, header: str, at: int) -> int:
        """Return the end of the generation prompt `header`, which begins at `at`.

        If the text contains only the beginning of the generation prompt (for example because an
        empty think block is missing), returns the position at which the two diverge.
        """
        rest = self.text[at:]
        shared = count_common_prefix(self.template.encode(header), self.template.encode(rest))
        return at + _count_characters(self.template, rest, shared)

    def _build_error(self, index: int, where: str) -> DataError:
        return DataError(
            f"the chat template of {self.template.name} renders message {index + 1} so that it "
            f"does not show where the "
            f"assistant's part {where}; put {{% generation %}} markers into the template"
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
    stop = len(text) - count_common_end(text, other)
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
