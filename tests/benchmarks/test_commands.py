"""Every command end to end, on tiny sizes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
TRL_PPO = "WEFT_BENCH_TRL_PPO"


def run(name: str, data_dir: Path, repo: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{name}", *words, "--threads", "1", "--data", str(data_dir)]
    return subprocess.run(command, cwd=repo, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.parametrize("name", ["sft", "rw", "dpo", "grpo"])
def test_against_trl(name: str, data_dir: Path, repo: Path) -> None:
    if importlib.util.find_spec("trl") is None:
        pytest.skip("TRL is not installed: pip install trl==1.16.0")
    done = run(name, data_dir, repo, "--quick")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "times as fast" in done.stdout and "peak GiB" in done.stdout


def test_ppo_against_the_last_trl_that_has_it(data_dir: Path, repo: Path) -> None:
    if not os.environ.get(TRL_PPO):
        pytest.skip(f"{TRL_PPO} is not set; benchmarks/README.md says how to install TRL 1.12 beside the other")
    done = run("ppo", data_dir, repo, "--quick")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "times as fast" in done.stdout


def test_ppo_says_what_it_needs(data_dir: Path, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRL_PPO, raising=False)
    done = run("ppo", data_dir, repo, "--quick")
    assert done.returncode == 2 and "pip install --no-deps --target" in done.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [("generate", "mixed lengths"), ("limit", "of products"), ("scale", "time against sequence length")],
)
def test_weft_alone_and_against_transformers(name: str, said: str, data_dir: Path, repo: Path) -> None:
    done = run(name, data_dir, repo, "--quick")
    assert done.returncode == 0, done.stderr[-3000:]
    assert said in done.stdout
