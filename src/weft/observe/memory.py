"""Memory use of this process, and settings that make allocators reuse freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

GIB = 2**30
MIB = 2.0**20
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # makes Linux set the peak to the current size, see proc(5)
# Options of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
# Both sizes are the largest that mallopt accepts, in bytes.
HEAP = {M_TRIM_THRESHOLD: (1 << 31) - 1, M_MMAP_THRESHOLD: 1 << 25, M_ARENA_MAX: 1}
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Environment variables that torch reads; the first is the newer name.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def build_segment_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that make torch use expandable segments on GPUs.

    The variables must be set before a process imports torch. With expandable segments, freed memory
    can be reused for tensors of any size. This matters because the sizes of packed batches and KV
    caches vary from one allocation to the next. The result is empty if the user has configured
    torch's allocator.
    """
    if any(name in environment for name in ALLOCATOR):
        return {}
    return {ALLOCATOR[0]: "expandable_segments:True"}


# Largest peak in GiB before the last restart. Linux has one peak per process, so this is a global.
_earlier_peak_gb = 0.0


def measure_peak_memory_gb() -> float:
    """Return the largest resident set size of this process so far, in GiB."""
    recent = measure_recent_peak_gb()  # before the global, which another thread may be updating
    return max(recent, _earlier_peak_gb)


def restart_peak_memory() -> bool:
    """Start a new measurement of `measure_recent_peak_gb`, and return whether this is possible.

    It is possible on Linux, where it takes about 10 microseconds at any size of the process.
    """
    global _earlier_peak_gb
    _earlier_peak_gb = measure_peak_memory_gb()
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:  # another system, or a read-only /proc
        return False
    return True


def measure_recent_peak_gb() -> float:
    """Return the largest resident set size since `restart_peak_memory`, in GiB.

    Before the first restart, this is the largest size since the process started.
    """
    # On Linux ru_maxrss starts at the parent's resident size at the fork, so it can be too large.
    if sys.platform == "linux" and STATUS.exists():
        return 1024 * int(STATUS.read_text().partition("VmHWM:")[2].split(maxsplit=1)[0]) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB elsewhere
    return peak / GIB if sys.platform == "darwin" else peak * 1024 / GIB


def measure_file_pages_gb() -> float:
    """Return the size of this process's resident memory that is mapped from files, in GiB.

    Most of this memory is library code. Returns 0 if the operating system does not report it.
    """
    if sys.platform == "linux" and STATUS.exists():
        _, separator, rest = STATUS.read_text().partition("RssFile:")
        return 1024 * int(rest.split(maxsplit=1)[0]) / GIB if separator else 0.0
    return 0.0


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory, in one heap for all threads.

    Returning memory to the operating system and requesting it again causes a page fault for each
    page. For a 13M-parameter model, these faults take up to a quarter of a training step. The
    setting affects all allocations of the process, so it is only used in processes that weft itself
    starts. Does nothing with another C library.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            for option, value in HEAP.items():
                ctypes.CDLL(None).mallopt(option, value)


@contextlib.contextmanager
def prepare_heaps() -> Iterator[None]:
    """Set up the heaps of processes that are started within this context, by environment variables.

    `keep_freed_memory` is too late for a process that already has threads, because each thread has
    a separate heap, an arena. All arenas but the first consist of areas of 64 MiB, half of which
    can stay unused if blocks are large. Variables that the user has set are not changed.
    """
    variables = build_heap_variables(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def build_heap_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that make glibc's malloc keep freed memory in one heap.

    With huge pages, blocks of 8 MiB and more are outside of the heap: sharded training gathers and
    frees many of them, and small blocks would take up part of the space that each leaves. Without
    huge pages, the page faults of such blocks would take a quarter of a step.
    """
    # minimum size of the blocks outside of the heap, in bytes
    separate_size = HEAP[M_MMAP_THRESHOLD]
    variables = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": str(HEAP[M_TRIM_THRESHOLD])}
    try:
        has_huge_pages = "[never]" not in HUGE_PAGES.read_text(encoding="ascii")
    except OSError:  # another system
        has_huge_pages = False
    if has_huge_pages:
        separate_size = 1 << 23
        variables["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    variables["MALLOC_MMAP_THRESHOLD_"] = str(separate_size)
    return {name: value for name, value in variables.items() if name not in environment}


def format_size(num_bytes: float, digits: int = 2) -> str:
    """Format a number of bytes in GiB with `digits` decimals, or in MiB with one decimal less.

    MiB are used below 0.1 GiB.
    """
    if num_bytes >= 0.1 * GIB:
        return f"{num_bytes / GIB:.{digits}f} GiB"
    return f"{num_bytes / MIB:.{digits - 1}f} MiB"
