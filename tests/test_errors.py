"""Suggestions: names that are near what was typed, and never that itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.errors import build_unknown_name_error, find_nearest

NAMES = st.text(alphabet="abc_.", min_size=1, max_size=8)


@given(NAMES, st.lists(NAMES, max_size=8), st.integers(1, 5))
def test_what_was_typed_is_never_suggested(name: str, known: list[str], count: int) -> None:
    found = find_nearest(name, [*known, name], count)
    assert name not in found and len(found) <= count and set(found) <= set(known)
    hint = str(build_unknown_name_error("thing", name, known)).split("; ", 1)[1]
    suggested = hint.removeprefix("did you mean ").removesuffix("?").split(" or ")
    assert not hint.startswith("did you mean ") or name not in suggested


def test_a_name_of_any_length_is_compared() -> None:
    assert find_nearest("x" * 100_000, ["abc"]) == [] and find_nearest("sftt", ["sft", "dpo"]) == [
        "sft"
    ]


def test_unlike_names_are_not_suggested() -> None:
    known = [
        "stats",
        "filter",
        "split",
        "webgpt",
        "minimath",
        "math",
        "oasst_export",
        "oasst2",
        "pythia-1b",
        "a_rlhf",
    ]
    assert (
        find_nearest("oasst_expo", known) == ["oasst_export"] and find_nearest("count", known) == []
    )
    assert find_nearest("imagenet", known) == [] and find_nearest("web_gpt", known) == ["webgpt"]
    assert find_nearest("ppo.kl_clt", ["ppo.kl_ctl", "ppo.dual_clip"]) == ["ppo.kl_ctl"]
    assert find_nearest("stat", known) == ["stats"] and find_nearest("STATS", known) == ["stats"]


def test_what_a_name_begins_with_or_has_as_a_word_is_near() -> None:
    known = ["oasst_export_of_many_words", "oasst2", "a_rlhf", "rlhfx", "wrlhf", "dpo"]
    assert find_nearest("oasst", known) == ["oasst2", "oasst_export_of_many_words"]
    assert (
        find_nearest("rlhf", known) == ["rlhfx", "wrlhf", "a_rlhf"]
        and find_nearest("dp", ["dpo", "xdp"])[0] == "dpo"
    )


def test_many_names_are_not_listed() -> None:
    assert str(build_unknown_name_error("thing", "qqq", map(str, range(90)))).endswith(
        "known: 90 names, none of them like it"
    )
    assert str(build_unknown_name_error("thing", "qqq", "ab")).endswith("known: a, b")
