"""Dialogues as one text, `\\n\\nHuman: ...\\n\\nAssistant: ...` (Anthropic's hh-rlhf format)."""

from __future__ import annotations

from weft.data.prefix import count_common_start

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"


def find_shared_prompt(one: str, other: str) -> str:
    r"""Return the common prefix of two dialogues, up to and including its last `\n\nAssistant:`.

    Returns "" if the common prefix has no `\n\nAssistant:`.
    """
    at = one.rfind(ASSISTANT, 0, count_common_start(one, other))
    return one[: at + len(ASSISTANT)] if at >= 0 else ""


def find_assistant_spans(text: str) -> list[tuple[int, int]]:
    """Return the character spans [start, stop) of the assistant's turns in a dialogue.

    If the text has no turns of either speaker, the only span is the whole text.
    """
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


def split_messages(text: str) -> list[dict[str, str]]:
    """Split a dialogue into chat messages. Text before the first turn is the system message.

    Empty turns are dropped, except a final assistant turn, which is either an empty reply or a
    reply that is still to be generated.
    """
    marks = []
    for mark, role in ((HUMAN, "user"), (ASSISTANT, "assistant")):
        for at in _find_marks(text, mark):
            marks.append((at, role, mark))
    marks.sort()
    turns = [("system", text[: marks[0][0]] if marks else text)]
    for (at, role, mark), (stop, _, _) in zip(
        marks, [*marks[1:], (len(text), "", "")], strict=True
    ):
        turns.append((role, text[at + len(mark) : stop]))
    messages = []
    for role, content in turns[:-1]:
        if content.strip():
            messages.append((role, content.strip()))
    for role, content in turns[-1:]:
        if content.strip() or role == "assistant":
            messages.append((role, content.strip()))
    return [{"role": role, "content": content} for role, content in messages]


def _find_marks(text: str, mark: str) -> list[int]:
    """Return the start positions of all occurrences of `mark` in a text."""
    positions = []
    at = text.find(mark)
    while at >= 0:
        positions.append(at)
        at = text.find(mark, at + 1)
    return positions


def count_shared_characters(one: str, other: str) -> int:
    """Return the number of characters before the first word in which two texts differ.

    The last word of each text counts as different, so that a part of the text remains after the
    shared words. For example, the texts "a big dog" and "a big cat" share 6 characters.
    """
    length = min(count_common_start(one, other), len(one.rstrip()) - 1, len(other.rstrip()) - 1)
    while length > 0 and not one[length - 1].isspace():
        length -= 1
    return max(length, 0)
