"""Cases and rows of the comparison with published figures; the figures themselves need a package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results
from benchmarks.gpu_rates import FIT, HELD_OUT, MODELS, build_sizes, estimate_case
from benchmarks.gpu_training import ROWS, estimate_row
from weft.planner.devices import find_gpu_rates


def test_held_out_cases_are_other_ones() -> None:
    assert len(FIT) == len(HELD_OUT) == 30 == len({*FIT, *HELD_OUT}) / 2
    for cases in (FIT, HELD_OUT):
        assert {case.model for case in cases} == set(MODELS)
        assert {case.phase for case in cases} == {"decode", "prompts"}


def test_sizes_are_those_of_the_models() -> None:
    billions = {name: build_sizes(model).shape.parameters / 1e9 for name, model in MODELS.items()}
    assert 69.5 < billions["70B"] < 71 and 32 < billions["32B"] < 33.5 and 14 < billions["14B"] < 15


def test_every_case_has_an_estimate() -> None:
    """A step reads the weights; the bandwidth bounds it from below."""
    rates = find_gpu_rates("H100", "bfloat16")
    for case in (*FIT, *HELD_OUT):
        found = estimate_case(case, rates)
        if case.phase == "decode":
            shape = build_sizes(MODELS[case.model]).shape
            weights = 2 * (shape.parameters - shape.embedding) / case.tensor / 3.35e12
            assert found > 1000 * weights, case
        assert found < 2000, case


def test_published_rows_are_within_a_factor_of_two() -> None:
    for row in ROWS:
        assert 0.5 < estimate_row(row) / row.published < 2, row.name
    assert sum(row.fits for row in ROWS) == 4


@pytest.mark.parametrize("name", ["plan", "plan_ranking", "gpu_rates", "gpu_training"])
def test_the_page_has_the_tables_of_the_results(name: str, repo: Path) -> None:
    page = (repo / "docs" / "planning.md").read_text()
    found: dict[str, Any] = json.loads((results.RESULTS / f"{name}.json").read_text())
    for line in results.table(found["rows"]).splitlines():
        assert line in page, line
    if name.startswith("gpu"):
        for note in found["notes"]:
            assert note in page, note


def test_the_page_has_the_cases_of_the_search(repo: Path) -> None:
    """The cases in which models and GPUs grow together."""
    page = (repo / "docs" / "planning.md").read_text()
    found: dict[str, Any] = json.loads((results.RESULTS / "placement.json").read_text())
    shown = 0
    for row in found["rows"]:
        values = [row["search, s"], float(row["one layout / search"]), row["GiB"]]
        for line in page.splitlines():
            key = [row["actor"], str(row["devices"]), str(row["new tokens"])]
            if line.split()[:3] == key and row["case"] == "ScaleBoth":
                shown += 1
                shown_values = [float(word) for word in (line.split()[3], *line.split()[-2:])]
                assert shown_values == pytest.approx(values, rel=0.005), line
    assert shown == 12
