"""Conversations: messages in one shape, and which tokens of a rendered conversation the assistant wrote.

Masks come from spans of the rendered text, never from token ids: for each assistant turn the template renders the messages
before it with its generation prompt (what the model sees when it is its turn), and the turn is what follows, up to and with the
token that ends it. A template with `{% generation %}` markers says so itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from weft.errors import DataError, nearest

Message = dict[str, Any]
Span = tuple[int, int]

ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "ipython": "tool",
    "function_call": "assistant",
}  # fmt: skip
REASONING = ("reasoning_content", "thinking")
KEPT = ("name", "tool_call_id", *REASONING)
REPLY = "weft-looks-for-this-reply"
MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


# -- messages in one shape


def normalise(messages: Any) -> list[Message]:
    """`[{role, content, ...}]` from `role/content` or `from/value` rows, roles by their usual names.

    `prompter` and `human` are the user, `gpt` and `bot` the assistant, `observation` a tool; content parts are joined; a
    `function_call` becomes `tool_calls`; `train: false` (or `weight: 0`, `loss_weight: 0`) keeps a turn out of the loss.
    Raises `DataError` saying which message is wrong and how. Applied twice it changes nothing.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise DataError(f"messages must be a list of {{role, content}}, not {type(messages).__name__}")
    if not messages:
        raise DataError("the list of messages is empty")
    return [_message(message, number) for number, message in enumerate(messages, 1)]


def normalise_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tool schemas as a list of mappings; a JSON text is read. Nothing (None, "", []) is None."""
    if isinstance(tools, str):
        tools = _json(tools, "tools") if tools.strip() else None
    if not tools:
        return None
    if isinstance(tools, Mapping):
        tools = [tools]
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError("tools must be a list of JSON schemas (or the JSON text of one)")
    return [dict(tool) for tool in tools]


def _message(message: Any, number: int) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"message {number} must be a mapping with role and content, not {type(message).__name__}")
    said = message.get("role", message.get("from"))
    if said is None:
        raise DataError(f"message {number} has no role (keys: {', '.join(map(str, message)) or 'none'})")
    role = ROLES.get(str(said).lower())
    if role is None:
        close = nearest(str(said).lower(), ROLES)
        raise DataError(f"message {number} has the unknown role {said!r}; {_hint(close)}")
    found: Message = {"role": role}
    content: Any = message.get("content", message.get("value"))
    calls = list(message.get("tool_calls") or [])
    if said == "function_call":
        calls, content = _calls(_json(content, f"message {number}: function_call")), ""
    if isinstance(content, Sequence) and not isinstance(content, str):
        content, reasoning, more = _parts(content, number)
        calls += more
        if reasoning:
            found["reasoning_content"] = reasoning
    if content is not None and not isinstance(content, str):
        raise DataError(f"message {number}: content must be text, not {type(content).__name__}")
    if content is None and not calls:
        raise DataError(f"message {number} has no content")
    found["content"] = content or ""
    if calls:
        found["tool_calls"] = [_call(call, number) for call in calls]
    found |= {key: message[key] for key in KEPT if message.get(key) is not None}
    if message.get("train") is False or 0 in (message.get("loss_weight"), message.get("weight")):
        found["train"] = False
    return found


def _hint(close: Sequence[str]) -> str:
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(sorted(ROLES))}"


def _parts(parts: Sequence[Any], number: int) -> tuple[str, str, list[Any]]:
    """(text, reasoning, tool calls) of a content given in parts."""
    text, reasoning, calls = [], [], []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        value = "" if kind is None else part.get("text", part.get("value", part.get("content", part.get(kind))))
        if kind == "text" and isinstance(value, str):
            text.append(value)
        elif kind in ("reasoning", "thinking") and isinstance(value, str):
            reasoning.append(value)
        elif kind in ("tool_call", "function_call"):
            calls += _calls(_json(value, f"message {number}: {kind}"))
        else:
            raise DataError(f"message {number}: a content part of type {kind!r} is no text; weft trains on text")
    return "".join(text), "".join(reasoning), calls


def _calls(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _call(call: Any, number: int) -> dict[str, Any]:
    """A tool call in the form that chat templates read: {type, function: {name, arguments}}, arguments as a mapping."""
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or "name" not in inner:
        raise DataError(f"message {number}: a tool call needs a name and arguments")
    arguments = inner.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments or "{}", f"message {number}: arguments of the tool call {inner['name']!r}")
    extra = {"id": call["id"]} if call.get("id") is not None else {}
    return {**extra, "type": "function", "function": {"name": inner["name"], "arguments": arguments}}


def _json(text: Any, what: str) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{what} is not JSON ({error})") from error


# -- what a template does


def template_problem(template: str) -> str | None:
    """Why a template does not compile, with the line, or None."""
    try:
        render_jinja_template([[{"role": "user", "content": "Hi"}]], chat_template=template)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError):
        return None  # it compiles; what it refuses shows with real messages
    return None


def generation_spans(
    template: str, messages: Sequence[Message], tools: Any, tokens: Mapping[str, Any]
) -> list[Span] | None:
    """Character spans of the `{% generation %}` blocks of a rendered conversation; None for a template without them."""
    if not MARKER.search(template):
        return None
    rendered: Any = render_jinja_template(
        [list(messages)], tools, chat_template=template, return_assistant_tokens_mask=True, **tokens
    )
    return [(int(a), int(b)) for a, b in rendered[1][0]]


@dataclass(frozen=True)
class Template:
    """A tokenizer's chat template as functions. `render(messages, tools, add_generation_prompt)` raises `DataError` where it
    refuses; `encode` gives ids; `offsets` ids with their characters, or None where the tokenizer cannot tell; `marked` the
    spans of the template's own markers; `turn_end` is the token after a reply."""

    render: Callable[[Sequence[Message], Any, bool], str]
    encode: Callable[[str], list[int]]
    offsets: Callable[[str], tuple[list[int], list[Span]] | None]
    marked: Callable[[Sequence[Message], Any], list[Span] | None]
    turn_end: str | None = None
    name: str = "the tokenizer"


