"""Sides in processes of their own, taking turns."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks import clock
from benchmarks.clock import Stopwatch
from benchmarks.pairs import Side, SideFailed, Spread, alternate, ratios

HERE = "tests.benchmarks.sides"


def test_a_side_answers_from_a_process_of_its_own(tmp_path: Path) -> None:
    with Side(f"{HERE}:answer", tmp_path / "log") as side:
        first, second = side.begin({"value": 3}), side.begin({"value": 4})
    assert (first["twice"], second["twice"]) == (6, 8)
    assert first["pid"] == second["pid"] != os.getpid()


def test_sides_take_turns_at_their_pauses(tmp_path: Path) -> None:
    with (
        Side(f"{HERE}:steps", tmp_path / "a") as one,
        Side(f"{HERE}:steps", tmp_path / "b") as other,
    ):
        assert [side.begin({"steps": 2}) for side in (one, other)] == [{"step": 0}] * 2
        assert [side.advance() for side in (one, other)] == [{"step": 1}] * 2
        assert [side.advance() for side in (one, other)] == [{"done": True}] * 2


@pytest.mark.parametrize(
    ("function", "said"), [("fails", "no such luck"), ("dies", "exit code 3"), ("absent", "absent")]
)
def test_a_side_that_fails_says_why(function: str, said: str, tmp_path: Path) -> None:
    with (
        Side(f"{HERE}:{function}", tmp_path / "log") as side,
        pytest.raises(SideFailed, match=said),
    ):
        side.begin({})


def test_what_a_side_prints_goes_to_its_log(tmp_path: Path) -> None:
    with Side(f"{HERE}:prints", tmp_path / "log") as side:
        side.begin({})
    assert "to the log" in (tmp_path / "log").read_text()


def test_peak_memory_counts_what_was_given_back(tmp_path: Path) -> None:
    with Side(f"{HERE}:remembers", tmp_path / "log") as side:
        peak = side.begin({})["peak"]
    # the kernel counts pages in batches, so some are not in its count yet
    assert 0.99 * 2**26 <= peak < 2**27


def test_alternating_runs_a_round_of_all_sides_before_the_next(tmp_path: Path) -> None:
    with (
        Side(f"{HERE}:clock", tmp_path / "a") as one,
        Side(f"{HERE}:clock", tmp_path / "b") as other,
    ):
        runs = alternate({"one": one, "other": other}, {}, 2)
    times = [run["time"] for pair in zip(runs["one"], runs["other"], strict=True) for run in pair]
    assert len(times) == 4 and times == sorted(times)


def test_nobody_does_anything_before_a_turn(tmp_path: Path) -> None:
    with Side(f"{HERE}:clock", tmp_path / "log", rest=0.3) as side:
        side.begin({})  # the process is there
        before = time.monotonic()
        assert side.begin({})["time"] - before >= 0.3


def test_a_stopwatch_reads_three_clocks() -> None:
    watch = Stopwatch()
    sum(range(10**6))
    read = watch.read()
    assert 0 < read["cpu_seconds"] <= 1.1 * read["seconds"] + 0.01 and read["stolen_seconds"] >= 0


def test_stolen_time_is_the_eighth_number_of_all_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stat").write_text("cpu  1 2 3 4 5 6 7 250 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    monkeypatch.setattr(clock, "STAT", tmp_path / "stat")
    assert clock.stolen() == 250 / os.sysconf("SC_CLK_TCK")


def test_ratios_are_taken_pair_by_pair() -> None:
    """A slow second round hurts both sides and leaves its ratio as it is."""
    assert ratios([2.0, 20.0, 3.0], [1.0, 10.0, 1.0]) == Spread(2.0, 2.0, 3.0)
