"""`--deepspeed [FILE]` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from weft.cli import main as weft


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    config = {"bf16": {"enabled": True}, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}}, "steps_per_print": 5,
              "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0}}  # fmt: skip
    (tmp_path / "ds.json").write_text(json.dumps(config))
    return tmp_path


SFT = [
    "quickstart",
    "sft",
    "--cfg",
    "job",
    "experiment_name=e",
    "trial_name=t",
    "model.path=m",
    "dataset.train_path=r.jsonl",
]


@pytest.mark.parametrize("flag", [["--deepspeed", "ds.json"], ["--deepspeed=ds.json"], ["deepspeed=ds.json"]])
def test_a_file_is_read_and_the_command_line_goes_over_it(
    flag: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model.layout=d4", "dataset.max_seqlen=100", "model.dtype=float32"]
    assert weft.main([*SFT, *flag, *words]) == 0
    captured = capsys.readouterr()
    config = yaml.safe_load(captured.out)
    assert config["model"]["optimizer"]["lr"] == 1e-4 and config["model"]["dtype"] == "float32"
    assert config["dataset"]["train_bs_n_seqs"] == 8 and config["max_tokens_per_microbatch"] == 200
    assert config["model"]["zero_stage"] == 0
    assert "note: --deepspeed ds.json is read as model.dtype=bfloat16 " in captured.err
    assert "note: --deepspeed: these keys only tune DeepSpeed: steps_per_print" in captured.err


def test_the_flag_alone_is_stage_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert weft.main([*SFT, "--deepspeed", "seed=3"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert (config["model"]["zero_stage"], config["seed"]) == (2, 3)


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        ("{}", ["--deepspeed", "absent.json"], "--deepspeed absent.json: there is no such file"),
        ("[1]", ["--deepspeed", "ds.json"], "must hold a JSON object"),
        ("{", ["--deepspeed", "ds.json"], "is not JSON"),
        (
            '{"a": 1, "amp": {"enabled": true}}',
            ["--deepspeed", "ds.json"],
            "a=1: unknown; amp={'enabled': True}: NVIDIA's",
        ),
        (
            '{"optimizer": {"params": {"lr": 1.0}}}',
            ["--deepspeed", "ds.json", "learning_rate=2"],
            "are the same option",
        ),
    ],
)
def test_wrong_files_are_exit_2(
    content: str, words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "ds.json").write_text(content)
    assert weft.main([*SFT, *words]) == 2
    assert message in capsys.readouterr().err


def test_nothing_trained_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert weft.main(["quickstart", "gen", "--deepspeed", "ds.json"]) == 2
    assert "nothing is trained here" in capsys.readouterr().err
