"""Other launchers: they are recognised by their environment, and answered with weft's own command."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import prompt_answer_rows, write_jsonl
from weft.cli import dialects
from weft.cli import main as weft
from weft.errors import ConfigError
from weft.launch import other_launchers, run

RANKED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8"}
TORCHRUN = {**RANKED, "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0"}
DEEPSPEED = {**RANKED, "CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "8"}
ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_BACKEND": "NO"}
WORDS = ["quickstart", "sft", "trial_name=t", "dataset.train_path=a b.jsonl"]
SAID = "weft quickstart sft trial_name=t 'dataset.train_path=a b.jsonl'"


@pytest.mark.parametrize(
    ("environ", "words", "command"),
    [
        (TORCHRUN, WORDS, f"{SAID} n_nodes=2 n_gpus_per_node=4 allocation_mode=d8f1 mode=ray"),
        (
            TORCHRUN,
            [*WORDS, "mode=slurm", "allocation_mode=d4t2"],
            f"{SAID} mode=slurm allocation_mode=d4t2 n_nodes=2 n_gpus_per_node=4",
        ),
        (
            DEEPSPEED,
            [*WORDS, "--local_rank=3"],
            f"{SAID} n_nodes=1 n_gpus_per_node=8 allocation_mode=d8f1",
        ),
        (ACCELERATE, WORDS, f"{SAID} bf16=true"),
        (ACCELERATE, [*WORDS, "--token", "abc"], f"{SAID} --token '***' bf16=true"),
        (
            DEEPSPEED,
            [*WORDS, "model.zero_stage=1"],
            f"{SAID} model.zero_stage=1 n_nodes=1 n_gpus_per_node=8 allocation_mode=d8",
        ),
        (
            DEEPSPEED,
            [*WORDS, "model.layout=t2"],
            f"{SAID} model.layout=t2 n_nodes=1 n_gpus_per_node=8",
        ),
        (
            DEEPSPEED,
            [*WORDS, "model.parallel.model_parallel_size=2"],
            f"{SAID} model.parallel.model_parallel_size=2 n_nodes=1 n_gpus_per_node=8",
        ),
        (
            {**TORCHRUN, **ACCELERATE, "LOCAL_WORLD_SIZE": "8", "ACCELERATE_USE_FSDP": "true"},
            WORDS,
            f"{SAID} n_nodes=1 n_gpus_per_node=8 allocation_mode=d8 bf16=true",
        ),
        (RANKED, ["start", "-e", "x"], "weft start -e x"),
    ],
)
def test_the_command_that_does_the_same(
    environ: dict[str, str], words: list[str], command: str
) -> None:
    found = other_launchers.detect_launcher(environ)
    assert found is not None and found.build_command(words) == command


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "8"},
        {"ACCELERATE_CONFIG_FILE": "a.yaml"},
        {"SLURM_PROCID": "0", "OMPI_COMM": "1"},
    ],
)
def test_a_shell_is_no_launcher(environ: dict[str, str]) -> None:
    assert other_launchers.detect_launcher(environ) is None


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["model.layout=t2"],
        pytest.param(
            ["--deepspeed", "ds.json"],
            marks=pytest.mark.skipif(
                dialects.find("deepspeed") is None, reason="weft.compat is not installed"
            ),
        ),
        ["zero_stage={stage}"],
    ],
)
def test_the_words_that_are_advised_are_taken(
    words: list[str],
    stage: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 300,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    }
    Path("m").mkdir()
    Path("m/config.json").write_text(json.dumps(shape))
    write_jsonl(Path("r.jsonl"), prompt_answer_rows())
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    found = other_launchers.detect_launcher(
        {**TORCHRUN, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    )
    assert found is not None
    given = ["quickstart", "sft", "model.path=m", "dataset.path=r.jsonl", "device=cpu", *words]
    _, *advised = shlex.split(found.build_command([word.format(stage=stage) for word in given]))
    assert weft.main([*advised, "--dry-run=config"]) == 0
    assert "fits: each of 2 devices" in capsys.readouterr().out


def test_the_first_process_says_it_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(weft, "FIRST_RANK_SECONDS", 0.0)
    for name, value in DEEPSPEED.items():
        monkeypatch.setenv(name, value)
    assert weft.main(WORDS) == 2
    assert capsys.readouterr().err.startswith("error: deepspeed has started 8 processes of weft")
    with pytest.raises(ConfigError, match="YOUR_SCRIPT"):
        run(object())  # type: ignore[arg-type]
    monkeypatch.setenv("RANK", "1")
    assert weft.main(WORDS) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_torchrun_itself() -> None:
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "weft.cli.main",
    ]
    done = subprocess.run(
        [*words, *WORDS], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.stderr.count("error: torchrun has started 2 processes of weft") == 1
    assert f"{SAID} n_nodes=1 n_gpus_per_node=2 allocation_mode=d2f1\n" in done.stderr
    assert "exitcode  : 2" in done.stderr
