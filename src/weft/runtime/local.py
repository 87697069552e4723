"""Worker group in a single process: one worker and one thread that runs its calls, without Ray."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from weft.data.sample import SequenceSample
from weft.engine.device import (
    hardware,
    numerics,
    peak_memory_gb,
    reset_peak_memory,
    set_threads,
    using,
)
from weft.engine.profile import Trace
from weft.errors import RunError
from weft.graph.mfc import ParamSync
from weft.runtime import events
from weft.runtime.events import Events
from weft.runtime.group import SampleMeta
from weft.runtime.saved import DRIVER, NUMERICS, rank_folders
from weft.runtime.state import read_state, write_state
from weft.runtime.worker import Worker

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _Work:
    """Queued function; `samples` marks generation, which must not run inside another generation."""

    do: Callable[[], None]
    samples: bool = False


class LocalGroup:
    """Run calls in the order of submission in a daemon thread.

    The master can wait with a deadline, update its view and handle signals; a hanging call cannot
    keep the process alive.

    Implements `Updates` itself: a running call may execute pending work that does not generate.
    """

    def __init__(self, make: Callable[[], Worker], device: torch.device) -> None:
        self.events: Events = queue.SimpleQueue()
        self._announcing: set[str] = set()  # calls whose early outputs are announced
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        # taken from the queue, not yet run; used by the thread only
        self._next: deque[_Work | None] = deque()
        self._device = device
        self._closed = False
        self._trace: Trace | None = None  # used by the thread only
        self._thread = threading.Thread(target=self._work, name="weft-worker", daemon=True)
        self._thread.start()
        reset_peak_memory(device)
        self._worker = self._run(make).result()

    def submit(
        self,
        mfc: str,
        step: int,
        parts: list[list[SampleMeta]],
        *,
        version: int | None = None,
        keeps: bool = False,
    ) -> None:
        assert version is None and not keeps, "one process has no copies of a role"
        minibatches = [batch for (batch,) in parts]  # one data-parallel rank
        early = self.events if mfc in self._announcing else None
        node = self._worker.calls[mfc]
        updates = self if node.interruptible else None
        self._run(
            lambda: events.run(
                (mfc, step),
                lambda: self._worker.call(mfc, step, minibatches, early, updates=updates),
                self.events,
            ),
            samples=node.method == "generate",
        )

    # -- pending work that a running call executes, in the thread of calls

    def are_waiting(self) -> bool:
        while not self._queue.empty():
            self._next.append(self._queue.get())
        return any(work is not None and not work.samples for work in self._next)

    def take(self, *, left: bool) -> bool:
        while left and self.are_waiting():
            work = next(work for work in self._next if work is not None and not work.samples)
            self._next.remove(work)
            work.do()
        return left

    def sync(self, s: ParamSync, step: int) -> None:
        self._run(
            lambda: events.run((s.name, step), lambda: self._worker.roles.sync(s), self.events)
        )

    def snapshot(self, d: Path) -> Future[None]:
        def save() -> None:
            write_state(d / NUMERICS, numerics(self._device))
            self._worker.save_state(d)

        return self._run(save)

    def restore(self, d: Path) -> None:
        """Load a recovery point.

        Sets the number of threads to that of the process that wrote it, so that sums are bitwise
        identical.
        """

        def load() -> None:
            folders = rank_folders(d)
            set_threads(read_state(folders[0] / NUMERICS)["threads"])
            self._worker.load_state(d, [*folders, d / DRIVER])

        self._run(load).result()

    def profile(self, path: str | None = None) -> None:
        def switch() -> None:
            if path is None:
                self._trace = Trace(self._device)
            elif self._trace is not None:
                self._trace.end(Path(path.replace("{rank}", "0")))
                self._trace = None

        self._run(switch).result()

    def close(self, deadline_s: float) -> None:
        self._closed = True
        self._queue.put(None)
        self._thread.join(deadline_s)

    def put(self, sample: SequenceSample) -> SampleMeta:
        return self._worker.store.put(sample)

    def overdue(self, mfc: str, step: int, told: str) -> RunError:
        return RunError(told)

    def listen(self, mfc: str) -> None:
        self._announcing.add(mfc)

    def fetch(
        self, ids: Sequence[str], keys: Iterable[str], optional: Iterable[str] = ()
    ) -> SequenceSample:
        return self._worker.store.fetch(ids, keys, optional)

    def discard(self, ids: Iterable[str]) -> None:
        self._worker.store.discard(ids)

    def save(self, role: str, directory: Path) -> Future[None]:
        return self._run(lambda: self._worker.save(role, directory))

    def describe(self) -> Mapping[str, Mapping[str, Any]]:
        return self._worker.roles.describe()

    def numerics(self) -> Mapping[str, Any]:
        return self._run(lambda: numerics(self._device)).result()

    def hardware(self) -> Mapping[str, Any]:
        return hardware(self._device)

    def peak_memory_gb(self) -> float:
        return peak_memory_gb(self._device)

    def _run(self, task: Callable[[], T], *, samples: bool = False) -> Future[T]:
        assert not self._closed, "the worker group is closed"
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(task())
            except BaseException as error:  # raised by future.result()
                future.set_exception(error)

        self._queue.put(_Work(work, samples))
        return future

    def _work(self) -> None:
        with using(self._device):
            while (work := self._next.popleft() if self._next else self._queue.get()) is not None:
                work.do()
