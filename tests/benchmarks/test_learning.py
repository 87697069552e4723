"""The table of docs/results.md is made of the first and the last fifth of runs, over seeds."""

from __future__ import annotations

from pathlib import Path

from benchmarks.learning import RUNS, fifths, rows
from tests.tiny import write_jsonl
from weft import registry
from weft.options import iterate_options


def test_fifths_are_means_of_the_ends(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "metrics.jsonl", [{"x": value} for value in (1, 3, 9, 9, 9, 9, 9, 9, 6, 8)]
    )
    assert fifths(path, "x") == (2.0, 7.0)


def test_a_row_has_the_range_over_seeds() -> None:
    table = list(rows({("sft", "train/loss"): [(4.0, 2.5), (4.2, 2.25)]}))
    assert table[-1] == "| sft | `train/loss` | 4.00 to 4.20 | 2.25 to 2.50 |"


def test_runs_set_options_that_exist() -> None:
    for run in RUNS:
        known = {leaf.name for leaf in iterate_options(registry.quickstarts.get(run.words[0])())}
        assert {word.partition("=")[0] for word in run.words[1:]} <= known
