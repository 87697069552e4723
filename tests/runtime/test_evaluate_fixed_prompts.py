"""Real runs that answer a few fixed prompts at every evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.cases import dpo, grpo, options, ppo, prepare
from weft.errors import UserError
from weft.experiments import SFTConfig
from weft.experiments.common import RunConfig
from weft.launch import run
from weft.observe.sample_rows import EVAL_PROMPTS

PROMPTS = ["1+1=", "the sun is"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fixed")
    prepare(folder)
    (folder / "asked.txt").write_text("\n".join(PROMPTS) + "\n")
    return folder


def answers(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / EVAL_PROMPTS).read_text().splitlines()]


def small(root: Path, folder: str, **more: Any) -> SFTConfig:
    given = {
        "eval_prompts": str(root / "asked.txt"),
        "eval_prompts_max_new_tokens": 6,
        "eval_freq_steps": 2,
    }
    config = SFTConfig(**options(root, folder, **{**given, "max_steps": 5, **more}))
    config.model.path, config.model.optimizer.lr, config.model.dtype = (
        str(root / "model"),
        1e-2,
        "float64",
    )
    config.dataset.train_path, config.dataset.train_bs_n_seqs = str(root / "sft.jsonl"), 8
    return config


def test_answers_come_at_the_start_at_every_evaluation_and_at_the_end(root: Path) -> None:
    """Without validation rows, too."""
    found = answers(run(small(root, "sft")).directory)
    assert [(row["step"], row["id"]) for row in found] == [
        (step, id) for step in (0, 2, 4, 5) for id in "01"
    ]
    assert [row["prompt"] for row in found[:2]] == PROMPTS
    assert all(row["tokens"] <= 6 and row["finish_reason"] in ("stop", "length") for row in found)
    first, last = found[0]["completion"], found[-2]["completion"]
    assert first != last, "at this rate the model has changed"


@pytest.mark.slow
def test_training_is_the_same_with_and_without_them(root: Path) -> None:
    with_prompts, without = (
        run(small(root, "with")),
        run(
            small(
                root,
                "without",
                eval_prompts=None,
                eval_prompts_max_new_tokens=None,
                eval_freq_steps=None,
            )
        ),
    )
    losses = [[line["train/loss"] for line in result.metrics] for result in (with_prompts, without)]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_resumed_run_has_each_answer_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(small(root, "whole")).directory
    from weft.runtime.session import Session

    write = Session._write_line

    def dies(self: Session, line: Any) -> None:
        write(self, line)
        if line["step"] == 4:
            raise KeyboardInterrupt  # after the answers of step 4, and before its recovery point

    with monkeypatch.context() as patched:
        patched.setattr(Session, "_write_line", dies)
        with pytest.raises(KeyboardInterrupt):
            run(small(root, "again"))
    torn = root / "again" / "e" / "t" / EVAL_PROMPTS
    assert [row["step"] for row in answers(torn.parent)] == [0, 0, 2, 2, 4, 4]
    with torn.open("a") as file:
        file.write('{"step": 4, "id": "0", "pro')
    again = run(small(root, "again")).directory
    assert answers(again) == answers(whole)


@pytest.mark.parametrize(
    "make",
    [grpo, pytest.param(ppo, marks=pytest.mark.slow), pytest.param(dpo, marks=pytest.mark.slow)],
)
def test_every_algorithm_that_trains_a_policy_answers(make: Any, root: Path) -> None:
    config: RunConfig = make(root, f"of-{make.__name__}")
    config.eval_prompts, config.eval_freq_steps, config.max_steps = str(root / "asked.txt"), 1, 2
    config.eval_prompts_max_new_tokens = 4
    found = answers(run(config).directory)
    assert [row["step"] for row in found] == [0, 0, 1, 1, 2, 2] and found[0]["prompt"] == PROMPTS[0]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_devices")
@pytest.mark.parametrize("layout", ["d2", "t2", "p2"])
def test_answers_are_the_same_in_every_layout(layout: str, root: Path) -> None:
    one = answers(run(small(root, f"one-{layout}")).directory)
    config = small(root, layout)
    config.model.layout = layout
    assert answers(run(config).directory) == one


def test_prompts_that_cannot_be_asked_are_reported_before_anything_is_written(root: Path) -> None:
    (root / "bad.jsonl").write_text(
        '{"prompt": "fine"}\n{"question": 3}\n{"prompt": "' + "long " * 4000 + '"}\n'
    )
    with pytest.raises(
        UserError,
        match=r"bad.jsonl:2: (.|\n)*bad.jsonl:3: the prompt has .* tokens, and the model's",
    ):
        run(small(root, "bad", eval_prompts=str(root / "bad.jsonl")))
    assert not (root / "bad").exists()
