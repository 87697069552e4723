"""The estimate of a step on a GPU runs, and what is compiled makes it shorter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_it_says_how_long_a_step_would_take(repo: Path) -> None:
    made = []
    for words in ([], ["--eager"]):
        command = [sys.executable, "-m", "benchmarks.estimate", "--tokens", "512", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=repo)
        found = re.search(r"2048 tokens: ([0-9.]+) ms, MFU ([0-9.]+)%\n([0-9]+) kernels", done.stdout)
        assert found is not None, done.stdout
        made.append(tuple(float(x) for x in found.groups()))
    (fused, fused_mfu, kernels), (eager, eager_mfu, more) = made
    assert fused < eager and fused_mfu > eager_mfu and kernels < more
