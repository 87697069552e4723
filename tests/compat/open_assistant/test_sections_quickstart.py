"""`weft quickstart NAME --configs A B ...` with sections in Open-Assistant's keys, and whole runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.tiny import make_llama, pair_rows, prompt_answer_rows, write_jsonl
from weft.cli.main import main

CONFIGS = """\
base:
  learning_rate: 1e-3
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 2
  num_train_epochs: 1
  dtype: fp32
  output_dir: saved_model
tiny:
  model: {path: m}
  progress: false
rows:
  dataset.train_path: sft.jsonl
pairs:
  dataset.train_path: pairs.jsonl
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").write_text(CONFIGS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["quickstart", *words, "--cfg", "job"]) == 0
    made = yaml.safe_load(capsys.readouterr().out)
    assert isinstance(made, dict)
    return made


def test_the_configuration_of_a_stack(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "more").mkdir()
    (here / "more" / "x.yaml").write_text("x: {seed: 7}\n")
    made = job(
        capsys, "sft", "--configs", "base", "tiny", "x", "--config-dir", "more", "max_steps=3"
    )
    assert made["seed"] == 7 and made["max_steps"] == 3 and made["fileroot"] == "saved_model"
    assert made["dataset"]["train_bs_n_seqs"] == 4 and made["model"]["optimizer"]["lr"] == 1e-3  # type: ignore[index]


def test_a_deepspeed_file_of_the_stack(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "configs" / "deep.yaml").write_text(
        "big: {deepspeed_config: configs/zero3_config_sft.json}\n"
    )
    assert job(capsys, "sft", "--configs", "base", "big", "--deepspeed")["model"]["zero_stage"] == 3  # type: ignore[index]
    assert job(capsys, "sft", "--configs", "base", "big")["model"]["zero_stage"] is None  # type: ignore[index]
    made = job(capsys, "sft", "--configs", "base", "big", "--deepspeed", "model.zero_stage=1")
    assert made["model"]["zero_stage"] == 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--configs", "base", "learning_rat=3"],
            "unknown key 'learning_rat'; did you mean learning_rate",
        ),
        (
            ["--configs", "base", "learning_rate=x"],
            "model.optimizer.lr='x': must be a number, such as 0.1 or 1e-5 (command",
        ),
        (
            ["--configs", "base", "num_rollouts=3"],
            "num_rollouts: weft quickstart sft does not read it",
        ),
    ],
)
def test_what_is_wrong_is_one_message(
    words: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quickstart", "sft", *words, "--cfg", "job"]) == 2
    assert message in capsys.readouterr().err


def test_stacks_run_end_to_end(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_llama(here / "m")
    write_jsonl(here / "sft.jsonl", prompt_answer_rows(8))
    write_jsonl(here / "pairs.jsonl", pair_rows(8))
    assert main(["quickstart", "sft", "--configs", "base", "rows", "tiny", "max_steps=2"]) == 0
    out = capsys.readouterr().out
    assert "settings: base rows tiny" in out and "model.optimizer.lr = 0.001" in out
    run = here / "saved_model" / "sft" / "base-rows-tiny"
    assert [
        json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2]
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["optimizer"]["lr"] == 1e-3
    assert (
        main(
            [
                "quickstart",
                "rw",
                "--configs",
                "base,pairs,tiny",
                "max_steps=1",
                "score_l2_reg=0.001",
            ]
        )
        == 0
    )
    saved = yaml.safe_load(
        (here / "saved_model" / "rw" / "base-pairs-tiny" / "config.yaml").read_text()
    )
    assert saved["rw"]["score_l2"] == 0.001
