"""Conversations as tokens: which of them the assistant wrote, and what of the messages is in none.

Masks come from spans of the rendered text, never from token ids. A template with `{% generation %}`
markers says itself what the assistant writes; for others see `turns.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from weft.data import cuts, rendered, template_check
from weft.data.cuts import Cut
from weft.data.messages import Message
from weft.data.prefix import common_prefix
from weft.data.template_check import within
from weft.data.turns import Span, Template, assistant_spans
from weft.errors import DataError
from weft.reading import reading

UNTRAINED = "messages[] after the last reply"
REFUSES = "the chat template refuses these messages"
MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


def generation_spans(
    template: str, messages: Sequence[Message], tools: Any, tokens: Mapping[str, Any]
) -> list[Span] | None:
    """Character spans of the `{% generation %}` blocks of a rendered conversation; None for a
    template without them.
    """
    if not MARKER.search(template):
        return None
    with reading(REFUSES, DataError), within(template_check.CONVERSATION_SECONDS):
        rendered: Any = render_jinja_template(
            [list(messages)],
            tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokens,
        )
    return [(int(a), int(b)) for a, b in rendered[1][0]]


@dataclass(frozen=True)
class Masked:
    """The token ids of a conversation; `mask` is True on what is trained; `unused` names what of
    the row is in no token, `cut` the parts of trained turns that are in none.
    """

    ids: list[int]
    mask: list[bool]
    unused: frozenset[str] = frozenset()
    cut: tuple[Cut, ...] = ()


def mask_tokens(template: Template, messages: Sequence[Message], tools: Any) -> Masked:
    """A conversation's tokens, marked on the assistant's trained turns and their end tokens.

    A token that holds characters of both the template and the assistant is the assistant's: the
    generation prompt alone does not contain it. Raises `DataError` where a turn cannot be found,
    and where the template leaves out what was said.
    """
    text = template.render(messages, tools, False)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [index for index in turns if messages[index].get("train", True)]
    lost = rendered.left_out(template.render, messages, tools, prompt=False)
    unused = rendered.check(lost, messages, template.name, trained)
    if trained and turns[-1] < len(messages) - 1:
        unused |= {UNTRAINED}
    marked = template.marked(messages, tools)
    if marked is None:
        spans = assistant_spans(template, messages, tools, text, trained)
    elif len(marked) != len(turns):
        raise DataError(
            f"the chat template of {template.name} marks {len(marked)} parts with {{% generation "
            f"%}}, and the assistant has "
            f"{len(turns)} turns; it must mark each of them once"
        )
    else:
        ends = [(a, _with_end(text, b, template.turn_end)) for a, b in marked]
        spans = [span for turn, span in zip(turns, ends, strict=True) if turn in trained]
    cut: list[Cut] = []
    for turn, (a, b) in zip(trained, spans, strict=True):
        written = text[a:b]
        content = messages[turn]["content"]
        if (turn, "content") not in lost and not rendered.writes(written, content):
            part = cuts.missing(written, content.rpartition(rendered.END_OF_THOUGHT)[2])
            raise rendered.not_rendered(messages[turn], turn, ["content"], template.name, part)
        fields = {field for index, field in lost if index == turn}
        cut += cuts.Turn(template, messages, tools, turn, written).cuts(fields)
    return Masked(
        *mask_spans(template.encode, template.offsets, text, spans), unused, cuts.joined(cut)
    )


def mask_spans(
    encode: Callable[[str], list[int]],
    offsets: Callable[[str], tuple[list[int], list[Span]] | None],
    text: str,
    spans: Sequence[Span],
) -> tuple[list[int], list[bool]]:
    """(ids, mask) of a text: True on tokens that hold any character of a span.

    `offsets` gives None where it cannot tell; then the boundary is the longest common token prefix
    with the text before the span.
    """
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


def ended(
    ids: list[int], mask: list[bool], eos: int, decode: Callable[[Sequence[int]], str]
) -> tuple[list[int], list[bool]]:
    """The conversation with EOS after its last reply, where nothing but blanks follows."""
    last = len(mask) - mask[::-1].index(True) if any(mask) else 0
    if not last or ids[last - 1] == eos or decode(ids[last:]).strip():
        return ids, mask
    return [*ids[:last], eos], [*mask[:last], True]


def _with_end(text: str, stop: int, end: str | None) -> int:
    """`stop`, moved past the end token where that comes next."""
    rest = text[stop:].lstrip()
    if end and rest.startswith(end):
        return len(text) - len(rest) + len(end)
    return stop
