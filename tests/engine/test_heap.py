"""Memory that a CPU's process has freed is its own to use again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from weft.engine.device import resolve_device
if sys.argv[1] == "set up":
    resolve_device("cpu")
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in (12, 30, 20):
        torch.ones(size << 18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_freed_memory_is_taken_again_without_a_fault_a_page() -> None:
    """Three tensors of 62 MB, made and freed twice: the second time they lie where they lay."""

    def second(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert second("set up") < 100 < 1000 < second("as it is")
