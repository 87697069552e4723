"""Pool of processes that compute rewards, kept alive between batches.

Processes rather than threads, since a hung thread cannot be killed.
"""

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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from weft.errors import UserError
from weft.host.spec import Target

START_SECONDS = 120.0  # for a worker to import the reward functions
LOOK_SECONDS = 1.0  # interval of the checks that a silent worker is alive

SOURCE = Path(__file__).resolve().parent.parent.parent  # parent directory of the package

# index of the function, prompts, completions, completion ids, columns, the rows' own arguments
Task = tuple[Any, ...]


@dataclass(frozen=True)
class Reply:
    """Outcome of a task.

    `value` is the rewards and metrics, the error message, or the exit code of a process that died;
    `index` is the completion that an error refers to.
    """

    status: Literal["ok", "error", "timeout", "died"]
    value: Any = None
    index: int | None = None


@dataclass
class Worker:
    """Worker process and the connection to it.

    The process leads its own process group, so that its children can be killed with it.
    """

    process: subprocess.Popen[bytes]
    connection: Connection

    @classmethod
    def start(cls, targets: Sequence[Target]) -> Worker:
        """Start a process and send it the import path and the targets."""
        ours, theirs = multiprocessing.Pipe()
        paths = [
            str(SOURCE),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]  # an empty entry would mean the working directory
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "weft.host._worker", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,
            )
        ours.send((sys.path, list(targets)))
        return cls(process, ours)

    def answer(self, task: Task) -> Reply:
        """Send a task and wait for its reply, or for the end of the process."""
        try:
            self.connection.send(task)
            while not self.connection.poll(LOOK_SECONDS):
                if self.process.poll() is not None and not self.connection.poll():
                    raise EOFError  # no end of file: its children may hold the other end open
            return Reply(*self.connection.recv())
        except (EOFError, OSError):
            return Reply("died", self.process.wait())

    def signal(self) -> None:
        """Kill the process and all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process with its children and close the connection."""
        self.signal()
        self.process.wait()
        self.connection.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


@dataclass
class Lane:
    """Worker and the thread that talks to it.

    `lock` guards the state shared between that thread and others.
    """

    worker: Worker | None = None
    job: Future[Reply] | None = None  # job that the thread is working on
    late: bool = False  # True once the job was cancelled or timed out
    lock: threading.RLock = field(
        default_factory=threading.RLock
    )  # reentrant: a finalizer can run while it is held
    starting: threading.Lock = field(default_factory=threading.Lock)

    def start(self, targets: Sequence[Target]) -> None:
        """Start the worker unless it runs. Raises `UserError` if a function cannot be imported."""
        with self.starting:
            if self.worker is None:
                worker = Worker.start(targets)
                try:
                    _await_import(worker, targets)
                except BaseException:
                    worker.kill()
                    raise
                with self.lock:
                    self.worker = worker

    def serve(self, jobs: Jobs, targets: Sequence[Target]) -> None:
        """Compute the jobs of the queue until it yields None."""
        while (taken := jobs.get()) is not None:
            task, job = taken
            with self.lock:
                self.job = job
            if not job.set_running_or_notify_cancel():
                self._rest()
                continue
            try:
                reply = self._compute(task, targets)
            except BaseException as error:  # passed on to the caller that waits for the reply
                self.late = True
                self._rest()
                job.set_exception(error)
            else:
                self._rest()
                job.set_result(reply)
        self._let_go()

    def _compute(self, task: Task, targets: Sequence[Target]) -> Reply:
        self.start(targets)
        worker = None if self.late else self.worker
        if worker is None:
            return Reply("timeout")
        reply = worker.answer(task)
        if reply.status == "died":
            self._let_go()
        return reply

    def _rest(self) -> None:
        """Mark the job as finished; clean up the worker if it was killed in the meantime."""
        with self.lock:
            if self.late:
                self._let_go()
            self.job = None
            self.late = False

    def _let_go(self) -> None:
        with self.lock:
            if self.worker is not None:
                self.worker.kill()
                self.worker = None

    def end(self, job: Future[Reply] | None = None) -> None:
        """Kill the worker; if a job is given, only if the worker computes that job."""
        with self.lock:
            if job is not None and self.job is not job:
                return
            if self.job is None:
                self._let_go()
                return
            self.late = True
            if self.worker is not None:
                self.worker.signal()  # the thread that reads from it cleans up


Jobs = queue.SimpleQueue[tuple[Task, Future[Reply]] | None]


def _await_import(worker: Worker, targets: Sequence[Target]) -> None:
    names = ", ".join(target.label for target in targets)
    if not worker.connection.poll(START_SECONDS):
        raise UserError(
            f"reward {names}: the import takes longer than {START_SECONDS:g} seconds; move work "
            f"into the function"
        )
    try:
        status, value, _ = worker.connection.recv()
    except (EOFError, OSError):
        code = worker.process.wait()
        raise UserError(
            f"reward {names}: the process ended while importing (exit code {code})"
        ) from None
    if status == "error":
        raise UserError(str(value))


@dataclass
class Pool:
    """Pool of `size` workers that have imported `targets`.

    Workers are started by `start` or when a task needs them, and end with the pool.
    """

    targets: Sequence[Target]
    size: int
    _lanes: list[Lane] = field(default_factory=list, init=False)
    _jobs: Jobs = field(default_factory=queue.SimpleQueue, init=False)

    def __post_init__(self) -> None:
        self._lanes.extend(Lane() for _ in range(self.size))
        for lane in self._lanes:
            given = self._jobs, self.targets  # not the pool: a reference to it would keep it alive
            threading.Thread(target=lane.serve, args=given, name="weft-reward", daemon=True).start()
        weakref.finalize(self, _end, self._lanes, self._jobs)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        workers = [lane.worker for lane in self._lanes]
        return [worker.process.pid for worker in workers if worker is not None]

    def close(self) -> None:
        """Kill all workers and cancel the queued tasks; a later task starts new workers."""
        _forget(self._jobs)
        for lane in self._lanes:
            lane.end()

    def start(self) -> None:
        """Start all missing workers. Raises `UserError` if a function cannot be imported."""
        absent = [lane for lane in self._lanes if lane.worker is None]
        if absent:
            with ThreadPoolExecutor(len(absent)) as starts:
                list(starts.map(lambda lane: lane.start(self.targets), absent))

    def submit(self, task: Task) -> Future[Reply]:
        """Queue a task for the next free worker and return the future of its reply."""
        reply: Future[Reply] = Future()
        self._jobs.put((task, reply))
        return reply

    def drop(self, replies: Iterable[Future[Reply]]) -> None:
        """Cancel these replies; workers that are computing one are killed."""
        for reply in replies:
            if not reply.cancel():
                for lane in self._lanes:
                    lane.end(reply)

    def collect(self, replies: Sequence[Future[Reply]], seconds: float) -> list[Reply]:
        """Wait for the replies, `seconds` at most, and return them.

        Replies that are late are cancelled and have the status "timeout".
        """
        late = wait(replies, seconds).not_done
        self.drop(late)
        return [Reply("timeout") if reply in late else reply.result() for reply in replies]


def _forget(jobs: Jobs) -> None:
    with contextlib.suppress(queue.Empty):
        while (waiting := jobs.get_nowait()) is not None:
            waiting[1].cancel()


def _end(lanes: list[Lane], jobs: Jobs) -> None:
    _forget(jobs)
    for lane in lanes:
        jobs.put(None)
        lane.end()