def after_reply(render: Callable[[Sequence[Message], Any, bool], str]) -> str:
    """What a template writes after an assistant's reply. Raises `DataError` where it refuses to render one."""
    text = render([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": REPLY}], None, False)
    return text.partition(REPLY)[2]


# -- which tokens the assistant wrote


@dataclass(frozen=True)
class Masked:
    """The token ids of a conversation; `mask` is True on what is trained; `unused` names what the template does not render."""

    ids: list[int]
    mask: list[bool]
    unused: frozenset[str] = frozenset()


def mask_tokens(template: Template, messages: Sequence[Message], tools: Any) -> Masked:
    """A conversation's tokens, marked on the assistant's trained turns and their end tokens.

    A token that holds characters of both the template and the assistant is the assistant's: the generation prompt alone
    does not contain it. Raises `DataError` where a turn cannot be found, and where the template leaves out a trained turn's
    tool calls, or all that it says.
    """
    text = template.render(messages, tools, False)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    marked = template.marked(messages, tools)
    if marked is None:
        spans = assistant_spans(template, messages, tools, text)
    else:
        spans = [(a, _with_end(text, b, template.turn_end)) for a, b in marked]
        if len(spans) != len(turns):
            raise DataError(
                f"the chat template of {template.name} marks {len(spans)} parts with {{% generation %}}, and the assistant has "
                f"{len(turns)} turns; it must mark each of them once"
            )
    trained, unused = [], set[str]()
    for turn, (a, b) in zip(turns, spans, strict=True):
        if messages[turn].get("train", True):
            lost = _not_rendered(template, messages[turn], text[a:b], turn + 1)
            unused |= lost if turn == turns[-1] else set()  # of earlier turns many templates leave out the reasoning
            trained.append((a, b))
    return Masked(*mask_spans(template.encode, template.offsets, text, trained), frozenset(unused))


def _not_rendered(template: Template, message: Message, said: str, number: int) -> set[str]:
    """Fields of an assistant's message that are not in `said`, the turn as rendered.

    Raises `DataError` where these are tool calls, or where nothing of the message is left.
    """
    body = said.removesuffix(template.turn_end or "").strip()
    lost = set()
    if not all(call["function"]["name"] in body for call in message.get("tool_calls", ())):
        lost.add("tool_calls")
    lost |= {key for key in REASONING if message.get(key) and str(message[key]).strip() not in body}
    if "tool_calls" in lost or (not body and (lost or message["content"].strip())):
        what = " and ".join(sorted(lost)) or "content"
        raise DataError(
            f"message {number}: the chat template of {template.name} does not render the assistant's {what}, so the turn would "
            f"be learned without it; set tokenizer.chat_template to a template that does, or take {what} out of the row"
        )
    return {f"messages[].{key}" for key in lost}


def mask_spans(
    encode: Callable[[str], list[int]],
    offsets: Callable[[str], tuple[list[int], list[Span]] | None],
    text: str,
    spans: Sequence[Span],
) -> tuple[list[int], list[bool]]:
    """(ids, mask) of a text: True on tokens that hold any character of a span. `offsets` gives None where it cannot tell;
    then the boundary is the longest common token prefix with the text before the span."""
    found = offsets(text)
    if found is None:
        ids = encode(text)
        ranges = [tuple(common_prefix(encode(text[:at]), ids) for at in span) for span in spans]
        return ids, [any(a <= i < b for a, b in ranges) for i in range(len(ids))]
    ids, places = found
    mask = [False] * len(ids)
    for a, b in spans:
        for i, (start, stop) in enumerate(places):
            mask[i] = mask[i] or (start < b and stop > a) or (start == stop and a <= start < b)
    return ids, mask


def assistant_spans(template: Template, messages: Sequence[Message], tools: Any, text: str) -> list[Span]:
    """Characters [start, stop) of every assistant turn in the rendered `text`, its end token included."""
    spans, at = [], 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            found = text.find(message["content"].strip(), at)
            at = max(at, found + len(message["content"].strip()))
            continue
        start = _turn_start(template, messages[:index], tools, text, at, message["content"].strip())
        if start is None:
            raise DataError(
                f"the chat template renders message {index + 1} so that the assistant's part cannot be told from the rest; "
                "put {% generation %} markers into the template"
            )
        stop = _turn_stop(template, messages[: index + 1], tools, text, start)
        spans.append((start, stop))
        at = stop
    return spans


def _turn_start(
    template: Template, before: Sequence[Message], tools: Any, text: str, at: int, content: str
) -> int | None:
    """Where the assistant's turn after `before` begins; `at` is where the part before it is known to end."""
    shown = _try_render(template, before, tools, True)
    plain = _try_render(template, before, tools, False)
    if shown is not None and text.startswith(shown):
        start = len(shown)
        if shown != plain or not content:
            return start
        # The template knows no generation prompt: a header it writes before the reply is its own, white space is not.
        said = text.find(content, start)
        return said if said >= 0 and text[start:said].strip() else start
    if shown is None or plain is None or not shown.startswith(plain):
        said = text.find(content, at) if content else -1
        return said if said >= 0 else None
    if text.startswith(plain):
        # The generation prompt and the finished turn begin alike and then part (an empty think block, say).
        header = common_prefix(template.encode(shown), template.encode(text))
        return max(len(plain), _characters(template, text, header))
    header_at = text.find(shown[len(plain) :], at) if shown != plain else -1
    if header_at >= 0:
        return header_at + len(shown) - len(plain)
    said = text.find(content, at) if content else -1
    return said if said >= 0 else None


def _turn_stop(template: Template, until: Sequence[Message], tools: Any, text: str, start: int) -> int:
    """Where the assistant's turn that begins at `start` and is the last of `until` ends, its end token included."""
    end = template.turn_end
    shown = _try_render(template, until, tools, False)
    if shown is not None and text.startswith(shown):
        found = text.rfind(end, start, len(shown)) if end else -1
        return found + len(end) if end and found >= 0 else max(start, len(text[: len(shown)].rstrip()))
    found = text.find(end, start) if end else -1
    if end and found >= 0:
        return found + len(end)
    content = until[-1]["content"].strip()
    return max(start, text.find(content, start) + len(content))


def _try_render(template: Template, messages: Sequence[Message], tools: Any, prompt: bool) -> str | None:
    try:
        return template.render(messages, tools, prompt) if messages else None
    except DataError:
        return None  # some templates refuse a conversation that is only begun


def _with_end(text: str, stop: int, end: str | None) -> int:
    """`stop`, moved past the end token where that comes next."""
    rest = text[stop:].lstrip()
    return len(text) - len(rest) + len(end) if end and rest.startswith(end) else stop


def _characters(template: Template, text: str, tokens: int) -> int:
    """Characters that the first `tokens` tokens of `text` cover."""
    found = template.offsets(text)
    if found is not None:
        return found[1][tokens][0] if tokens < len(found[1]) else len(text)
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(template.encode(text[:middle])) <= tokens else (low, middle - 1)
    return low


def common_prefix(*sequences: Sequence[int]) -> int:
    """How many leading entries all sequences share."""
    shared = 0
    for column in zip(*sequences, strict=False):
        if any(value != column[0] for value in column):
            break
        shared += 1
    return shared
