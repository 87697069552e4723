"""How much memory this process has needed at most, and what it does with memory that is freed."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

GIB = 2**30
STATUS = Path("/proc/self/status")
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8  # of glibc's malloc.h
# bytes, the most it takes; arenas
HEAP = {M_TRIM_THRESHOLD: (1 << 31) - 1, M_MMAP_THRESHOLD: 1 << 25, M_ARENA_MAX: 1}
# torch reads both; the first is the newer name
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def growing_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """What a process needs in its environment, before it imports torch, so that a GPU's memory that
    was freed serves tensors of any other size: packs and caches of many sizes follow one another.
    Nothing where the user has set how torch allocates.
    """
    if any(name in environment for name in ALLOCATOR):
        return {}
    return {ALLOCATOR[0]: "expandable_segments:True"}


def peak_memory_gb() -> float:
    """Largest resident size of this process so far, in GiB."""
    # On Linux ru_maxrss begins at what the parent held when it made this process.
    if sys.platform == "linux" and STATUS.exists():
        return 1024 * int(STATUS.read_text().partition("VmHWM:")[2].split(maxsplit=1)[0]) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB elsewhere
    return peak / GIB if sys.platform == "darwin" else peak * 1024 / GIB


def file_pages_gb() -> float:
    """GiB of this process's memory that are pages of files, mostly the code of libraries; 0 where
    the system does not tell.
    """
    if sys.platform == "linux" and STATUS.exists():
        _, found, rest = STATUS.read_text().partition("RssFile:")
        return 1024 * int(rest.split(maxsplit=1)[0]) / GIB if found else 0.0
    return 0.0


def keep_freed_memory() -> None:
    """Have this process keep what it frees, in one heap for all threads, where the C library is
    glibc.

    Given back and asked for again, each page costs a fault: up to a quarter of a training step of a
    13M-parameter model. It changes how all of the process allocates, so only processes that weft
    itself starts call it.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            for option, value in HEAP.items():
                ctypes.CDLL(None).mallopt(option, value)
