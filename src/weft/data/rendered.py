"""Detection of the parts of a conversation that a chat template does not render."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache
from typing import Any

from weft.data.messages import REASONING, REASONING_KEYS, Message
from weft.errors import DataError

Render = Callable[[Sequence[Message], Any, bool], str]
Lost = list[tuple[int, str]]  # (index of a message, its field), or (-1, "tools")

REPLY = "weft-looks-for-this-reply"  # probe text that a template either renders or omits
PLAIN: Sequence[Message] = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": REPLY},
)
END_OF_THOUGHT = "</think>"
SYSTEM_ROLES = ("system", "developer")
# Field name in `Lost` for a content of which only a part is missing.
IN_PART = "content in part"


@cache
def find_reasoning_key(template: str) -> str:
    """Return the message key under which a chat template expects reasoning, such as `thinking`.

    Returns `REASONING` if the template uses none of the known keys.
    """
    read = (key for key in REASONING_KEYS if re.search(rf"[.'\"]{key}\b", template))
    return next(read, REASONING)


def rename_reasoning_key(messages: Iterable[Mapping[str, Any]], template: str) -> list[Message]:
    """Return copies of the messages, with reasoning moved to the key that the template expects."""
    key = find_reasoning_key(template)
    renamed: list[Message] = []
    for message in messages:
        renamed.append(
            {key if name == REASONING else name: value for name, value in message.items()}
        )
    return renamed


def find_text_around_reply(render: Render) -> tuple[str, str]:
    """Return the texts that a template renders directly before and after a reply without reasoning.

    The first text, for example an empty think block, is between the generation prompt and the
    reply. The second one begins with the token that ends the turn, if there is one. Both texts are
    empty if the template rejects a conversation of one question and one reply.
    """
    try:
        text = render(PLAIN, None, False)
        prompt = render(PLAIN[:1], None, True)
    except DataError:
        return "", ""
    before, _, after = text.partition(REPLY)
    return before.removeprefix(prompt) if before.startswith(prompt) else "", after


def find_template_fault(render: Render) -> str | None:
    """Describe the fault of a chat template. Returns None if no fault is found.

    The check renders a short conversation. The template has a fault if it omits the text of a
    reply, or if it includes the text only when contents are lists of parts instead of strings.
    Errors raised by the template are not faults, since it may still accept the user's
    conversations.
    """
    try:
        plain = render(PLAIN, None, False)
    except DataError:
        plain = None
    if plain is not None and REPLY in plain:
        return None
    parts = []
    for message in PLAIN:
        parts.append({**message, "content": [{"type": "text", "text": message["content"]}]})
    try:
        if REPLY in render(parts, None, False):
            return (
                "reads the content of a message as a list of parts, and leaves out one that is text"
            )
    except DataError:
        pass
    return None if plain is None else "leaves out the words of a plain reply"


def find_lost_fields(
    render: Render, messages: Sequence[Message], tools: Any, *, prompt: bool
) -> Lost:
    """Return (message index, field) for each message field that the template does not render.

    Replaces each content, reasoning, argument and function name by a unique mark and searches the
    rendered text for these marks. Arguments of tool calls are named by their path. The pair (-1,
    "tools") means that the tool schemas have no effect on the text. If `prompt` is True, the
    conversation is rendered with a generation prompt.
    """
    marked = [_mark_message(message, index) for index, message in enumerate(messages)]
    text = render(messages, tools, prompt)
    if tools and text == render(messages, None, prompt):
        lost: Lost = [(-1, "tools")]
    else:
        lost = []
    try:
        marked_text = render([message for message, _ in marked], tools, prompt)
    except DataError:  # the template refuses marks: search the text for the messages themselves
        for index, message in enumerate(messages):
            if not has_content(text, message["content"]):
                lost.append((index, "content"))
            calls = message.get("tool_calls") or ()
            if not all(call["function"]["name"] in text for call in calls):
                lost.append((index, "tool_calls"))
        return lost
    # Collect the fields whose marks are missing.
    for index, (_, marks) in enumerate(marked):
        missing = {path for path, mark in marks.items() if mark not in marked_text}
        fields = []
        for path in marks:
            if path in missing and path not in _list_calls(marks):
                fields.append(path)
        if any(_is_lost(call, marks, missing) for call in _list_calls(marks)):
            fields = [
                *(path for path in fields if not path.startswith("tool_calls[")),
                "tool_calls",
            ]
        content = messages[index]["content"]
        if (
            messages[index]["role"] != "assistant"
            and "content" not in missing
            and not has_text(text, content)
        ):
            fields.append(IN_PART)
        for field in fields:
            lost.append((index, field))
    return lost


def _list_calls(marks: Mapping[str, str]) -> list[str]:
    """Return the paths in `marks` that refer to whole tool calls, such as `tool_calls[0]`.

    Paths of single arguments are left out.
    """
    calls: list[str] = []
    for path in marks:
        if path.startswith("tool_calls[") and "." not in path:
            calls.append(path)
    return calls


def _is_lost(call: str, marks: Mapping[str, str], missing: Set[str]) -> bool:
    """Return whether a tool call's function name or all of its arguments were not rendered.

    `call` is the path of the tool call in the message, such as `tool_calls[0]`. The keys of `marks`
    are the paths of all texts in the message, and `missing` are the paths of those that the
    rendered text does not contain.
    """
    arguments = [path for path in marks if path.startswith(f"{call}.")]
    return call in missing or (bool(arguments) and missing >= set(arguments))


def has_content(text: str, content: str) -> bool:
    """Return whether a rendered text contains the content of a message.

    Reasoning at the beginning of the content may be missing from the text. Differences in white
    space and quoting are ignored.
    """
    return has_text(text, content.rpartition(END_OF_THOUGHT)[2])


def has_text(text: str, content: str) -> bool:
    """Return whether a rendered text contains `content`.

    Differences in white space are ignored. `content` can be escaped in the text as in a JSON or
    Python string.
    """
    stripped_content = content.strip()
    if stripped_content in text:
        return True
    forms = (
        stripped_content,
        *(json.dumps(stripped_content, ensure_ascii=ascii)[1:-1] for ascii in (False, True)),
        repr(stripped_content)[1:-1],
    )
    packed = remove_whitespace(text)
    return any(remove_whitespace(form) in packed for form in forms)


def remove_whitespace(text: str) -> str:
    """Return a text without its white space."""
    return "".join(text.split())


def check_lost_fields(
    lost: Lost, messages: Sequence[Message], name: str, trained: Sequence[int] = ()
) -> frozenset[str]:
    """Return the names of the parts of a conversation that are not represented by any token.

    `lost` is the result of `find_lost_fields`, and `name` is the name of the tokenizer. The
    returned names have the form `messages[].content`. Parts of the `trained` messages are left out,
    since they are reported separately. The reasoning of other turns is left out too, since
    templates omit it on purpose.

    Raises `DataError` if the model would not see an essential part: a text of the user or of a
    tool, a tool call of the assistant, or a whole turn of the assistant.
    """
    lost_parts = {field for index, field in lost if index < 0}
    for index, message in enumerate(messages):
        fields = {field for number, field in lost if number == index}
        role = message["role"]
        if IN_PART in fields:
            lost_parts.add(f"messages[] of the {role}, a part of content")
        elif fields and role in SYSTEM_ROLES:
            lost_parts.add(f"messages[] of the {role}")
        elif fields and (role != "assistant" or _is_needed(message, fields)):
            raise build_not_rendered_error(
                message, index, sorted(fields - {REASONING} or fields), name
            )
        elif index not in trained:
            for field in fields - {REASONING}:
                lost_parts.add(f"messages[].{field}")
    return frozenset(lost_parts)


def build_not_rendered_error(
    message: Message, index: int, fields: Sequence[str], name: str, part: str = ""
) -> DataError:
    """Return the error for a message whose `fields` the template does not render.

    `name` is the name of the tokenizer. If only a part of a field is missing, `part` is the missing
    text.
    """
    field_list = " and ".join(fields)
    removed = field_list if message["role"] == "assistant" else "the message"
    missing = f" as it is ({part!r} is missing)" if part else ""
    return DataError(
        f"message {index + 1}: the chat template of {name} does not render the "
        f"{message['role']}'s {field_list}{missing}, so the "
        f"model would not see that; set tokenizer.chat_template to a template that does, or take "
        f"{removed} out of the row"
    )


def _is_needed(message: Message, fields: set[str]) -> bool:
    """Return whether `fields` include an essential part of an assistant's turn.

    Tool calls are essential, and so is the content if there are no tool calls. Also returns True if
    `fields` include everything that the turn contains.
    """
    present = set()
    for key in ("content", "tool_calls", REASONING):
        if message.get(key):
            present.add(key)
    return (
        "tool_calls" in fields
        or present <= fields
        or ("content" in fields and "tool_calls" not in present)
    )


def _mark_message(message: Message, index: int) -> tuple[Message, Mapping[str, str]]:
    """Replace each text of a message by a unique mark, and return (changed copy, marks by path)."""
    keys = [key for key in ("content", REASONING) if str(message.get(key) or "").strip()]
    marks = {key: f"weft{index}{key.replace('_', '')}weft" for key in keys}
    marked = {**message, **marks}
    marked_calls = []
    for number, call in enumerate(message.get("tool_calls") or ()):
        mark = f"weft{index}call{number}"
        marks[f"tool_calls[{number}]"] = f"{mark}weft"
        argument_marks = {}
        for argument_index, (path, _) in enumerate(iterate_arguments(call, number)):
            argument_marks[path] = f"{mark}part{argument_index}weft"
        marks |= argument_marks
        function = {
            **call["function"],
            "name": f"{mark}weft",
            "arguments": _replace_leaves(
                call["function"]["arguments"], iter(argument_marks.values())
            ),
        }
        marked_calls.append({**call, "function": function})
    return ({**marked, "tool_calls": marked_calls} if marked_calls else marked), marks


def iterate_arguments(call: Mapping[str, Any], number: int) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for each scalar value in the arguments of a tool call.

    `number` is the index of the call in the message.
    """
    return _iterate_leaves(call["function"]["arguments"], f"tool_calls[{number}].arguments")


def _iterate_leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _iterate_leaves(item, f"{path}.{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _iterate_leaves(item, f"{path}[{number}]")
    else:
        yield path, value


def _replace_leaves(value: Any, marks: Iterator[str]) -> Any:
    """Return a copy of `value` with each scalar replaced by the next mark from `marks`.

    The marks must be in the order in which `_iterate_leaves` yields the scalars.
    """
    if isinstance(value, Mapping):
        return {key: _replace_leaves(item, marks) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_leaves(item, marks) for item in value]
    return next(marks)
