"""Memory that a CPU's process has freed is its own to use again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from weft.engine.device import resolve_device
from weft.models.native.library import library

FAULTS = """
import resource, torch
from weft.engine.device import resolve_device
resolve_device("cpu")
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    alive = [torch.ones(size << 18) for size in (12, 30, 20, 25, 16) * 3]
    del alive
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(8)))
"""

HOLES = """
import random, torch
from weft.engine.device import resolve_device
from weft.observe.memory import peak_memory_gb
resolve_device("cpu")
draw, before, kept, most = random.Random(0), peak_memory_gb(), [], 0
for _ in range(60):
    share, alive = draw.uniform(0.5, 1), []
    for _ in range(40):
        alive.append(torch.ones(int(share * draw.choice((1 << 18, 1 << 19, 1 << 20)))))
        kept.append(torch.empty(0))
    most = max(most, sum(tensor.nbytes for tensor in alive))
    del alive
print((peak_memory_gb() - before) * 2**30 / most)
"""
compiled = pytest.mark.skipif(library() is None, reason="the heap's blocks are compiled with the kernels")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_freed_memory_is_taken_again_without_a_fault_a_page() -> None:
    """Tensors of 309 MB, made and freed again and again: in the end they lie where others lay."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100


@compiled
def test_small_things_that_stay_leave_no_holes_between_large_ones_that_go() -> None:
    """Of 40 tensors a step, 100 MB at most, and a small one beside each that stays: 2.6 times as much in torch's own blocks."""
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.1


@compiled
def test_tensors_are_aligned_and_seen_by_the_profiler_and_what_is_too_large_says_so() -> None:
    resolve_device("cpu")
    assert all(torch.empty(size, dtype=torch.uint8).data_ptr() % 64 == 0 for size in range(300))
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.empty(1 << 20)
    assert any(event.self_cpu_memory_usage == 4 << 20 for event in profile.key_averages())
    with pytest.raises(RuntimeError, match="not enough memory: you tried to allocate 4611686018427387904 bytes"):
        torch.empty(1 << 60)
