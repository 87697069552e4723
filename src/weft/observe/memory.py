"""How much memory this process has needed at most."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

GIB = 2**30
STATUS = Path("/proc/self/status")


def peak_memory_gb() -> float:
    """Largest resident size of this process so far, in GiB."""
    # On Linux ru_maxrss begins at what the parent held when it made this process.
    if sys.platform == "linux" and STATUS.exists():
        return 1024 * int(STATUS.read_text().partition("VmHWM:")[2].split(maxsplit=1)[0]) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB elsewhere
    return peak / GIB if sys.platform == "darwin" else peak * 1024 / GIB
