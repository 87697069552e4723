"""Tokenize conversations with a mask of the assistant's tokens; report parts that templates omit.

Masks are computed from spans of the rendered text, never from token ids. If a template has `{%
generation %}` blocks, these are the assistant's text. For other templates, `weft.data.turns`
locates the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from weft.data import rendered, tokenizer_checks
from weft.data.messages import Message
from weft.data.tokenizer_checks import limit_time
from weft.data.turns import (
    Span,
    TemplateFunctions,
    TemplateOmission,
    TrainedTurn,
    count_common_prefix,
    find_assistant_spans,
    find_missing_words,
    merge_omissions,
)
from weft.errors import DataError
from weft.reading import explain_read_errors

UNTRAINED_MESSAGES = "messages[] after the last reply"
REFUSAL = "the chat template refuses these messages"
MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


def find_generation_spans(
    template: str, messages: Sequence[Message], tools: Any, tokens: Mapping[str, Any]
) -> list[Span] | None:
    """Render a conversation and return the character spans of its `{% generation %}` blocks.

    Returns None if the template has no such blocks. `tokens` maps names such as `bos_token` to the
    special tokens of the tokenizer.
    """
    if not MARKER.search(template):
        return None
    with explain_read_errors(REFUSAL, DataError), limit_time(tokenizer_checks.CONVERSATION_SECONDS):
        rendered: Any = render_jinja_template(
            [list(messages)],
            tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokens,
        )
    return [(int(a), int(b)) for a, b in rendered[1][0]]


@dataclass(frozen=True)
class MaskedConversation:
    """Tokenized conversation with a mask of the trained tokens.

    Attributes:
        ids: token ids of the whole conversation
        mask: True for each token that is trained on
        unused: names of the parts of the row that do not affect training, such as
            `messages[].name`
        cut: parts of trained turns that the chat template omits
    """

    ids: list[int]
    mask: list[bool]
    unused: frozenset[str] = frozenset()
    cut: tuple[TemplateOmission, ...] = ()


def mask_conversation(
    template: TemplateFunctions, messages: Sequence[Message], tools: Any
) -> MaskedConversation:
    """Tokenize a conversation, and mark the tokens to train on.

    These are the tokens of the assistant's turns, including the end tokens. Turns whose key `train`
    is False are left out. A token that contains characters of both the template and the assistant's
    text is trained on. Raises `DataError` if a turn cannot be located in the rendered text, or if
    the template omits essential parts of the conversation.
    """
    # Render the conversation and check that the template writes all of it.
    text = template.render(messages, tools, False)
    turns = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            turns.append(index)
    trained = []
    for index in turns:
        if messages[index].get("train", True):
            trained.append(index)
    lost = rendered.find_lost_fields(template.render, messages, tools, prompt=False)
    unused = rendered.check_lost_fields(lost, messages, template.name, trained)
    if trained and turns[-1] < len(messages) - 1:
        unused |= {UNTRAINED_MESSAGES}
    # Locate the trained turns in the text.
    marked = template.marked(messages, tools)
    if marked is None:
        spans = find_assistant_spans(template, messages, tools, text, trained)
    elif len(marked) != len(turns):
        raise DataError(
            f"the chat template of {template.name} marks {len(marked)} parts with {{% generation "
            f"%}}, and the assistant has "
            f"{len(turns)} turns; it must mark each of them once"
        )
    else:
        ends = [(a, _skip_end_token(text, b, template.turn_end)) for a, b in marked]
        spans = []
        for turn, span in zip(turns, ends, strict=True):
            if turn in trained:
                spans.append(span)
    # Collect the parts that the template omits from these turns.
    cut: list[TemplateOmission] = []
    for turn, (a, b) in zip(trained, spans, strict=True):
        turn_text = text[a:b]
        content = messages[turn]["content"]
        if (turn, "content") not in lost and not rendered.has_content(turn_text, content):
            part = find_missing_words(turn_text, content.rpartition(rendered.END_OF_THOUGHT)[2])
            raise rendered.build_not_rendered_error(
                messages[turn], turn, ["content"], template.name, part
            )
        fields = {field for index, field in lost if index == turn}
        cut += TrainedTurn(template, messages, tools, turn, turn_text).find_omissions(fields)
    return MaskedConversation(
        *mask_spans(template.encode, template.offsets, text, spans),
        unused,
        merge_omissions(cut),
    )


def mask_spans(
    encode: Callable[[str], list[int]],
    offsets: Callable[[str], tuple[list[int], list[Span]] | None],
    text: str,
    spans: Sequence[Span],
) -> tuple[list[int], list[bool]]:
    """Tokenize a text and return (ids, mask); the mask is True on tokens that overlap a span.

    `offsets` returns ids with the character range of each one, or None if the tokenizer cannot
    provide ranges. Without ranges, the text before each span boundary is tokenized separately, and
    its ids are compared with the ids of the whole text. The boundary is placed at the first token
    that differs.
    """
    encoding = offsets(text)
    if encoding is None:
        ids = encode(text)
        ranges = []
        for span in spans:
            ranges.append(
                tuple(count_common_prefix(encode(text[:position]), ids) for position in span)
            )
        return ids, [any(a <= i < b for a, b in ranges) for i in range(len(ids))]
    ids, places = encoding
    mask = [False] * len(ids)
    for a, b in spans:
        for i, (start, stop) in enumerate(places):
            mask[i] = mask[i] or (start < b and stop > a) or (start == stop and a <= start < b)
    return ids, mask


def insert_eos(
    ids: list[int], mask: list[bool], eos: int, decode: Callable[[Sequence[int]], str]
) -> tuple[list[int], list[bool]]:
    """Put a trained EOS after the last trained token, in place of any white space that follows.

    Returns (ids, mask). Both are unchanged if other text follows, if the last trained token is EOS,
    or if no token is trained.
    """
    last = len(mask) - mask[::-1].index(True) if any(mask) else 0
    if not last or ids[last - 1] == eos or decode(ids[last:]).strip():
        return ids, mask
    return [*ids[:last], eos], [*mask[:last], True]


def _skip_end_token(text: str, stop: int, end: str | None) -> int:
    """Return the position after the token `end` if it follows `stop` in the text, else `stop`."""
    following = text[stop:].lstrip()
    if end and following.startswith(end):
        return len(text) - len(following) + len(end)
    return stop
