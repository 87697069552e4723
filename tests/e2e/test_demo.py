"""`weft demo` as a newcomer runs it: every stage runs and raises accuracy; a report and a model to
talk to remain.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.cli.demo import Demo, find_free_name, print_conclusion, run_stages
from weft.experiments import GenConfig

pytestmark = pytest.mark.slow


class ShortDemo(Demo):
    """Demo whose training stages have three steps each."""

    def run_stage(self, config: Any, activity: str = "starting") -> Any:
        if not isinstance(config, GenConfig):
            config.max_steps = 3
        return super().run_stage(config, activity)


def run_demo(demo: Demo) -> None:
    """Run all stages, and check what they leave."""
    lines: list[str] = []
    run_stages(demo, lines.append)
    print_conclusion(demo, lines.append)
    assert (demo.folder / "grpo" / "report.html").is_file()
    assert any("held-out accuracy" in line for line in lines)
    assert find_free_name(demo.root) == "demo-2"
    assert list((demo.folder / "grpo" / "checkpoints" / "actor").glob("step*/chat_template.jinja"))


def test_every_stage_of_the_demo_runs(tmp_path: Path) -> None:
    demo = ShortDemo(tmp_path, find_free_name(tmp_path), seed=1)
    run_demo(demo)
    assert list(demo.accuracy) == ["start", "sft", "ppo", "grpo"]


@pytest.mark.exhaustive
def test_every_stage_of_the_demo_raises_accuracy(tmp_path: Path) -> None:
    demo = Demo(tmp_path, find_free_name(tmp_path), seed=1)
    run_demo(demo)
    assert demo.accuracy["sft"] > 0.3
    assert demo.accuracy["ppo"] > demo.accuracy["sft"] + 0.08
    assert demo.accuracy["grpo"] > demo.accuracy["ppo"] + 0.03
