"""Plan in a report: measured times below the predicted ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.observe.plans import make_plan
from tests.observe.test_report import Page, line, read, write_run
from weft.observe.plan_measured import find_typical_step, render_run_plan
from weft.observe.report import build_report
from weft.observe.run_files import RunFiles
from weft.observe.shown_plan import FORECAST, write_plan


def test_a_report_shows_predicted_and_measured_bars(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert "plan" not in read(folder).sections()
    write_plan(folder, make_plan())
    page = read(folder)
    assert page.sections().index("plan") == page.sections().index("time") + 1
    assert "predicted 3 s a step, measured 1 s" in page.text
    labels = [str(attrs["aria-label"]) for tag, attrs in page.tags if "aria-label" in attrs]
    assert "actor_gen: predicted 2 s" in labels  # with the transfer of its weights
    assert "actor_gen: measured 0.5 s" in labels
    assert "reward: not predicted" in labels and "reward: measured 50 ms" in labels
    # Nodes are in the order in which they ran, on one time axis: that of the longer step.
    text = build_report(folder).read_text(encoding="utf-8")
    lanes = text[text.index('class="gantt pairs"') :]
    names = re.findall(r'lane-name">(\w+)', lanes)[:3]
    assert names == ["actor_gen", "actor_train", "reward"]
    bars = re.findall(r'left:([\d.]+)%;width:([\d.]+)%;[^"]*" title="([^"]*)"', lanes)
    assert bars[0][:2] == ("0.000", "16.667")
    assert ("66.667", "33.333", "actor_train, predicted: 1 s, begins at 2 s") in bars
    assert ("16.667", "8.333", "actor_train, measured: 0.25 s, begins at 0.5 s") in bars


def test_the_typical_step_is_the_median_of_whole_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=6)
    seconds = [9.0, 1.0, 3.0, 2.0, 4.0, 2.5]
    rows = [line(step, step_seconds=each) for step, each in enumerate(seconds, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    typical = find_typical_step(RunFiles.read(folder))
    assert typical is not None and (typical.step, typical.seconds) == (6, 2.5)
    assert typical.bars["actor_train"] == [(0.5, 0.25)]
    # The last step samples nothing: then it is not typical.
    events = (folder / "timeline.json").read_text().splitlines()
    kept = [each for each in events if not ('"actor_gen"' in each and '"step": 6' in each)]
    (folder / "timeline.json").write_text("\n".join(kept))
    typical = find_typical_step(RunFiles.read(folder))
    assert typical is not None and typical.step == 4


def test_a_run_without_a_step_shows_the_plan_alone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=0, metrics__jsonl="")
    write_plan(folder, make_plan())
    run = RunFiles.read(folder)
    assert find_typical_step(run) is None
    assert "Placement" in render_run_plan(run, run.plan)
    assert render_run_plan(run, None) == ""
    (folder / FORECAST).write_text("{")
    assert "plan" not in Page(build_report(folder).read_text()).sections()
