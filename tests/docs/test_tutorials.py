"""The tutorials: every command is run as a reader would, and what the page promises is seen."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.test_pages import ROOT, TUTORIALS, prepare, read_page, run_commands
from tests.tiny import make_llama, write_jsonl

pytestmark = pytest.mark.slow
GSM8K = Path(os.environ.get("WEFT_TEST_DATA", ROOT.parent / "shared" / "data")) / "gsm8k"


@dataclass(frozen=True)
class Promise:
    """From the first to the last fifth of a run's steps a metric moves by at least `least` (by at most it, if negative)."""

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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("name", PROMISES)
def test_a_tutorial_does_what_it_says(name: str, tmp_path: Path, model: Path) -> None:
    page = read_page(TUTORIALS / name)
    prepare(tmp_path, page, model)
    put_gsm8k(tmp_path / "gsm8k")
    run_commands(tmp_path, page.commands)
    assert list((tmp_path / "runs").glob("*/*/report.html"))
    for promise in PROMISES[name]:
        moved = change(tmp_path / "runs" / promise.run / "metrics.jsonl", promise.metric)
        assert moved >= promise.least if promise.least > 0 else moved <= promise.least, (promise, moved)


def put_gsm8k(folder: Path) -> None:
    """The shortest problems of GSM8K, which fit a tiny model's context; without test data, rows of its form."""
    folder.mkdir()
    for name, count in (("train.jsonl", 16), ("test.jsonl", 8)):
        if GSM8K.is_dir():
            rows = [json.loads(line) for line in (GSM8K / name).read_text().splitlines()]
            rows = sorted(rows, key=lambda row: len(row["question"] + row["answer"]))[:count]
        else:
            rows = [
                {"question": f"What is {i} + {i}?", "answer": f"{i} + {i} = {2 * i}\n#### {2 * i}"}
                for i in range(count)
            ]
        write_jsonl(folder / name, rows)


def change(path: Path, metric: str) -> float:
    """The mean over the last fifth of the steps less that over the first."""
    values = [json.loads(line)[metric] for line in path.read_text().splitlines()]
    fifth = max(1, len(values) // 5)
    return sum(values[-fifth:]) / fifth - sum(values[:fifth]) / fifth


def test_a_change_is_from_the_first_fifth_to_the_last(tmp_path: Path) -> None:
    rows = [{"x": value} for value in (1, 3, 9, 9, 9, 9, 9, 9, 6, 8)]
    assert change(write_jsonl(tmp_path / "m.jsonl", rows), "x") == 5.0
