"""The last lines of a run, and that they are commands which can be typed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from weft.cli.quickstart import build_config
from weft.experiments import DPOConfig, RWConfig, SFTConfig
from weft.experiments.gen import GenConfig
from weft.launch.assemble import build_next_lines


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from tests.tiny import make_llama

    monkeypatch.chdir(tmp_path)
    make_llama(tmp_path / "m")
    for name in ("rows", "PAIRS", "PROMPTS"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    (tmp_path / "runs" / "e" / "rw").mkdir(parents=True)
    return tmp_path


def lines(cls: type[Any], role: str, **more: Any) -> list[str]:
    config = cls(
        experiment_name="e",
        trial_name="t",
        dataset={"path": "rows.jsonl"},
        **{role: {"path": "m"}},
        **more,
    )
    return build_next_lines(config.build(), Path(more.get("fileroot", "runs")) / "e" / "t")


def test_after_sft(folder: Path) -> None:
    report, chat, reward, ppo = lines(SFTConfig, "model")
    assert (report, chat) == ("report: runs/e/t/report.html", "next:   weft chat runs/e/t")
    assert (
        "weft quickstart rw experiment_name=e trial_name=rw-2 model.path=runs/e/t "
        "dataset.type=preference "
        "dataset.path=PAIRS.jsonl" in reward
    )
    assert "actor.path=runs/e/t rew.path=runs/e/rw-2 dataset.path=PROMPTS.jsonl" in ppo


def test_after_the_others(folder: Path) -> None:
    _, ppo, judged = lines(RWConfig, "model")
    assert (
        "ppo experiment_name=e trial_name=ppo actor.path=m rew.path=runs/e/t "
        "dataset.path=PROMPTS.jsonl" in ppo
    )
    assert "weft eval rm runs/e/t PAIRS.jsonl" in judged
    assert [line.split("weft ")[-1] for line in lines(DPOConfig, "actor")[1:]] == [
        "chat runs/e/t",
        "chat m runs/e/t    # before and after",
    ]
    assert lines(GenConfig, "model") == []


def test_the_commands_are_read_as_they_stand(folder: Path) -> None:
    commands = [*lines(SFTConfig, "model", fileroot="my runs")[2:], lines(RWConfig, "model")[1]]
    assert len(commands) == 3
    for line in commands:
        words = shlex.split(line.removeprefix("next:"))
        assert words[:2] == ["weft", "quickstart"]
        config, _ = build_config(words[2:])
        assert config.experiment_name == "e"
