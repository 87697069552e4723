"""Predicted and measured values: the line at the end of a run, and the report's table."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.observe.test_report import line, write_run
from weft.observe.charts import build_charts
from weft.observe.compare import build_comparison_charts, list_measures
from weft.observe.metric_help import find
from weft.observe.metrics import find_headline
from weft.observe.predicted import PredictedStep, format_end_line, render_comparison
from weft.observe.run_files import RunFiles
from weft.observe.verdict import name_runs

MIB = 2**20


def steps(*seconds: float, predicted: float | None = None) -> list[dict[str, Any]]:
    more = {} if predicted is None else {"predicted/step_seconds": predicted}
    return [{"step": at, "step_seconds": each, **more} for at, each in enumerate(seconds, start=1)]


@pytest.mark.parametrize(
    ("seconds", "predicted", "left_out", "expected"),
    [
        ((90.0, 16.0, 14.0, 15.0), 14.1, (), "predicted 14.1 s a step, measured 15.0"),
        ((90.0, 0.01234), 0.5, (), "predicted 0.500 s a step, measured 0.0123"),
        ((2.0,), 1.0, (), "predicted 1.00 s a step, measured 2.00"),
        ((9.0, 280.0), 245.0, (), "predicted 4:05 a step, measured 4:40"),
        ((9.0, 20.0), 245.0, (), "predicted 4:05 a step, measured 20.0 s"),
        (
            (9.0, 2.0),
            1.0,
            ("rew", "ref"),
            "predicted 1.00 s a step without rew, ref, measured 2.00",
        ),
    ],
)
def test_the_end_line_has_medians_without_the_first_step(
    seconds: tuple[float, ...], predicted: float, left_out: tuple[str, ...], expected: str
) -> None:
    lines = [{"step": 0, "eval/loss": 1.0}, *steps(*seconds, predicted=predicted)]
    assert format_end_line(lines, PredictedStep(left_out=left_out)) == expected


def test_there_is_no_end_line_without_a_prediction_or_a_step() -> None:
    assert format_end_line(steps(1.0, 2.0), PredictedStep()) is None
    assert format_end_line([], PredictedStep()) is None


def test_steps_without_predictions_are_ignored_if_others_have_them() -> None:
    lines = [*steps(9.0, 8.0, 7.0), *steps(1.0, 1.0, predicted=2.0)]
    assert format_end_line(lines, PredictedStep()) == "predicted 2.00 s a step, measured 1.00"


def predictions(step: int) -> dict[str, Any]:
    return {
        "peak_memory_gb": 0.75,
        "actor_gen/peak_bytes": 100 * MIB + step,
        "actor_gen/num_weight_bytes": 3 * MIB if step > 1 else 0,
        "predicted/step_seconds": 1.25,
        "predicted/peak_memory_gb": 0.5,
        "predicted/actor_gen": 0.25,
        "predicted/actor_gen/peak_bytes": 80 * MIB,
        "predicted/actor_gen/num_weight_bytes": 2 * MIB,
        "predicted/reward": 99.0,
    }


def predicted_run(folder: Path, **record: Any) -> RunFiles:
    lines = [line(step, **predictions(step)) for step in range(1, 5)]
    text = "".join(json.dumps(each) + "\n" for each in lines)
    return RunFiles.read(write_run(folder, 4, metrics__jsonl=text, run__json=json.dumps(record)))


def test_the_table_has_a_row_for_each_call_and_one_for_the_step(tmp_path: Path) -> None:
    starts = [{"forecast": "a profile & <more>"}]
    page = render_comparison(predicted_run(tmp_path / "run", starts=starts))
    rows = {}
    for name, cells in re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', page):
        rows[name] = re.findall(r"<td>(.*?)</td>", cells)
    assert rows == {
        "actor_gen": ["0.250 s", "0.500 s", "80.0 MiB", "100.0 MiB", "2.0 MiB", "3.0 MiB"],
        "actor_train": ["–", "0.250 s", "–", "–", "–", "–"],
        "reward": ["99.0 s", "0.0500 s", "–", "–", "–", "–"],
        "whole step": ["1.25 s", "1.00 s", "0.50 GiB", "0.75 GiB", "–", "–"],
    }
    assert (
        "Medians of steps 2 to 4. Predicted seconds are from a profile &amp; &lt;more&gt;." in page
    )


@pytest.mark.parametrize("record", [{}, {"starts": 3}, {"starts": [1]}, {"starts": [{}]}])
def test_a_damaged_record_leaves_the_table_without_its_basis(tmp_path: Path, record: Any) -> None:
    page = render_comparison(predicted_run(tmp_path / "run", **record))
    assert "Medians of steps 2 to 4. Predicted memory" in page


def test_runs_without_predictions_or_steps_have_no_table(tmp_path: Path) -> None:
    damaged = write_run(tmp_path / "damaged", metrics__jsonl='{"step": 1, "predicted/train": 1}\n')
    assert render_comparison(RunFiles.read(damaged)) == ""
    assert render_comparison(RunFiles.read(write_run(tmp_path / "old"))) == ""


def test_predicted_values_are_no_curves_and_no_headline(tmp_path: Path) -> None:
    run = predicted_run(tmp_path / "run")
    drawn = {each.name for chart in build_charts(run) for each in chart.lines}
    assert not any(name.startswith("predicted/") for name in drawn)
    assert {"actor_gen/peak_bytes", "time/actor_gen"} <= drawn
    runs = name_runs([run, run])
    both = build_comparison_charts(runs, list_measures(runs))
    assert not any(each.name.startswith("predicted/") for chart in both for each in chart.lines)
    assert find_headline(["predicted/reward", "predicted/loss", "time/loss"]) is None


def test_each_predicted_value_has_its_own_description() -> None:
    names = [
        "predicted/step_seconds",
        "predicted/peak_memory_gb",
        "predicted/actor_gen",
        "predicted/actor_gen/peak_bytes",
        "predicted/actor_gen/num_weight_bytes",
        "actor_gen/peak_bytes",
        "actor_gen/num_weight_bytes",
    ]
    found = [find(name) for name in names]
    assert all(found) and len({about.pattern for about in found if about}) == len(names)
