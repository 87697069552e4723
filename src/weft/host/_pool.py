"""Processes that compute rewards, kept between batches. A hung thread cannot be killed; a process can."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from weft.errors import UserError
from weft.host.spec import Target

START_SECONDS = 120.0  # for a worker to import the reward functions

SOURCE = Path(__file__).resolve().parent.parent.parent  # the folder that holds the package

Task = tuple[Any, ...]  # index of the function, prompts, completions, completion ids, columns


@dataclass(frozen=True)
class Reply:
    """How a task ended: its rewards, or what went wrong (and at which completion), or that time or the process ended."""

    status: Literal["ok", "error", "timeout", "died"]
    value: Any = None
    index: int | None = None


@dataclass
class Worker:
    """One process and the connection to it; it leads a process group of its own, so that all of it can be killed."""

    process: subprocess.Popen[bytes]
    connection: Connection

    @classmethod
    def start(cls, targets: Sequence[Target]) -> Worker:
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "weft.host._worker", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])},
                start_new_session=True,
            )
        ours.send((sys.path, list(targets)))
        return cls(process, ours)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


@dataclass
class Pool:
    """Up to `size` workers that have imported `targets`. Workers are started by `start` and `run`, and end with the pool."""

    targets: Sequence[Target]
    size: int
    _idle: list[Worker] = field(default_factory=list, init=False)
    _busy: dict[Connection, tuple[int, Worker]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        weakref.finalize(self, _kill_all, self._idle, self._busy)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that wait for tasks."""
        return [worker.process.pid for worker in self._idle]

    def close(self) -> None:
        """End all workers; `run` starts others."""
        _kill_all(self._idle, self._busy)

    def start(self) -> None:
        """Bring the pool to its size. Raises `UserError` where a function cannot be imported."""
        fresh = [Worker.start(self.targets) for _ in range(self.size - len(self._idle))]
        try:
            for worker in fresh:
                self._await_import(worker)
        except BaseException:
            for worker in fresh:
                worker.kill()
            raise
        self._idle.extend(fresh)

    def _await_import(self, worker: Worker) -> None:
        names = ", ".join(target.label for target in self.targets)
        if not worker.connection.poll(START_SECONDS):
            raise UserError(
                f"reward {names}: the import takes longer than {START_SECONDS:g} seconds; move work into the function"
            )
        try:
            status, value, _ = worker.connection.recv()
        except (EOFError, OSError):
            code = worker.process.wait()
            raise UserError(f"reward {names}: the process ended while importing (exit code {code})") from None
        if status == "error":
            raise UserError(str(value))

    def run(self, tasks: Sequence[Task], seconds: float) -> list[Reply]:
        """The reply to each task, in order. Workers still busy when the time is over are killed, with their tasks."""
        self.start()
        end = time.monotonic() + seconds
        replies: list[Reply] = [Reply("timeout")] * len(tasks)
        waiting = deque(enumerate(tasks))
        while waiting or self._busy:
            while waiting and self._idle:
                index, task = waiting.popleft()
                self._give(index, task)
            ready = wait(list(self._busy), timeout=max(0.0, end - time.monotonic()))
            for index, reply in self._collect(connection for connection in ready if isinstance(connection, Connection)):
                replies[index] = reply
            if not self._idle and not self._busy:
                self.start()  # every worker died
            if time.monotonic() >= end:
                break
        _kill_all([], self._busy)
        return replies

    def _give(self, index: int, task: Task) -> None:
        worker = self._idle.pop()
        self._busy[worker.connection] = (index, worker)
        with contextlib.suppress(BrokenPipeError):  # it has died meanwhile; reading will say so
            worker.connection.send(task)

    def _collect(self, ready: Iterable[Connection]) -> list[tuple[int, Reply]]:
        """(task, reply) of workers that have answered or died; the ones that live are idle again."""
        replies = []
        for connection in ready:
            index, worker = self._busy.pop(connection)
            try:
                replies.append((index, Reply(*connection.recv())))
                self._idle.append(worker)
            except (EOFError, OSError):
                code = worker.process.wait()
                worker.kill()
                replies.append((index, Reply("died", code)))
        return replies


def _kill_all(idle: list[Worker], busy: dict[Connection, tuple[int, Worker]]) -> None:
    for worker in [*idle, *(worker for _, worker in busy.values())]:
        worker.kill()
    idle.clear()
    busy.clear()
