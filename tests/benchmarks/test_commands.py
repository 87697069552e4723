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

from benchmarks import dpo, rw, sft
from benchmarks.pairs import Side
from benchmarks.training import Case, prepare

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


@pytest.mark.parametrize("case", [sft.CASE, rw.CASE, dpo.CASE], ids=lambda case: case.name)
def test_trl_trains_on_the_tokens_that_are_counted(case: Case, data_dir: Path, tmp_path: Path) -> None:
    """TRL's own count of what is no padding, over all steps; a row that it cut or left out would show."""
    if importlib.util.find_spec("trl") is None:
        pytest.skip("TRL is not installed: pip install trl==1.16.0")
    small = replace(case.quick(), longest=128, batch=4, steps=2)
    settings = prepare(small, data_dir, tmp_path, 1)
    with Side("benchmarks.trl_side:train", tmp_path / "log") as side:
        side.begin({**settings, "work": str(tmp_path / "run")})
        for _ in settings["tokens"]:
            side.advance()
        last = side.advance()
    assert last["num_tokens"] == sum(settings["warm_tokens"]) + sum(settings["tokens"])


def test_trl_has_imported_what_it_needs_before_memory_is_counted(data_dir: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("trl") is None:
        pytest.skip("TRL is not installed: pip install trl==1.16.0")
    settings = prepare(replace(sft.CASE.quick(), longest=128, batch=4, steps=2), data_dir, tmp_path, 1)
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
    done = subprocess.run([sys.executable, "-c", code, given], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    late = next(line for line in done.stdout.splitlines() if line.startswith("late")).split()[1:]
    heavy = [m for m in late if m.split(".")[0] in ("torch", "transformers", "trl", "accelerate", "datasets", "sympy")]
    assert len(heavy) < 5, heavy  # a small module that one version or other loads late


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
    ("name", "said", "more"),
    [
        ("generate", "mixed lengths", []),
        ("limit", "of the fastest product", []),
        ("scale", "time against sequence length", ["--repeats", "1"]),
        ("realloc", "% of plain", []),
        ("runtime", "ms a call", ["--repeats", "2"]),
        ("layouts", "% of it", []),
    ],
)
def test_weft_alone_and_against_transformers(name: str, said: str, more: list[str], data_dir: Path, repo: Path) -> None:
    done = run(name, data_dir, repo, "--quick", *more)
    assert done.returncode == 0, done.stderr[-3000:]
    assert said in done.stdout
