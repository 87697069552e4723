"""Where tensors lie: what a device lacks comes from one that has it, once."""

from __future__ import annotations

from weft.runtime.store import DRIVER, TensorLocations, TensorRequest


def rows() -> TensorLocations:
    made = TensorLocations()
    made.record_computed(DRIVER, ["a", "b", "c"], ["prompt"])
    made.record_computed(1, ["a", "b"], ["completion", "logprobs"])
    made.record_computed(2, ["c"], ["completion", "logprobs"])
    return made


def test_a_rank_gets_what_it_lacks_from_whoever_has_it_and_nothing_else():
    assert rows().find_missing(1, ["a", "b", "c"], ["prompt", "completion"]) == [
        TensorRequest(DRIVER, ("a", "b", "c"), ("prompt",)),
        TensorRequest(2, ("c",), ("completion",)),
    ]
    assert rows().find_missing(1, ["a"], ["completion"]) == []


def test_what_is_on_its_way_is_not_sent_again_and_not_had_from_there():
    where = rows()
    for want in where.find_missing(0, ["a"], ["prompt"]):
        where.record_transfer(0, want.ids, want.keys)
    assert where.find_missing(0, ["a"], ["prompt"]) == []
    assert where.find_missing(3, ["a"], ["prompt"]) == [TensorRequest(DRIVER, ("a",), ("prompt",))]
    where.record_copy(0, ["a"], ["prompt"])
    assert where.find_missing(3, ["a"], ["prompt"]) == [TensorRequest(0, ("a",), ("prompt",))], (
        "a device before the driver"
    )


def test_a_key_that_is_made_anew_is_had_from_its_maker_alone():
    where = rows()
    where.record_copy(0, ["a"], ["completion"])
    where.record_transfer(3, ["a"], ["completion"])
    where.record_computed(2, ["a"], ["completion"])
    assert (
        where.find_missing(0, ["a"], ["completion"])
        == where.find_missing(3, ["a"], ["completion"])
        != []
    )
    where.record_copy(0, ["a"], ["completion"])
    where.record_computed(
        2, ["a"], ["completion"]
    )  # what was announced before is the same at the end
    assert where.find_missing(0, ["a"], ["completion"]) == []


def test_optional_keys_count_where_every_id_has_them_and_missing_ones_are_left_out():
    where = rows()
    where.record_computed(1, ["a"], ["extra"])
    assert where.select_available(["a", "b"], ["extra", "logprobs"]) == ["logprobs"]
    assert where.find_missing(0, ["b"], ["extra"]) == []


def test_ids_are_forgotten_wherever_they_are():
    where = rows()
    where.record_transfer(3, ["a"], ["prompt"])
    assert where.discard(["a", "c"]) == {DRIVER: ["a", "c"], 1: ["a"], 2: ["c"], 3: ["a"]}
    assert where.find_missing(0, ["a"], ["prompt"]) == [] and where.discard(["a"]) == {}
