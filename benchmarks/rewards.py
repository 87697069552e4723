"""A cheap reward in Python, in the form that both weft and TRL call."""

from __future__ import annotations

from typing import Any


def distinct(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    """The share of distinct words in each completion."""
    words = [text.split() for text in completions]
    return [len(set(each)) / max(1, len(each)) for each in words]
