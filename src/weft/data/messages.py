"""Normalization of messages (role names, texts, tool calls), and system texts added to them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.errors import DataError, find_nearest
from weft.reading import shorten

Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "ipython": "tool",
    "function_call": "assistant",
}
REASONING = "reasoning_content"  # key of reasoning in normalised messages
# Keys of reasoning in rows and chat templates.
REASONING_KEYS = (REASONING, "reasoning", "thinking")
# Keys of language and labels of a reply.
FACTS = ("lang", "quality", "humor", "creativity")
CONTEXT = "context"
COPIED_KEYS = ("name", "tool_call_id", *FACTS, CONTEXT)
WEIGHTS = ("train", "weight", "loss_weight")  # keys that state whether a turn is trained
SWITCHES = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
READ_KEYS = frozenset(
    {
        "role",
        "from",
        "content",
        "value",
        "tool_calls",
        "function_call",
        *REASONING_KEYS,
        *COPIED_KEYS,
        *WEIGHTS,
    }
)
READ_KEYS_OF_CALLS = frozenset({"id", "type", "function", "name", "arguments"})
READ_KEYS_OF_PARTS = frozenset({"type", "text", "value", "content"})

_unread: ContextVar[set[str] | None] = ContextVar("unread", default=None)


@contextmanager
def track_unread_keys() -> Iterator[set[str]]:
    """Collect the message keys that `normalize_messages` ignores while the context is active.

    Yields a set, to which each ignored key is added as `messages[].KEY`.
    """
    unread_keys: set[str] = set()
    token = _unread.set(unread_keys)
    try:
        yield unread_keys
    finally:
        _unread.reset(token)


def normalize_messages(messages: Any) -> list[Message]:
    """Convert messages to the form `[{role, content, ...}]` with the usual role names.

    Reads messages with the keys `role/content` or `from/value`. The roles `prompter` and `human`
    become `user`, `gpt` and `bot` become `assistant`, and `observation` becomes `tool`. If content
    is a list of parts, the parts are joined. A `function_call`, given as a role or as OpenAI's
    older key, becomes `tool_calls`. `reasoning` or `thinking` becomes `reasoning_content`. A turn
    with `weight: 0` or `loss_weight: 0` gets `train: false`, which excludes it from the loss.
    Messages that are already normalized are returned unchanged. Raises `DataError` naming the
    invalid message and the problem.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise DataError(
            f"messages must be a list of {{role, content}}, not {type(messages).__name__}"
        )
    if not messages:
        raise DataError("the list of messages is empty")
    return [_normalize_message(message, number) for number, message in enumerate(messages, 1)]


