"""What a group measures of a call on several devices."""

from __future__ import annotations

from weft.interfaces.base import MFCResult
from weft.runtime.device_group import _measure_ranks
from weft.runtime.device_process import CommandReport


def reports(*peaks: float | None) -> dict[int, CommandReport]:
    """Reports of ranks that received 1, 2, ... bytes."""
    made = {}
    for rank, peak in enumerate(peaks):
        metrics = {} if peak is None else {"peak_bytes": peak}
        made[rank] = CommandReport(0, "finished", MFCResult(None, metrics), rank + 1)
    return made


def test_bytes_are_summed_and_the_largest_peak_of_any_rank_counts() -> None:
    assert _measure_ranks(reports(5.0, 9.0, 7.0)) == {"num_bytes_moved": 6.0, "peak_bytes": 9.0}


def test_a_peak_that_no_rank_measures_is_left_out() -> None:
    assert _measure_ranks(reports(None, None)) == {"num_bytes_moved": 3.0}
