"""Every command end to end, on tiny sizes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import sft
from benchmarks.training import prepare
from tests.benchmarks.forked import run_module

pytestmark = pytest.mark.slow
TRL_PPO = "WEFT_BENCH_TRL_PPO"


def run(name: str, data_dir: Path, repo: Path, *words: str) -> tuple[int, str, str]:
    """Return (exit code, standard output, standard error)."""
    return run_module(
        f"benchmarks.{name}", *words, "--threads", "1", "--data", str(data_dir), cwd=repo
    )


@pytest.mark.slow_cases("dpo", "grpo")
@pytest.mark.parametrize("name", ["sft", "rw", "dpo", "grpo"])
def test_against_trl(name: str, data_dir: Path, repo: Path) -> None:
    if importlib.util.find_spec("trl") is None:
        pytest.skip("TRL is not installed: pip install trl==1.16.0")
    code, out, err = run(name, data_dir, repo, "--quick")
    assert code == 0, err[-3000:]
    assert "times as fast" in out and "peak GiB" in out


@pytest.mark.exhaustive
def test_trl_has_imported_what_it_needs_before_memory_is_counted(
    data_dir: Path, tmp_path: Path
) -> None:
    if importlib.util.find_spec("trl") is None:
        pytest.skip("TRL is not installed: pip install trl==1.16.0")
    settings = prepare(
        replace(sft.CASE.quick(), longest=128, batch=4, steps=2), data_dir, tmp_path, 1
    )
    code = (
        "import json, sys\n"
        "from benchmarks import trl_side\n"
        "class Clock(trl_side.Clock):\n"
        "    def __init__(self, pause):\n"
        "        self.known = set(sys.modules)\n"
        "        super().__init__(pause)\n"
        "        Clock.last = self\n"
        "trl_side.Clock = Clock\n"
        "trl_side.train(json.loads(sys.argv[1]), lambda _: None)\n"
        "print('late', *sorted(set(sys.modules) - Clock.last.known))\n"
    )
    given = json.dumps({**settings, "work": str(tmp_path / "run")}, default=str)
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, given], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    late = next(line for line in done.stdout.splitlines() if line.startswith("late")).split()[1:]
    heavy = [
        m
        for m in late
        if m.split(".")[0] in ("torch", "transformers", "trl", "accelerate", "datasets", "sympy")
    ]
    assert len(heavy) < 5, heavy  # a small module that one version or other loads late


def test_ppo_against_the_last_trl_that_has_it(data_dir: Path, repo: Path) -> None:
    if not os.environ.get(TRL_PPO):
        pytest.skip(
            f"{TRL_PPO} is not set; benchmarks/README.md says how to install TRL 1.12 beside the "
            f"other"
        )
    code, out, err = run("ppo", data_dir, repo, "--quick")
    assert code == 0, err[-3000:]
    assert "times as fast" in out


def test_ppo_says_what_it_needs(
    data_dir: Path, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TRL_PPO, raising=False)
    code, _, err = run("ppo", data_dir, repo, "--quick")
    assert code == 2 and "pip install --no-deps --target" in err


@pytest.mark.slow_cases("generate", "realloc", "runtime", "layouts", "plan-", "suite")
@pytest.mark.parametrize(
    ("name", "said", "more"),
    [
        ("generate", "mixed lengths", []),
        ("limit", "of the fastest product", []),
        ("scale", "time against sequence length", ["--repeats", "1"]),
        ("realloc", "% of plain", []),
        ("runtime", "ms a call", ["--repeats", "2"]),
        ("layouts", "% of it", []),
        ("plan", "median error", ["--no-profile", "--only", "sft"]),
        ("plan_ranking", "Kendall tau", ["--no-profile", "--only", "sft"]),
        ("suite", "times as fast", ["--only", "zero-shot, letters"]),
    ],
)
def test_weft_alone_and_against_transformers(
    name: str, said: str, more: list[str], data_dir: Path, repo: Path
) -> None:
    code, out, err = run(name, data_dir, repo, "--quick", *more)
    assert code == 0, err[-3000:]
    assert said in out
