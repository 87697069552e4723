"""docs/performance.md shows what the result files hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import page
from benchmarks.results import RESULTS


def test_the_page_is_up_to_date() -> None:
    """Otherwise run `python -m benchmarks.page`."""
    text = page.PAGE.read_text()
    assert text == page.with_table(text, page.table(RESULTS))


def test_another_measurement_changes_the_table(tmp_path: Path) -> None:
    for path in RESULTS.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    sft = json.loads((tmp_path / "sft.json").read_text())
    for run in sft["runs"]["weft"]:
        run["seconds"] *= 2
    (tmp_path / "sft.json").write_text(json.dumps(sft))
    before, after = page.table(RESULTS).splitlines(), page.table(tmp_path).splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) == 1
    old, new = (float(line.split("**")[1]) for line in changed[0])
    assert new == pytest.approx(old / 2, abs=0.06)
