"""Processes that compute rewards, kept between batches. A hung thread cannot be killed; a process can."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from weft.errors import UserError
from weft.host.spec import Target

START_SECONDS = 120.0  # for a worker to import the reward functions
LOOK_SECONDS = 1.0  # between two looks at whether a worker that says nothing still lives

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

    def answer(self, task: Task) -> Reply:
        with contextlib.suppress(BrokenPipeError):  # it has died meanwhile; reading will say so
            self.connection.send(task)
        try:
            while not self.connection.poll(LOOK_SECONDS):
                if self.process.poll() is not None and not self.connection.poll():
                    raise EOFError  # what it has started may still hold the other end
            return Reply(*self.connection.recv())
        except (EOFError, OSError):
            return Reply("died", self.process.wait())

    def signal(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        self.signal()
        self.process.wait()
        self.connection.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


@dataclass
class Lane:
    """One worker and the thread that talks to it. `lock` guards what both that thread and others touch."""

    worker: Worker | None = None
    job: Future[Reply] | None = None  # what the worker computes
    lost: bool = False  # killed while it computed
    lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, jobs: Jobs, targets: Sequence[Target], starting: threading.Lock) -> None:
        """Compute what comes, until None does."""
        while (job := jobs.get()) is not None:
            task, reply = job
            if not reply.set_running_or_notify_cancel():
                continue
            try:
                start([self], targets, starting)
                reply.set_result(self._compute(task, reply))
            except BaseException as error:  # whoever waits for the reply is told
                reply.set_exception(error)

    def _compute(self, task: Task, job: Future[Reply]) -> Reply:
        with self.lock:
            worker, self.job = self.worker, job
        if worker is None:  # closed meanwhile
            return Reply("died", -signal.SIGKILL)
        reply = worker.answer(task)
        with self.lock:
            self.job = None
            if self.lost or reply.status == "died":
                worker.kill()
                self.worker, self.lost = None, False
        return reply

    def end(self, job: Future[Reply] | None = None) -> None:
        """Kill the worker; where a job is named, only if it computes that."""
        with self.lock:
            if self.worker is None or (job is not None and self.job is not job):
                return
            if self.job is None:
                self.worker.kill()
                self.worker = None
            else:  # the thread that reads from it clears up
                self.worker.signal()
                self.lost = True


Jobs = queue.SimpleQueue[tuple[Task, Future[Reply]] | None]


def start(lanes: Iterable[Lane], targets: Sequence[Target], starting: threading.Lock) -> None:
    """Give every lane that has none a worker. Raises `UserError` where a function cannot be imported."""
    with starting:
        fresh = {id(lane): (lane, Worker.start(targets)) for lane in lanes if lane.worker is None}
        try:
            for _, worker in fresh.values():
                _await_import(worker, targets)
        except BaseException:
            for _, worker in fresh.values():
                worker.kill()
            raise
        for lane, worker in fresh.values():
            with lane.lock:
                lane.worker = worker


def _await_import(worker: Worker, targets: Sequence[Target]) -> None:
    names = ", ".join(target.label for target in targets)
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


@dataclass
class Pool:
    """`size` workers that have imported `targets`. Workers are started by `start` and as tasks need them, and end with the
    pool."""

    targets: Sequence[Target]
    size: int
    _lanes: list[Lane] = field(default_factory=list, init=False)
    _jobs: Jobs = field(default_factory=queue.SimpleQueue, init=False)
    _starting: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self._lanes.extend(Lane() for _ in range(self.size))
        given = self._jobs, self.targets, self._starting
        for lane in self._lanes:
            threading.Thread(target=lane.serve, args=given, name="weft-reward", daemon=True).start()
        weakref.finalize(self, _end, self._lanes, self._jobs)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [lane.worker.process.pid for lane in self._lanes if lane.worker is not None]

    def close(self) -> None:
        """End all workers; what comes next starts others."""
        for lane in self._lanes:
            lane.end()

    def start(self) -> None:
        """Bring the pool to its size. Raises `UserError` where a function cannot be imported."""
        start(self._lanes, self.targets, self._starting)

    def submit(self, task: Task) -> Future[Reply]:
        """Have a worker compute the task as soon as one is free."""
        reply: Future[Reply] = Future()
        self._jobs.put((task, reply))
        return reply

    def collect(self, replies: Sequence[Future[Reply]], seconds: float) -> list[Reply]:
        """What the replies are after `seconds` at most. Workers that still compute one then are killed."""
        late = wait(replies, seconds).not_done
        begun = [reply for reply in late if not reply.cancel()]
        for reply in begun:
            for lane in self._lanes:
                lane.end(reply)
        wait(begun)
        return [Reply("timeout") if reply in late else reply.result() for reply in replies]

    def run(self, tasks: Sequence[Task], seconds: float) -> list[Reply]:
        """The reply to each task, in order."""
        self.start()
        return self.collect([self.submit(task) for task in tasks], seconds)


def _end(lanes: list[Lane], jobs: Jobs) -> None:
    for lane in lanes:
        jobs.put(None)
        lane.end()
