"""The tutorials: every command is run as a reader would, and what the page promises is seen."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.test_pages import TUTORIALS, read_page, run_commands
from tests.tiny import write_jsonl

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Promise:
    """From the first to the last fifth of a run's steps a metric moves by at least `least` (by at
    most it, if negative).
    """

    run: str
    metric: str
    least: float


PROMISES = {
    "own-reward.md": [Promise("own/vowels", "reward/reward", 0.1)],
    "grpo-gsm8k.md": [],
    "sft-to-ppo.md": [
        Promise("chain/sft", "train/loss", -1.0),
        Promise("chain/reward", "train/margin", 0.5),
        Promise("chain/ppo", "rew_inf/reward", 0.1),
    ],
    "dpo.md": [
        Promise("brief/dpo", "actor_train/loss", -0.1),
        Promise("brief/dpo", "actor_train/rewards/margins", 0.1),
    ],
    "lora.md": [Promise("lora/sft", "train/loss", -0.2)],
}


def test_every_tutorial_is_run() -> None:
    assert set(PROMISES) == {path.name for path in TUTORIALS.glob("*.md")}


@pytest.mark.parametrize("name", PROMISES)
def test_a_tutorial_does_what_it_says(name: str, tmp_path: Path) -> None:
    """In an empty folder, with nothing but what the page itself makes."""
    page = read_page(TUTORIALS / name)
    for file, body in page.files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(body)
    run_commands(tmp_path, page.commands)
    assert list((tmp_path / "runs").glob("*/*/report.html"))
    for promise in PROMISES[name]:
        moved = change(tmp_path / "runs" / promise.run / "metrics.jsonl", promise.metric)
        assert moved >= promise.least if promise.least > 0 else moved <= promise.least, (
            promise,
            moved,
        )


def change(path: Path, metric: str) -> float:
    """The mean over the last fifth of the steps less that over the first."""
    values = [json.loads(line)[metric] for line in path.read_text().splitlines()]
    fifth = max(1, len(values) // 5)
    return sum(values[-fifth:]) / fifth - sum(values[:fifth]) / fifth


def test_a_change_is_from_the_first_fifth_to_the_last(tmp_path: Path) -> None:
    rows = [{"x": value} for value in (1, 3, 9, 9, 9, 9, 9, 9, 6, 8)]
    assert change(write_jsonl(tmp_path / "m.jsonl", rows), "x") == 5.0
