"""`weft demo` as a newcomer runs it: accuracy rises at every stage; a report and a model to talk to
are left.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.cli.demo import Demo, find_free_name, print_conclusion, run_stages

pytestmark = pytest.mark.slow


def test_every_stage_of_the_demo_raises_accuracy(tmp_path: Path) -> None:
    demo = Demo(tmp_path, find_free_name(tmp_path), seed=1)
    lines: list[str] = []
    run_stages(demo, lines.append)
    print_conclusion(demo, lines.append)
    assert demo.accuracy["sft"] > 0.3
    assert demo.accuracy["ppo"] > demo.accuracy["sft"] + 0.08
    assert demo.accuracy["grpo"] > demo.accuracy["ppo"] + 0.03
    assert (demo.folder / "grpo" / "report.html").is_file()
    assert any("held-out accuracy" in line for line in lines)
    assert find_free_name(tmp_path) == "demo-2"
    assert list((demo.folder / "grpo" / "checkpoints" / "actor").glob("step*/chat_template.jinja"))
