"""How long each step of a run took and the memory it has needed by then: told by a callback on
either side.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.memory import PeakMemory
from benchmarks.pairs import Pause

STAT = Path("/proc/stat")


class Stopwatch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._wall, self._cpu, self._stolen = time.perf_counter(), time.process_time(), stolen()

    def read(self) -> dict[str, float]:
        """`seconds` by the wall, `cpu_seconds` of all threads of this process, which other work
        hardly lengthens, and `stolen_seconds` of all processors meanwhile.
        """
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return {"seconds": wall, "cpu_seconds": cpu, "stolen_seconds": stolen() - self._stolen}


def stolen() -> float:
    """Seconds that the host of a virtual machine has taken from its processors, all together, while
    they had work: `steal` in proc(5).
    """
    steal = int(STAT.read_text().split(maxsplit=9)[8])
    return steal / os.sysconf("SC_CLK_TCK")


class Clock:
    """Made after the imports.

    `tick` is called at the end of every optimizer step; the other side has its turn in it.
    """

    def __init__(self, pause: Pause) -> None:
        self._pause, self._memory = pause, PeakMemory()
        self._watch = Stopwatch()

    def tick(self) -> None:
        """What `Stopwatch` says since the last tick (the first ones hold loading, too), and
        `peak_bytes` of the run so far.
        """
        self._pause({**self._watch.read(), "peak_bytes": self._memory.bytes})
        self._watch = Stopwatch()
