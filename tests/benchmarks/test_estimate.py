"""The estimate of a step on a GPU runs, and what is compiled makes it shorter."""

from __future__ import annotations

import re
from pathlib import Path

from tests.benchmarks.forked import run_module


def test_it_says_how_long_a_step_would_take(repo: Path) -> None:
    made = []
    for words in ([], ["--eager"]):
        code, out, err = run_module("benchmarks.estimate", "--tokens", "512", *words, cwd=repo)
        assert code == 0, err
        found = re.search(r"2048 tokens: ([0-9.]+) ms, MFU ([0-9.]+)%\n([0-9]+) kernels", out)
        assert found is not None, out
        made.append(tuple(float(x) for x in found.groups()))
    (fused, fused_mfu, kernels), (eager, eager_mfu, more) = made
    assert fused < eager and fused_mfu > eager_mfu and kernels < more
