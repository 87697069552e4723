"""Real runs that are killed again and again end with the metrics and weights of the run that never
was, bit for bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.cases import CASES, prepare
from weft.launch import run
from weft.runtime import directory

CLOCKS = (
    "step_seconds",
    "peak_memory_gb",
    "peak_bytes",
    "tokens_per_second",
    "mfu",
    "cached_fraction",
)


def timeless(path: Path) -> list[dict]:
    """Metrics without times, memory, and what the cache on disk already knew."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {
            k: v
            for k, v in line.items()
            if not k.startswith(("time/", "predicted/")) and k.rsplit("/", 1)[-1] not in CLOCKS
        }
        for line in lines
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("restart")
    prepare(folder)
    return folder


def kill_again_and_again(root: Path, case: str, kills: int) -> None:
    expected = run(CASES[case](root, f"whole-{case}")).directory
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    words = [
        sys.executable,
        "-m",
        "tests.launch.killer",
        str(root),
        case,
        f"killed-{case}",
        str(kills),
        "7",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) >= 2, "the run was over before it was killed"
    found = root / f"killed-{case}" / "e" / "t"
    assert timeless(found / "metrics.jsonl") == timeless(expected / "metrics.jsonl")
    assert (found / "samples.jsonl").read_text() == (expected / "samples.jsonl").read_text()
    assert directory.compute_checksums(found / "checkpoints") == directory.compute_checksums(
        expected / "checkpoints"
    )


@pytest.mark.parametrize("case", ["sft", pytest.param("ppo", marks=pytest.mark.slow)])
def test_a_run_that_is_killed_ends_the_same(root, case):
    kill_again_and_again(root, case, kills=3)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dpo", "grpo", "distill"])
def test_a_run_that_is_killed_many_times_ends_the_same(root, case):
    kill_again_and_again(root, case, kills=12)
