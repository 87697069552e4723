"""Functions that the checks of verifiable instructions share."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from typing import Any

Arguments = Mapping[str, Any]
Check = Callable[[str, Arguments], bool]

WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def remove_punctuation(text: str) -> str:
    """Return a text without ASCII punctuation."""
    return text.translate(WITHOUT_PUNCTUATION)


def strip_punctuation(text: str) -> str:
    """Return a text without ASCII punctuation and blanks at both ends."""
    return text.strip(string.punctuation + " ")


def satisfies_relation(count: int, relation: str, bound: Any) -> bool:
    """Return whether `count` is "at least" or "less than" `bound`, as `relation` specifies.

    Raises `ValueError` for any other relation.
    """
    if relation == "at least":
        return count >= int(bound)
    if relation == "less than":
        return count < int(bound)
    raise ValueError(f"relation {relation!r} must be 'at least' or 'less than'")
