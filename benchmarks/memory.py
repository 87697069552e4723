"""Resident memory of this process, as Linux counts it: now, and the most since the last mark."""

from __future__ import annotations

import sys
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # see proc(5), clear_refs


class PeakMemory:
    """What is needed above the memory at the time it is made, which is after the imports."""

    def __init__(self) -> None:
        self.begin = _status("VmRSS")
        CLEAR.write_text(RESET_PEAK)

    @property
    def bytes(self) -> int:
        """Largest resident size since then, above that at the start."""
        # A run of weft starts the system's measurement again at each call and keeps the earlier peak.
        memory = sys.modules.get("weft.observe.memory")
        earlier = 0 if memory is None else round(memory.measure_peak_memory_gb() * memory.GIB)
        return max(0, max(earlier, _status("VmHWM")) - self.begin)


def _status(key: str) -> int:
    """A value of /proc/self/status, in bytes."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no {key}: benchmarks measure memory on Linux")
