"""What runs on every device of `benchmarks.layouts`: two hooks around the training call, which time
it and its collectives.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.registry import register_function

BEGIN, END = "benchmark_layout_begin", "benchmark_layout_end"
FOLDER = "WEFT_BENCH_LAYOUTS"  # where each rank writes
TIMED = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_gather_object",
    "broadcast",
    "broadcast_object_list",
    "send",
    "recv",
    "isend",
    "irecv",
)


class Clock:
    """Seconds of one rank that pass in collectives, in those that wait themselves and in `wait` of
    the others.
    """

    def __init__(self) -> None:
        self.waited, self._began, self._cpu = 0.0, 0.0, 0.0
        self._real: dict[str, Callable[..., Any]] = {}

    def begin(self) -> None:
        if not self._real and dist.is_initialized():
            self._real = {name: getattr(dist, name) for name in TIMED}
            for name, real in self._real.items():
                setattr(dist, name, self._timed(real))
            dist.barrier()
        # of d1, whose process has read it already
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self.waited, self._began, self._cpu = 0.0, time.perf_counter(), time.process_time()

    def end(self) -> None:
        line = {
            "seconds": time.perf_counter() - self._began,
            "waited": self.waited,
            "cpu_seconds": time.process_time() - self._cpu,
        }
        rank = dist.get_rank() if dist.is_initialized() else 0
        with (Path(os.environ[FOLDER]) / f"rank{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            began = time.perf_counter()
            found = call(*args, **more)
            self.waited += time.perf_counter() - began
            return _Work(found, self) if isinstance(found, dist.Work) else found

        return timed


class _Work:
    """A message under way, whose `wait` is timed."""

    def __init__(self, work: Any, clock: Clock) -> None:
        self._work, self._clock = work, clock

    def wait(self, *args: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._work.wait(*args)
        finally:
            self._clock.waited += time.perf_counter() - began

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def register() -> None:
    clock = Clock()
    register_function(BEGIN, lambda model: clock.begin())
    register_function(END, lambda model: clock.end())


register()
