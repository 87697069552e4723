"""Positions at which the reasoning steps of a completion end, in characters and in tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.data.tokenizer import Tokenizer


def find_step_ends(text: str, mark: str) -> list[int]:
    """Return the character offset at which each reasoning step of a text ends.

    A step ends after each `mark`, and at the end of the text if more than white space follows the
    last mark. A step that is only white space is joined to the next one.
    """
    ends: list[int] = []
    start = 0
    while (at := text.find(mark, start)) >= 0:
        start = at + len(mark)
        if text[ends[-1] if ends else 0 : at].strip():
            ends.append(start)
    if text[ends[-1] if ends else 0 :].strip():
        ends.append(len(text))
    return ends


def find_step_tokens(
    tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], ends: Sequence[int]
) -> list[int]:
    """Return the index of the token at which each reasoning step of a completion ends.

    This token contains the last character of the step. `ids` are the tokens of the completion.
    `ends` are the character offsets at which the steps end, as returned by `find_step_ends`.
    """

    def build_predicate(end: int) -> Callable[[int], bool]:
        return lambda n: len(tokenizer.decode_after(prompt, ids[: n + 1], True)) >= end

    return [_find_first(build_predicate(end), len(ids)) for end in ends]


def _find_first(holds: Callable[[int], bool], count: int) -> int:
    """Return the first index below `count` at which `holds` is true, by binary search.

    Once `holds` is true, it must be true for all larger indices. Returns the last index if it is
    never true.
    """
    low = 0
    high = count - 1
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
