"""Suggestions: names that are near what was typed, and never that itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.errors import nearest, unknown_name

NAMES = st.text(alphabet="abc_.", min_size=1, max_size=8)


@given(NAMES, st.lists(NAMES, max_size=8), st.integers(1, 5))
def test_what_was_typed_is_never_suggested(name: str, known: list[str], count: int) -> None:
    found = nearest(name, [*known, name], count)
    assert name not in found and len(found) <= count and set(found) <= set(known)
    hint = str(unknown_name("thing", name, known)).split("; ", 1)[1]
    suggested = hint.removeprefix("did you mean ").removesuffix("?").split(" or ")
    assert not hint.startswith("did you mean ") or name not in suggested


def test_a_name_of_any_length_is_compared() -> None:
    assert nearest("x" * 100_000, ["abc"]) == [] and nearest("sftt", ["sft", "dpo"]) == ["sft"]
