"""Memory that a CPU's process has freed is its own to use again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_freed_memory_is_taken_again_without_a_fault_a_page() -> None:
    """Tensors of 309 MB, made and freed again and again: in the end they lie where others lay."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100
