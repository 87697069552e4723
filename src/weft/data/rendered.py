"""What a chat template leaves out of a conversation, and what it makes of a plain reply."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.data.messages import REASONING, Message
from weft.errors import DataError

Render = Callable[[Sequence[Message], Any, bool], str]
Lost = list[tuple[int, str]]  # (index of a message, its field), or (-1, "tools")

REPLY = "weft-looks-for-this-reply"
PLAIN: Sequence[Message] = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": REPLY})
END_OF_THOUGHT = "</think>"
SYSTEM = ("system", "developer")


def around_reply(render: Render) -> tuple[str, str]:
    """What a template writes between the generation prompt and a plain reply, and after it; nothing where it refuses one."""
    try:
        text, prompt = render(PLAIN, None, False), render(PLAIN[:1], None, True)
    except DataError:
        return "", ""
    before, _, after = text.partition(REPLY)
    return before.removeprefix(prompt) if before.startswith(prompt) else "", after


def template_fault(render: Render) -> str | None:
    """Why a template cannot write conversations of texts, found by a plain one; None where it can, and where rows must tell."""
    try:
        plain = render(PLAIN, None, False)
    except DataError:
        plain = None
    if plain is not None and REPLY in plain:
        return None
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in PLAIN]
    try:
        if REPLY in render(parts, None, False):
            return "reads the content of a message as a list of parts, and leaves out one that is text"
    except DataError:
        pass
    return None if plain is None else "leaves out the words of a plain reply"


def left_out(render: Render, messages: Sequence[Message], tools: Any, *, prompt: bool) -> Lost:
    """Fields of messages that the template does not write, and ("tools") tool schemas that change nothing.

    Found by rendering the conversation with a mark in place of each content, reasoning and name of a function.
    """
    marked = [_marked(message, index) for index, message in enumerate(messages)]
    text = render(messages, tools, prompt)
    lost: Lost = [(-1, "tools")] if tools and text == render(messages, None, prompt) else []
    try:
        shown = render([message for message, _ in marked], tools, prompt)
    except DataError:  # it refuses other words; so these must stand in the text as they are
        return lost + [(i, field) for i, message in enumerate(messages) for field in _not_in(text, message)]
    return lost + [
        (index, field)
        for index, (_, marks) in enumerate(marked)
        for field, found in marks.items()
        if not all(mark in shown for mark in found)
    ]


def writes(text: str, content: str) -> bool:
    """Whether a rendered text holds a content, or what of it follows its thoughts; blanks and JSON quoting do not count."""
    said = content.rpartition(END_OF_THOUGHT)[2].strip()
    if said in text:
        return True
    bare = "".join(text.split())
    return any("".join(form.split()) in bare for form in (said, json.dumps(said, ensure_ascii=False)[1:-1]))


def check(lost: Lost, messages: Sequence[Message], name: str, last: int = -1) -> frozenset[str]:
    """What of a conversation is in no token, as columns are named. `last` is the last trained message: templates leave out the
    reasoning of earlier turns on purpose. `name` is the tokenizer's.

    Raises `DataError` where the model would not see what was said: the user's or a tool's words, the assistant's tool calls, or
    all that the assistant says.
    """
    told = {field for index, field in lost if index < 0}
    for index, message in enumerate(messages):
        fields = {field for number, field in lost if number == index}
        role = message["role"]
        if fields and role in SYSTEM:
            told.add(f"messages[] of the {role}")
        elif fields and (role != "assistant" or _is_needed(message, fields)):
            raise not_rendered(message, index, sorted(fields - set(REASONING) or fields), name)
        elif fields:
            told |= {f"messages[].{field}" for field in fields if field not in REASONING or index == last}
    return frozenset(told)


def not_rendered(message: Message, index: int, fields: Sequence[str], name: str) -> DataError:
    """The error for a message whose `fields` the template of the tokenizer `name` does not write."""
    what = " and ".join(fields)
    out = what if message["role"] == "assistant" else "the message"
    return DataError(
        f"message {index + 1}: the chat template of {name} does not render the {message['role']}'s {what}, so the model would "
        f"not see that; set tokenizer.chat_template to a template that does, or take {out} out of the row"
    )


def _is_needed(message: Message, fields: set[str]) -> bool:
    """Whether `fields` are what an assistant's turn is about: its tool calls, its words where it makes none, or all it has."""
    held = {key for key in ("content", "tool_calls", *REASONING) if message.get(key)}
    return "tool_calls" in fields or held <= fields or ("content" in fields and "tool_calls" not in held)


def _not_in(text: str, message: Message) -> list[str]:
    """Fields of a message that a rendered text does not hold."""
    named = all(call["function"]["name"] in text for call in message.get("tool_calls") or ())
    return ([] if writes(text, message["content"]) else ["content"]) + ([] if named else ["tool_calls"])


def _marked(message: Message, index: int) -> tuple[Message, Mapping[str, Sequence[str]]]:
    """A message with marks in place of its words, and the marks by field."""
    words = [key for key in ("content", *REASONING) if str(message.get(key) or "").strip()]
    marks: dict[str, list[str]] = {key: [f"weft{index}{key.replace('_', '')}weft"] for key in words}
    marked = {**message, **{key: mark for key, (mark,) in marks.items()}}
    calls = message.get("tool_calls") or ()
    if calls:
        marks["tool_calls"] = [f"weft{index}call{number}weft" for number in range(len(calls))]
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "name": mark}}
            for call, mark in zip(calls, marks["tool_calls"], strict=True)
        ]
    return marked, marks