def normalize_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Convert tool schemas to the form of chat templates, `[{type, function: {name, ...}}]`.

    A JSON text is parsed, and the bare schema of a function is wrapped. Empty values (None, "", [])
    become None.
    """
    if isinstance(tools, str):
        tools = _parse_json(tools, "tools") if tools.strip() else None
    if not tools:
        return None
    if isinstance(tools, Mapping):
        tools = [tools]
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError("tools must be a list of JSON schemas (or the JSON text of one)")
    return [_normalize_tool(tool) for tool in tools]


def _normalize_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if "function" in tool or "name" not in tool:
        return dict(tool)
    return {
        "type": "function",
        "function": {key: value for key, value in tool.items() if key != "type"},
    }


def _normalize_message(message: Any, number: int) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(
            f"message {number} must be a mapping with role and content, not "
            f"{type(message).__name__}"
        )
    # Role.
    given_role = _find_first(message, "role", "from")
    if given_role is None:
        raise DataError(
            f"message {number} has no role (keys: {', '.join(map(str, message)) or 'none'})"
        )
    role = ROLES.get(str(given_role).lower())
    if role is None:
        close = find_nearest(str(given_role).lower(), ROLES)
        if close:
            hint = f"did you mean {' or '.join(close)}?"
        else:
            hint = f"known: {', '.join(sorted(ROLES))}"
        raise DataError(f"message {number} has the unknown role {given_role!r}; {hint}")
    normalized: Message = {"role": role}
    # Tool calls, under one of two keys or as the role `function_call`.
    content: Any = _find_first(message, "content", "value")
    calls = list(message.get("tool_calls") or [])
    if message.get("function_call"):
        called = _read_calls(
            _parse_json(message["function_call"], f"message {number}: function_call")
        )
        functions = []
        for listed in (calls, called):
            functions.append([_normalize_call(call, number)["function"] for call in listed])
        if calls and functions[0] != functions[1]:
            raise DataError(
                f"message {number}: tool_calls and function_call hold different calls; keep one "
                f"of them"
            )
        calls = calls or called
    if given_role == "function_call":
        calls = _read_calls(_parse_json(content, f"message {number}: function_call"))
        content = ""
    # Reasoning, and content given as text or in parts.
    thoughts = {}
    for key in REASONING_KEYS:
        if message.get(key) not in (None, ""):
            thoughts[key] = message[key]
    if isinstance(content, Sequence) and not isinstance(content, str):
        content, reasoning, content_calls = _split_parts(content, number)
        calls += content_calls
        if reasoning:
            thoughts["content"] = reasoning
    if content is not None and not isinstance(content, str):
        raise DataError(f"message {number}: content must be text, not {type(content).__name__}")
    if content is None and not calls:
        raise DataError(f"message {number} has no content")
    normalized["content"] = content or ""
    if calls:
        normalized["tool_calls"] = [_normalize_call(call, number) for call in calls]
    if thoughts:
        normalized[REASONING] = _read_reasoning(thoughts, number)
    for key in COPIED_KEYS:
        if message.get(key) is not None:
            normalized[key] = message[key]
    if not _is_trained(message, role, number):
        normalized["train"] = False
    _note_unread(message, READ_KEYS, "messages[].")
    return normalized


def _read_reasoning(thoughts: Mapping[str, Any], number: int) -> str:
    """Return the reasoning of message `number` from `thoughts`, which maps keys to texts.

    Raises `DataError` if several keys have different texts, or if a value is not a text.
    """
    for key, text in thoughts.items():
        if not isinstance(text, str):
            raise DataError(f"message {number}: {key} must be text, not {type(text).__name__}")
    texts = set(thoughts.values())
    if len(texts) > 1:
        raise DataError(
            f"message {number}: {' and '.join(thoughts)} hold different thoughts; keep one of them"
        )
    return str(texts.pop())


def _is_trained(message: Mapping[str, Any], role: str, number: int) -> bool:
    """Return whether a message is allowed to contribute to the loss.

    Returns False if the message's key `train`, `weight` or `loss_weight` is 0 or false, and True
    otherwise. Weights other than 0 and 1 are not supported. Raises `DataError` naming the message
    by its `number` if an assistant message has such a weight, or has keys that contradict each
    other.
    """
    weights = {}
    for key in WEIGHTS:
        if message.get(key) is not None:
            weights[key] = message[key]
    switches = {key: SWITCHES.get(str(value).strip().lower()) for key, value in weights.items()}
    if role != "assistant":
        unread = _unread.get()
        if unread is not None:
            unread.update(
                f"messages[].{key} of the {role}" for key, on in switches.items() if on is not False
            )
        return False not in switches.values()
    for key, on in switches.items():
        if on is None:
            raise DataError(
                f"message {number}: {key}={shorten(repr(weights[key]))}: weft trains a turn of "
                f"the assistant whole or not at "
                f"all; write 1 (true) or 0 (false)"
            )
    if len(set(switches.values())) > 1:
        listed = " and ".join(f"{key}={weights[key]!r}" for key in weights)
        raise DataError(f"message {number}: {listed} contradict each other; keep one of them")
    return False not in switches.values()


def _note_unread(message: Mapping[Any, Any], read: frozenset[str], prefix: str) -> None:
    """Record the non-empty keys of a message that are not in `read`.

    They are added, preceded by `prefix`, to the set of the active `track_unread_keys` context.
    Without such a context, nothing is recorded.
    """
    unread = _unread.get()
    if unread is not None:
        nonempty = (str(key) for key, value in message.items() if value not in (None, "", [], {}))
        unread.update(f"{prefix}{key}" for key in nonempty if key not in read)


def _find_first(message: Mapping[Any, Any], *keys: str) -> Any:
    """Return the first value under `keys` that is not null, or None.

    Null values are skipped because files with mixed rows have nulls for missing keys.
    """
    return next((message[key] for key in keys if message.get(key) is not None), None)


def _split_parts(parts: Sequence[Any], number: int) -> tuple[str, str, list[Any]]:
    """Split a message content that is a list of parts into (text, reasoning, tool calls).

    `number` is the number of the message, for error messages.
    """
    text = []
    reasoning = []
    calls = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind is None:
            value = ""
        else:
            value = part.get("text", part.get("value", part.get("content", part.get(kind))))
        if kind == "text" and isinstance(value, str):
            text.append(value)
        elif kind in ("reasoning", "thinking") and isinstance(value, str):
            reasoning.append(value)
        elif kind in ("tool_call", "function_call"):
            calls += _read_calls(_parse_json(value, f"message {number}: {kind}"))
        else:
            raise DataError(
                f"message {number}: a content part of type {kind!r} is not text; weft trains on "
                f"text"
            )
        _note_unread(part, READ_KEYS_OF_PARTS | {kind}, "messages[].content[].")
    return "".join(text), "".join(reasoning), calls


def _read_calls(value: Any) -> list[Any]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return [value]


def _normalize_call(call: Any, number: int) -> dict[str, Any]:
    """Convert a tool call to the form that chat templates expect.

    The form is `{type, function: {name, arguments}}`, where the arguments are a mapping. `number`
    is the number of the message, for error messages.
    """
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or "name" not in inner:
        raise DataError(f"message {number}: a tool call needs a name and arguments")
    arguments = inner.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parse_json(
            arguments or "{}", f"message {number}: arguments of the tool call {inner['name']!r}"
        )
    _note_unread(call, READ_KEYS_OF_CALLS, "messages[].tool_calls[].")
    if inner is not call:
        _note_unread(inner, READ_KEYS_OF_CALLS, "messages[].tool_calls[].function.")
    extra = {"id": call["id"]} if call.get("id") is not None else {}
    return {
        **extra,
        "type": "function",
        "function": {"name": inner["name"], "arguments": arguments},
    }


def _parse_json(text: Any, label: str) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{label} is not JSON ({error})") from error


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
            conversation = []
            for message in messages:
                if message["role"] == "assistant":
                    tag = format_tag(message, draw, self.dropout, length=self.length)
                    if tag:
                        conversation.append({"role": "system", "content": tag})
                conversation.append(message)
        return conversation if self.prefix is None else prepend_prefix(conversation, self.prefix)


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
