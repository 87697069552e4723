"""`--deepspeed [FILE]` on the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from weft.cli import main as weft


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "steps_per_print": 5,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 0},
    }
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


@pytest.mark.parametrize(
    "flag", [["--deepspeed", "ds.json"], ["--deepspeed=ds.json"], ["deepspeed=ds.json"]]
)
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
    assert "note: --deepspeed ds.json is read as model.optimizer.type=adamw " in captured.err
    assert (
        "ds.json: model.dtype=bfloat16 of the file is overridden by model.dtype=float32"
        in captured.err
    )
    assert "note: --deepspeed: these keys only tune DeepSpeed: steps_per_print" in captured.err


def test_the_flag_alone_is_stage_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert weft.main([*SFT, "--deepspeed", "seed=3"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert (config["model"]["zero_stage"], config["seed"]) == (2, 3)


def test_what_is_set_beside_the_file_counts_and_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "ds.json").write_text('{"train_batch_size": 32, "gradient_clipping": 1.0}')
    assert weft.main([*SFT, "--deepspeed", "ds.json", "dataset.train_bs_n_seqs=16"]) == 0
    captured = capsys.readouterr()
    assert yaml.safe_load(captured.out)["dataset"]["train_bs_n_seqs"] == 16
    assert captured.err.splitlines() == [
        "note: --deepspeed ds.json is read as model.optimizer.max_grad_norm=1.0",
        "note: --deepspeed ds.json: dataset.train_bs_n_seqs=32 of the file is overridden by "
        "dataset.train_bs_n_seqs=16",
    ]


def test_what_each_auto_has_become_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    auto = {
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": "auto"},
        "optimizer": {"params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"params": {"warmup_min_lr": "auto"}},
    }
    (folder / "ds.json").write_text(json.dumps(auto))
    assert (
        weft.main(
            [*SFT, "--deepspeed", "ds.json", "learning_rate=2e-4", "dataset.train_bs_n_seqs=8"]
        )
        == 0
    )
    assert (
        "note: --deepspeed ds.json: what is auto: train_batch_size is dataset.train_bs_n_seqs=8; "
        "optimizer.params.lr is "
        "model.optimizer.lr=0.0002; optimizer.params.betas is model.optimizer.beta1=0.9 "
        "model.optimizer.beta2=0.95; "
        "scheduler.params.warmup_min_lr is 0; bf16.enabled is model.dtype, which weft chooses; "
        "zero_optimization.stage is "
        "model.zero_stage, which weft chooses\n"
    ) in capsys.readouterr().err


def test_sizes_that_do_not_go_together_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
    }
    (folder / "ds.json").write_text(json.dumps(sizes))
    words = [*SFT, "--deepspeed", "ds.json"]
    assert weft.main(words) == 2
    assert (
        "--deepspeed ds.json: train_batch_size=32 is not train_micro_batch_size_per_gpu=4 x "
        "gradient_accumulation_steps=2 x "
        "1 data-parallel rank = 8, and DeepSpeed refuses that; correct one of them, or set "
        "dataset.train_bs_n_seqs=N"
    ) in capsys.readouterr().err
    assert weft.main([*words, "allocation_mode=d4"]) == 0
    assert (
        weft.main([*words, "dataset.train_bs_n_seqs=16"])
        == weft.main([*words, "dataset.train_bs_n_seqs=32"])
        == 0
    )
    (folder / "ds.json").write_text('{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}')
    assert weft.main([*words, "model.layout=d4t2"]) == 0
    assert weft.main([*words, "model.layout=d3"]) == 2
    assert (
        "train_batch_size=32 is not a multiple of train_micro_batch_size_per_gpu=4 x 3"
        in capsys.readouterr().err
    )


def test_a_supervised_process_leaves_notes_to_its_supervisor(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*SFT, "--deepspeed", "ds.json", "seed=1", "seed=2"]
    assert weft.main(words) == 0
    told = capsys.readouterr().err
    assert "is read as" in told and "seed=1 and seed=2 are both set" in told
    monkeypatch.setenv("WEFT_SUPERVISED", f"5:0:{os.getppid()}")
    assert weft.main(words) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        ("{}", ["--deepspeed", "absent.json"], "--deepspeed absent.json: there is no such file"),
        ("[1]", ["--deepspeed", "ds.json"], "must contain a JSON object"),
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
    assert "no role is trained here" in capsys.readouterr().err
