"""Exact answers: the completion is the reference, up to blanks and letter case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.host.verifiers._answers import references
from weft.registry import register_verifier


@register_verifier("exact")
def exact(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    completion_ids: Sequence[Sequence[int]],
    column: str | None = None,
    case: bool = False,
    **columns: Sequence[Any],
) -> list[float | None]:
    """1 where the completion equals the column `answer` or `ground_truth` (or `column`), else 0; None for rows without one.

    Runs of blanks count as one, those at the ends not at all; letter case matters with `case`.
    """
    answers = references(columns, column, len(completions))
    return [
        None if answer is None else float(_plain(completion, case) == _plain(str(answer), case))
        for completion, answer in zip(completions, answers, strict=True)
    ]


def _plain(text: str, case: bool) -> str:
    joined = " ".join(text.split())
    return joined if case else joined.casefold()
