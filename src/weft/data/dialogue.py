"""Dialogues as one text, `\\n\\nHuman: ...\\n\\nAssistant: ...` (the form of Anthropic's hh-rlhf): where the turns are."""

from __future__ import annotations

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"


def shared_prompt(one: str, other: str) -> str:
    """The beginning that two dialogues share, up to and with the last `\\n\\nAssistant:` in it; "" where there is none."""
    at = one.rfind(ASSISTANT, 0, _shared_length(one, other))
    return one[: at + len(ASSISTANT)] if at >= 0 else ""


def assistant_spans(text: str) -> list[tuple[int, int]]:
    """Characters [start, stop) of what the assistant says; the whole text where it has no turns."""
    spans, at = [], text.find(ASSISTANT)
    if at < 0:
        return [] if HUMAN in text else [(0, len(text))]
    while at >= 0:
        start = at + len(ASSISTANT)
        human = text.find(HUMAN, start)
        stop = human if human >= 0 else len(text)
        following = text.find(ASSISTANT, start)
        if 0 <= following < stop:
            stop = following
        spans.append((start, stop))
        at = following
    return spans


def shared_words(one: str, other: str) -> int:
    """Characters of the beginning that two texts share, whole words only."""
    length = min(_shared_length(one, other), len(one.rstrip()) - 1, len(other.rstrip()) - 1)
    while length > 0 and not one[length - 1].isspace():
        length -= 1
    return max(length, 0)


def _shared_length(one: str, other: str) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
