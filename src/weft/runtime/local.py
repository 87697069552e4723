"""Worker group in a single process, with one worker and one thread that runs its calls."""

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
    describe_hardware,
    describe_numerics,
    measure_peak_memory_gib,
    reset_peak_memory,
    set_threads,
    use_device,
)
from weft.engine.profile import DeviceTrace
from weft.errors import RunError
from weft.graph.mfc import ParamSync
from weft.runtime.group import Events, SampleMeta, run_and_report
from weft.runtime.state import (
    DRIVER_FOLDER,
    NUMERICS_FILE,
    list_rank_folders,
    read_state,
    write_state,
)
from weft.runtime.worker import Worker

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _QueuedFunction:
    """Function that is waiting to run.

    `is_generation` is true for a generation call, which must not run during another one.
    """

    function: Callable[[], None]
    is_generation: bool = False


class LocalGroup:
    """`WorkerGroup` that runs calls in a daemon thread, in the order of submission.

    The master's thread stays free: while a call runs, it can wait with a deadline, update the
    terminal view and handle signals. A call that hangs does not keep the process alive.

    This class also implements `PendingUpdates`. Between its steps, an interruptible call can run
    queued requests, such as loading new weights, but no other generation calls.
    """

    def __init__(self, make: Callable[[], Worker], device: torch.device) -> None:
        self.events: Events = queue.SimpleQueue()
        self._announcing_calls: set[str] = set()  # calls whose early outputs are announced
        self._queue: queue.SimpleQueue[_QueuedFunction | None] = queue.SimpleQueue()
        # taken from the queue, not yet run; used by the thread only
        self._pending: deque[_QueuedFunction | None] = deque()
        self._device = device
        self._closed = False
        self._trace: DeviceTrace | None = None  # used by the thread only
        self._thread = threading.Thread(target=self._run_queue, name="weft-worker", daemon=True)
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
        early = self.events if mfc in self._announcing_calls else None
        node = self._worker.calls[mfc]
        updates = self if node.interruptible else None
        self._run(
            lambda: run_and_report(
                (mfc, step),
                lambda: self._worker.run_call(mfc, step, minibatches, early, updates=updates),
                self.events,
            ),
            samples=node.method == "generate",
        )

    # -- pending work that a running call executes, in the thread of calls

    def are_waiting(self) -> bool:
        while not self._queue.empty():
            self._pending.append(self._queue.get())
        return any(work is not None and not work.is_generation for work in self._pending)

    def take(self, *, left: bool) -> bool:
        while left and self.are_waiting():
            work = next(
                work for work in self._pending if work is not None and not work.is_generation
            )
            self._pending.remove(work)
            work.function()
        return left

    def sync(self, s: ParamSync, step: int) -> None:
        self._run(
            lambda: run_and_report((s.name, step), lambda: self._worker.roles.sync(s), self.events)
        )

    def snapshot(self, d: Path) -> Future[None]:
        def save() -> None:
            write_state(d / NUMERICS_FILE, describe_numerics(self._device))
            self._worker.save_state(d)

        return self._run(save)

    def restore(self, d: Path) -> None:
        """Load a recovery point.

        The number of CPU threads is set to that of the process that wrote the point, so that
        floating-point sums are bitwise identical.
        """

        def load() -> None:
            folders = list_rank_folders(d)
            set_threads(read_state(folders[0] / NUMERICS_FILE)["threads"])
            self._worker.load_state(d, [*folders, d / DRIVER_FOLDER])

        self._run(load).result()

    def toggle_trace(self, path: str | None = None) -> None:
        def switch() -> None:
            if path is None:
                self._trace = DeviceTrace(self._device)
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

    def build_overdue_error(self, mfc: str, step: int, message: str) -> RunError:
        return RunError(message)

    def announce_outputs(self, mfc: str) -> None:
        self._announcing_calls.add(mfc)

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

    def describe_numerics(self) -> Mapping[str, Any]:
        return self._run(lambda: describe_numerics(self._device)).result()

    def describe_hardware(self) -> Mapping[str, Any]:
        return describe_hardware(self._device)

    def peak_memory_gb(self) -> float:
        return measure_peak_memory_gib(self._device)

    def _run(self, task: Callable[[], T], *, samples: bool = False) -> Future[T]:
        assert not self._closed, "the worker group is closed"
        future: Future[T] = Future()

        def run_function() -> None:
            try:
                future.set_result(task())
            except BaseException as error:  # raised by future.result()
                future.set_exception(error)

        self._queue.put(_QueuedFunction(run_function, samples))
        return future

    def _run_queue(self) -> None:
        with use_device(self._device):
            while (
                work := self._pending.popleft() if self._pending else self._queue.get()
            ) is not None:
                work.function()
