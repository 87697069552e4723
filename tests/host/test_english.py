"""Sentences, words and syllables, as nltk and syllapy find them in ordinary text."""

from __future__ import annotations

import pytest

from weft.host.verifiers._english import (
    count_syllables,
    has_verb_first,
    is_emoji,
    split_sentences,
    split_tokens,
)


@pytest.mark.parametrize(
    "sentences",
    [
        ["Mr. X is here.", "Is he?", "Yes!"],
        ["He left at 5 p.m. on Friday.", "Then it rained."],
        ["It costs 3.5 of 7.", "1.", "First one."],
        ['"Go!"', "she said.", '"Why?"', '"Now."'],
        ["(See this.)", "Then go."],
        ["Line one\nline two.", "End"],
        ["J. K. Rowling wrote it.", "She did."],
        ["A.", "The first point."],
        ["Well... maybe so.", "No..."],
        ["Really?!", "Yes."],
        ["Dr. Smith of the U.S. Army came.", "He left."],
        ["**Bold.", "** Next."],
    ],
)
def test_sentences(sentences: list[str]) -> None:
    assert split_sentences(" ".join(sentences)) == sentences


def test_texts_without_sentences() -> None:
    assert split_sentences("") == split_sentences(" \n") == []
    assert split_sentences("no mark ") == ["no mark"]


def test_marks_without_end() -> None:
    """Long runs of marks and blanks, which models can produce, must not take minutes."""
    for text in ("!" * 50_000, "a." * 50_000, "a." + " " * 50_000 + "b", "(" * 50_000 + ".) x"):
        assert len(split_sentences(text)) <= 3
        assert split_tokens(text)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("I can't, we'll see.", "I ca n't , we 'll see ."),
        ('He said "Go on." Then 3,5 (or 7%)', "He said `` Go on . '' Then 3,5 ( or 7 % )"),
        ("It's Mr. X's e-mail -- cannot...", "It 's Mr. X 's e-mail -- can not ..."),
        ("It is the dogs' life: 'so be it'", "It is the dogs ' life : ' so be it '"),
        ("", ""),
    ],
)
def test_tokens(text: str, tokens: str) -> None:
    assert split_tokens(text) == tokens.split()


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "7th 42 ... "),
        (1, "cat the used times my"),
        (2, "water table being value"),
        (3, "idea beautiful area"),
        (4, "society material"),
    ],
)
def test_syllables(count: int, words: str) -> None:
    assert {count_syllables(word) for word in words.split()} == {count}


def test_verbs_at_the_beginning() -> None:
    for text in ("Write it.", "Walking is fun", "Is it?", "Carried away, he fell", "Studies it"):
        assert has_verb_first(text), text
    for text in ("", "Nothing", "The dog", "Work is hard", "Happy days", "Please go"):
        assert not has_verb_first(text), text


def test_emoji() -> None:
    assert all(map(is_emoji, "😀❤🏽🧪"))
    assert not any(map(is_emoji, "a1.\ufe0f日")) and not is_emoji("")
