"""How long each step of a run took and the memory it has needed by then: told by a callback on either side."""

from __future__ import annotations

import time

from benchmarks.memory import PeakMemory
from benchmarks.pairs import Pause


class Stopwatch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """`seconds` by the wall, and `cpu_seconds` of all threads of this process, which other work hardly lengthens."""
        return {"seconds": time.perf_counter() - self._wall, "cpu_seconds": time.process_time() - self._cpu}


class Clock:
    """Made after the imports. `tick` is called at the end of every optimizer step; the other side has its turn in it."""

    def __init__(self, pause: Pause) -> None:
        self._pause, self._memory = pause, PeakMemory()
        self._watch = Stopwatch()

    def tick(self) -> None:
        """What `Stopwatch` says since the last tick (the first ones hold loading, too), and `peak_bytes` of the run so far."""
        self._pause({**self._watch.read(), "peak_bytes": self._memory.bytes})
        self._watch = Stopwatch()
