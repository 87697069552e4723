"""Replies from rows of every form, and worse replies made from them."""

from __future__ import annotations

from typing import Any

import pytest

from weft.data.bad_replies import KINDS, PromptReplies, make_worse_reply, read_replies
from weft.data.rows import BadRow
from weft.errors import DataError

USER, GOOD, BAD = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "assistant", "content": "Go"},
)
DIALOGUE = "\n\nHuman: Hi\n\nAssistant:"
TREE = {
    "message_tree_id": "t",
    "prompt": {
        "message_id": "t",
        "role": "prompter",
        "text": "Hi",
        "replies": [
            {"message_id": "b", "role": "assistant", "text": "Go", "rank": 1, "replies": []},
            {
                "message_id": "a",
                "role": "assistant",
                "text": "Hello",
                "rank": 0,
                "replies": [
                    {
                        "message_id": "c",
                        "role": "prompter",
                        "text": "And?",
                        "replies": [
                            {"message_id": "d", "role": "assistant", "text": "Well.", "replies": []}
                        ],
                    }
                ],
            },
        ],
    },
}


@pytest.mark.parametrize(
    ("row", "asked", "replies"),
    [
        ({"prompt": "Q", "replies": ["a", "b", "c"]}, {"prompt": "Q"}, ["a", "b", "c"]),
        ({"messages": [USER], "replies": ["a", "b"]}, {"messages": [USER]}, ["a", "b"]),
        ({"prompt": None, "replies": ["a text", "b"]}, {"prompt": None}, ["a text", "b"]),
        (
            {"prompt": "Q", "pos_answers": ["a", "c"], "neg_answers": ["b", "d"]},
            {"prompt": "Q"},
            ["a", "b"],
        ),
        ({"prompt": "Q", "answer": " a"}, {"prompt": "Q"}, [" a"]),
        ({"instruction": "Do", "input": "this", "output": "a"}, {"prompt": "Do\nthis\n"}, ["a"]),
        ({"prompt": "Q", "chosen": "a", "rejected": "b"}, {"prompt": "Q"}, ["a", "b"]),
        (
            {"chosen": f"{DIALOGUE} Hello", "rejected": f"{DIALOGUE} Go"},
            {"messages": [USER]},
            ["Hello", "Go"],
        ),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {"messages": [USER]}, ["Hello", "Go"]),
        (
            {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
            {"messages": [USER]},
            ["Hello", "Go"],
        ),
        ({"messages": [USER, BAD, USER, GOOD]}, {"messages": [USER, BAD, USER]}, ["Hello"]),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Hi"},
                    {"from": "gpt", "value": "Hello"},
                ]
            },
            {"messages": [USER]},
            ["Hello"],
        ),
    ],
)
def test_rows(row: dict[str, Any], asked: dict[str, Any], replies: list[str]) -> None:
    (found,) = read_replies(row, 7)
    assert found.id == "7" and found.prompt_columns == asked and list(found.replies) == replies


def test_a_tree_has_a_row_for_each_message_that_was_answered() -> None:
    ranked, single = read_replies(TREE, 0)
    assert ranked.id == "t" and ranked.replies == ("Hello", "Go") and ranked.messages == (USER,)
    assert single.id == "c" and single.replies == ("Well.",) and len(single.messages) == 3


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"prompt": "Q"}, "it has no reply"),
        ({"messages": [USER]}, "does not end with a reply"),
        (
            {"chosen": [USER, GOOD], "rejected": [{"role": "user", "content": "Ho"}, BAD]},
            "differ in more than their last",
        ),
        ({"prompt": "Q", "replies": ["a", ""]}, "entry 2, is empty"),
    ],
)
def test_rows_without_a_reply(row: dict[str, Any], wrong: str) -> None:
    with pytest.raises((BadRow, DataError), match=wrong):
        list(read_replies(row, 0))


LONG = PromptReplies(
    "r",
    "Q",
    (USER,),
    (" One is not two. Two is three less one, and so on, and so on.", "Other words."),
)
REST = [PromptReplies(str(n), "Q", (USER,), (f"reply {n}",)) for n in range(3)]


@pytest.mark.parametrize("kind", KINDS)
def test_worse_replies_are_no_replies_of_the_row(kind: str) -> None:
    made = make_worse_reply(kind, LONG, [LONG, *REST], seed=1)
    assert made is not None and made.startswith(" ") and not LONG.has_reply(made)
    assert made == make_worse_reply(kind, LONG, [LONG, *REST], seed=1)
    assert len({make_worse_reply(kind, LONG, [LONG, *REST], seed) for seed in range(9)}) > 1


def test_what_each_kind_does() -> None:
    best = LONG.replies[0].split()
    shuffled, cut, repeated, other = (
        make_worse_reply(kind, LONG, [LONG, *REST], seed=1) for kind in KINDS
    )
    assert shuffled is not None and cut is not None and repeated is not None
    assert sorted(shuffled.split()) == sorted(best) and shuffled.split() != best
    assert best[: len(cut.split())] == cut.split() and len(cut.split()) <= 0.6 * len(best)
    assert repeated.count("One is not two.") == len(repeated.split()) // 4 >= 3
    assert other in {f" reply {n}" for n in range(3)}


def test_short_replies_and_single_rows_have_none() -> None:
    short = PromptReplies("r", "Q", (USER,), ("Yes.",))
    assert [make_worse_reply(kind, short, [short], seed=1) for kind in KINDS] == [None] * len(KINDS)
    same = PromptReplies("s", "Q", (USER,), ("Yes. ",))
    assert make_worse_reply("other", short, [short, same], seed=1) is None
