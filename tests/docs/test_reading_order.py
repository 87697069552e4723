"""The reading order leads through files that a PPO step runs, and leaves none out that it must name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tools import trace_step

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reading-order.md"
STEP = re.compile(r"^(\d+)\. `([\w/]+\.py)`: ", re.MULTILINE)


def read_steps() -> list[str]:
    """The files that the page names, in order; its numbers count them."""
    steps = STEP.findall(PAGE.read_text())
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    return [file for _, file in steps]


def test_the_reading_order_is_short() -> None:
    files = read_steps()
    assert 20 < len(files) == len(set(files)) <= 45
    lines = sum(len((ROOT / "src/weft" / file).read_text().splitlines()) for file in files)
    assert lines < 9000
    assert f"There are {len(files)} of them" in PAGE.read_text()


def list_definitions(file: str) -> set[str]:
    """Names of the functions and classes of a file; of methods, `Class.method`."""
    found = set()
    for node in ast.parse((ROOT / "src/weft" / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {*methods, *(f"{node.name}.{name}" for name in methods)}
    return found


def test_the_names_that_it_mentions_are_there() -> None:
    checked = 0
    for line in PAGE.read_text().splitlines():
        if match := STEP.match(line):
            for name in re.findall(r"`([A-Za-z_.]+)`", line[match.end() :]):
                assert name in list_definitions(match[2]), f"{match[2]} has no {name}"
                checked += 1
    assert checked > 12


@pytest.mark.slow
def test_it_leads_through_the_calls_of_a_step(tmp_path: Path) -> None:
    """Of a run on one device: every file on the stack at `Master.step`, where each call begins, and at
    `Optimizer.step`.
    """
    records = trace_step.run_ppo((), tmp_path)
    entries = trace_step.find_entry_files(records)
    assert {"runtime/master.py", "interfaces/train.py", "engine/torch/optimizer.py"} <= entries
    assert entries - set(read_steps()) == set()
    called = {file for record in records for file in record["files"]}
    assert set(read_steps()) - called == set()
