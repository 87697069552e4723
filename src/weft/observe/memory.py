"""How much memory this process has needed at most."""

from __future__ import annotations

import resource
import sys

GIB = 2**30


def peak_memory_gb() -> float:
    """Largest resident size of this process so far, in GiB. Linux counts in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / GIB if sys.platform == "darwin" else peak * 1024 / GIB
