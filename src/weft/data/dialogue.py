"""Dialogues as one text, `\\n\\nHuman: ...\\n\\nAssistant: ...` (the form of Anthropic's hh-rlhf):
where the turns are.
"""

from __future__ import annotations

from weft.data.prefix import common_start

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"


def shared_prompt(one: str, other: str) -> str:
    """The beginning that two dialogues share, up to and with the last `\\n\\nAssistant:` in it; ""
    where there is none.
    """
    at = one.rfind(ASSISTANT, 0, common_start(one, other))
    return one[: at + len(ASSISTANT)] if at >= 0 else ""


def assistant_spans(text: str) -> list[tuple[int, int]]:
    """Characters [start, stop) of what the assistant says; the whole text where it has no turns."""
    spans = []
    at = text.find(ASSISTANT)
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


def messages(text: str) -> list[dict[str, str]]:
    """The turns of a dialogue as chat messages, what stands before the first one as the system's.

    A turn without words is left out, unless it is the last and the assistant's: that one is about
    to begin, or a reply of none.
    """
    marks = [
        (at, role, mark)
        for mark, role in ((HUMAN, "user"), (ASSISTANT, "assistant"))
        for at in _places(text, mark)
    ]
    marks.sort()
    turns = [("system", text[: marks[0][0]] if marks else text)]
    for (at, role, mark), (stop, _, _) in zip(
        marks, [*marks[1:], (len(text), "", "")], strict=True
    ):
        turns.append((role, text[at + len(mark) : stop]))
    kept = [(role, said.strip()) for role, said in turns[:-1] if said.strip()]
    kept += [
        (role, said.strip()) for role, said in turns[-1:] if said.strip() or role == "assistant"
    ]
    return [{"role": role, "content": said} for role, said in kept]


def _places(text: str, mark: str) -> list[int]:
    """Where `mark` stands in the text."""
    found = []
    at = text.find(mark)
    while at >= 0:
        found.append(at)
        at = text.find(mark, at + 1)
    return found


def shared_words(one: str, other: str) -> int:
    """Characters of the beginning that two texts share, whole words only."""
    length = min(common_start(one, other), len(one.rstrip()) - 1, len(other.rstrip()) - 1)
    while length > 0 and not one[length - 1].isspace():
        length -= 1
    return max(length, 0)
