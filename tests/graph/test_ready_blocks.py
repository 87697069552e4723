"""Blocks of ids against a dict with one entry an id."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.graph.ready import StateBlocks

IDS = st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1)


def blocks() -> StateBlocks[list[int]]:
    return StateBlocks(list[int], list[int].copy)


@given(st.lists(st.tuples(st.booleans(), IDS), max_size=20))
def test_blocks_know_of_every_id_what_a_dict_would(calls):
    """Each call adds its number to what is known of its ids, or forgets them."""
    found, wanted = blocks(), dict[str, list[int]]()
    for number, (forget, ids) in enumerate(calls):
        if forget:
            gone = [
                id
                for known, chosen, _ in found.discard(ids)
                for id in chosen
                if known == wanted[id]
            ]
            assert set(gone) == set(ids) & wanted.keys()
            for id in gone:
                del wanted[id]
        else:
            for known in found.separate_states(ids):
                known.append(number)
            for id in ids:
                wanted.setdefault(id, []).append(number)
        assert dict(found.items()) == wanted and list(found.items()) == [
            (id, found[id]) for id in wanted
        ]
        assert len(found) == len(wanted) and all(id in found for id in wanted)


def test_ids_that_come_together_stay_one_block():
    found = blocks()
    for _ in range(3):
        assert len(found.separate_states("abc")) == 1
    assert list(found.group_by_block("cab").values()) == [["c", "a", "b"]]
    assert len(found.separate_states("ab")) == 1 and len(found.group_by_block("abc")) == 2
    assert [chosen for block, chosen in found.group_by_block("xa").items() if block is None] == [
        ["x"]
    ]


def test_the_last_id_of_a_block_is_told():
    found = blocks()
    found.separate_states("abc")
    assert [(chosen, empty) for _, chosen, empty in found.discard("ab")] == [(["a", "b"], False)]
    assert [(chosen, empty) for _, chosen, empty in found.discard("cz")] == [(["c"], True)]
