"""Where tensors lie: what a device lacks comes from one that has it, once."""

from __future__ import annotations

from weft.runtime.device_process import Want
from weft.runtime.locations import DRIVER, Locations


def rows() -> Locations:
    made = Locations()
    made.made(DRIVER, ["a", "b", "c"], ["prompt"])
    made.made(1, ["a", "b"], ["completion", "logprobs"])
    made.made(2, ["c"], ["completion", "logprobs"])
    return made


def test_a_rank_gets_what_it_lacks_from_whoever_has_it_and_nothing_else():
    assert rows().lacking(1, ["a", "b", "c"], ["prompt", "completion"]) == [
        Want(DRIVER, ("a", "b", "c"), ("prompt",)),
        Want(2, ("c",), ("completion",)),
    ]
    assert rows().lacking(1, ["a"], ["completion"]) == []


def test_what_is_on_its_way_is_not_sent_again_and_not_had_from_there():
    where = rows()
    for want in where.lacking(0, ["a"], ["prompt"]):
        where.expect(0, want.ids, want.keys)
    assert where.lacking(0, ["a"], ["prompt"]) == []
    assert where.lacking(3, ["a"], ["prompt"]) == [Want(DRIVER, ("a",), ("prompt",))]
    where.copied(0, ["a"], ["prompt"])
    assert where.lacking(3, ["a"], ["prompt"]) == [Want(0, ("a",), ("prompt",))], (
        "a device before the driver"
    )


def test_a_key_that_is_made_anew_is_had_from_its_maker_alone():
    where = rows()
    where.copied(0, ["a"], ["completion"])
    where.expect(3, ["a"], ["completion"])
    where.made(2, ["a"], ["completion"])
    assert where.lacking(0, ["a"], ["completion"]) == where.lacking(3, ["a"], ["completion"]) != []
    where.copied(0, ["a"], ["completion"])
    where.made(2, ["a"], ["completion"])  # what was announced before is the same at the end
    assert where.lacking(0, ["a"], ["completion"]) == []


def test_optional_keys_count_where_every_id_has_them_and_missing_ones_are_left_out():
    where = rows()
    where.made(1, ["a"], ["extra"])
    assert where.everywhere(["a", "b"], ["extra", "logprobs"]) == ["logprobs"]
    assert where.lacking(0, ["b"], ["extra"]) == []


def test_ids_are_forgotten_wherever_they_are():
    where = rows()
    where.expect(3, ["a"], ["prompt"])
    assert where.discard(["a", "c"]) == {DRIVER: ["a", "c"], 1: ["a"], 2: ["c"], 3: ["a"]}
    assert where.lacking(0, ["a"], ["prompt"]) == [] and where.discard(["a"]) == {}
