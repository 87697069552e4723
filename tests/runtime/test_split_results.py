"""The results of ranks as one result."""

from __future__ import annotations

import math

import pytest
import torch

from weft.data.sample import SequenceSample
from weft.interfaces.base import MFCResult
from weft.runtime.split import merge_metrics, merge_results, merge_seen


def test_metrics_are_means_over_ids_unless_they_say_otherwise():
    parts = [
        {
            "loss": 1.0,
            "length_max": 5.0,
            "length_min": 2.0,
            "learning_rate": 0.1,
            "started": 10.0,
            "seconds": 4.0,
        },
        {
            "loss": 4.0,
            "length_max": 3.0,
            "length_min": 1.0,
            "learning_rate": 0.1,
            "started": 11.0,
            "seconds": 5.0,
            "own": 7.0,
        },
    ]
    assert merge_metrics(parts, [2, 1]) == {
        "loss": 2.0,
        "length_max": 5.0,
        "length_min": 1.0,
        "learning_rate": 0.1,
        "started": 10.0,
        "seconds": 6.0,
        "own": 7.0,
    }


def test_one_part_stays_as_it_is_to_the_last_bit():
    part = {"loss": 0.1 + 0.2, "started": 1e9 + 1 / 3, "seconds": 1 / 3}
    found = merge_metrics([part], [3])
    assert found["loss"] == part["loss"]
    # the end of the time, less its start, with the rounding of the end
    assert found["seconds"] == pytest.approx(1 / 3, abs=math.ulp(1e9))


def test_a_part_without_ids_has_no_say():
    assert merge_metrics([{"loss": 1.0}, {"loss": 9.0}], [4, 0])["loss"] == 1.0


def test_a_part_that_lacks_a_metric_has_no_say_in_it():
    parts = [{"own": 1.0}, {"own": 4.0}, {"loss": 3.0}]
    assert merge_metrics(parts, [2, 1, 5]) == {"own": 2.0, "loss": 3.0}


def test_outputs_come_in_the_order_of_the_batch():
    parts = [
        SequenceSample.from_default(ids, [1] * len(ids), {"x": torch.arange(len(ids))})
        for ids in ("ca", "b")
    ]
    empty = parts[0].select(ids=[])
    results = [MFCResult(part.meta()) for part in (*parts, empty)]
    whole = merge_results(results, [2, 1, 0], ["a", "b", "c"]).outputs
    assert whole is not None and whole.ids == ("a", "b", "c") and whole.keys == ("x",)
    assert merge_results([MFCResult(), MFCResult()], [1, 1], ["a", "b"]).outputs is None


def test_what_ranks_saw_is_told_once():
    one, two = (
        SequenceSample.from_default(ids, [1] * len(ids), {"x": torch.ones(len(ids))})
        for ids in ("ab", "bc")
    )
    found = merge_seen([MFCResult(seen=one), MFCResult(), MFCResult(seen=two)])
    assert found is not None and found.ids == ("a", "b", "c")
    assert merge_seen([MFCResult()]) is None
