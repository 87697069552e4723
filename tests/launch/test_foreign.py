"""Other launchers: they are recognised by their environment, and answered with weft's own command."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from weft.cli import main as weft
from weft.errors import ConfigError
from weft.launch import foreign, run

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
        (TORCHRUN, [*WORDS, "mode=slurm", "allocation_mode=d4t2"],
         f"{SAID} mode=slurm allocation_mode=d4t2 n_nodes=2 n_gpus_per_node=4"),
        (DEEPSPEED, [*WORDS, "--local_rank=3"], f"{SAID} n_nodes=1 n_gpus_per_node=8 allocation_mode=d8f1"),
        (ACCELERATE, WORDS, f"{SAID} n_nodes=1 n_gpus_per_node=1 allocation_mode=d1f1 bf16=true"),
        ({**TORCHRUN, **ACCELERATE, "LOCAL_WORLD_SIZE": "8", "ACCELERATE_USE_FSDP": "true"}, WORDS,
         f"{SAID} n_nodes=1 n_gpus_per_node=8 allocation_mode=d8 bf16=true"),
        (RANKED, ["start", "-e", "x"], "weft start -e x"),
    ],
)  # fmt: skip
def test_the_command_that_does_the_same(environ: dict[str, str], words: list[str], command: str) -> None:
    found = foreign.launched(environ)
    assert found is not None and found.command(words) == command


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
    assert foreign.launched(environ) is None


def test_the_first_process_says_it_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(weft, "SPEAKS_SECONDS", 0.0)
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
    done = subprocess.run([*words, *WORDS], capture_output=True, text=True, check=False, env=os.environ)
    assert done.stderr.count("error: torchrun has started 2 processes of weft") == 1
    assert f"{SAID} n_nodes=1 n_gpus_per_node=2 allocation_mode=d2f1\n" in done.stderr
    assert "exitcode  : 2" in done.stderr
