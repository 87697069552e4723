"""Pool of processes that compute rewards, kept alive between batches.

Rewards are computed in processes rather than threads, since a hung thread cannot be killed.
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
from weft.host.spec import RewardTarget

START_SECONDS = 120.0  # for a worker to import the reward functions
LIVENESS_CHECK_SECONDS = 1.0  # interval of the checks that a silent worker is alive

SOURCE = Path(__file__).resolve().parent.parent.parent  # parent directory of the package

# (index of the function, prompts, completions, completion ids, columns, arguments that rows set)
Task = tuple[Any, ...]


@dataclass(frozen=True)
class RewardReply:
    """Outcome of a task that was sent to a worker.

    `value` depends on the status: the rewards and metrics ("ok"), the error message ("error"), the
    exit code of the process ("died"), or None ("timeout"). `index` is the index of the completion
    that an error refers to, or None.
    """

    status: Literal["ok", "error", "timeout", "died"]
    value: Any = None
    index: int | None = None


@dataclass
class RewardWorker:
    """Handle of a worker process, with the connection for sending it tasks.

    The process leads its own process group, so that its children can be killed with it.
    """

    process: subprocess.Popen[bytes]
    connection: Connection

    @classmethod
    def start(cls, targets: Sequence[RewardTarget]) -> RewardWorker:
        """Start a process that imports the reward functions `targets` and then waits for tasks.

        The process gets this process's `sys.path`, so that the same modules can be imported.
        Returns without waiting for the imports.
        """
        parent_end, child_end = multiprocessing.Pipe()
        # An empty PYTHONPATH is left out: an empty entry would mean the working directory.
        paths = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
        with child_end:
            process = subprocess.Popen(
                [sys.executable, "-m", "weft.host._worker", str(child_end.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=(child_end.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,
            )
        parent_end.send((sys.path, list(targets)))
        return cls(process, parent_end)

    def compute(self, task: Task) -> RewardReply:
        """Send a task to the worker, wait for the reply and return it.

        The reply has the status "died" if the process ends before answering.
        """
        try:
            self.connection.send(task)
            while not self.connection.poll(LIVENESS_CHECK_SECONDS):
                if self.process.poll() is not None and not self.connection.poll():
                    raise EOFError  # recv would block if the worker's children keep the pipe open
            return RewardReply(*self.connection.recv())
        except (EOFError, OSError):
            return RewardReply("died", self.process.wait())

    def kill_process_group(self) -> None:
        """Kill the process and all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process and its children, and close the connection."""
        self.kill_process_group()
        self.process.wait()
        self.connection.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


@dataclass
class RewardWorkerThread:
    """Manager of one worker process: it starts the worker, sends it queued tasks, and kills it.

    The method `serve` runs in a separate thread. `lock` guards the fields that other threads also
    use; `start_lock` is held while the worker starts.
    """

    worker: RewardWorker | None = None
    job: Future[RewardReply] | None = None  # job that the thread is working on
    is_job_dropped: bool = False  # True once the job was cancelled or timed out
    # reentrant, since a finalizer can run while the lock is held
    lock: threading.RLock = field(default_factory=threading.RLock)
    start_lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, targets: Sequence[RewardTarget]) -> None:
        """Start the worker unless it is running, and wait until it has imported the functions.

        Raises `UserError` if a function cannot be imported.
        """
        with self.start_lock:
            if self.worker is None:
                worker = RewardWorker.start(targets)
                try:
                    _await_import(worker, targets)
                except BaseException:
                    worker.kill()
                    raise
                with self.lock:
                    self.worker = worker

    def serve(self, jobs: Jobs, targets: Sequence[RewardTarget]) -> None:
        """Run queued jobs on the worker until the queue yields None, then kill the worker."""
        while (entry := jobs.get()) is not None:
            task, job = entry
            with self.lock:
                self.job = job
            if not job.set_running_or_notify_cancel():
                self._finish_job()
                continue
            try:
                reply = self._compute(task, targets)
            except BaseException as error:  # passed on to the caller that waits for the reply
                self.is_job_dropped = True
                self._finish_job()
                job.set_exception(error)
            else:
                self._finish_job()
                job.set_result(reply)
        self._release_worker()

    def _compute(self, task: Task, targets: Sequence[RewardTarget]) -> RewardReply:
        self.start(targets)
        worker = None if self.is_job_dropped else self.worker
        if worker is None:
            return RewardReply("timeout")
        reply = worker.compute(task)
        if reply.status == "died":
            self._release_worker()
        return reply

    def _finish_job(self) -> None:
        """Clear the current job, and kill the worker if it may still be busy with the job.

        The worker may be busy if the job was cancelled or timed out, or if this thread raised an
        error while it handled the job.
        """
        with self.lock:
            if self.is_job_dropped:
                self._release_worker()
            self.job = None
            self.is_job_dropped = False

    def _release_worker(self) -> None:
        with self.lock:
            if self.worker is not None:
                self.worker.kill()
                self.worker = None

    def stop(self, job: Future[RewardReply] | None = None) -> None:
        """Kill the worker. If `job` is given, do so only if the worker is running this job."""
        with self.lock:
            if job is not None and self.job is not job:
                return
            if self.job is None:
                self._release_worker()
                return
            self.is_job_dropped = True
            if self.worker is not None:
                self.worker.kill_process_group()  # the worker's thread closes the connection


Jobs = queue.SimpleQueue[tuple[Task, Future[RewardReply]] | None]


def _await_import(worker: RewardWorker, targets: Sequence[RewardTarget]) -> None:
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
class RewardPool:
    """Pool of `size` worker processes that call reward functions.

    Each worker imports the functions that `targets` specifies. Workers are started by `start`, or
    when a task needs them. They are killed by `close`, or when the pool is garbage-collected.
    """

    targets: Sequence[RewardTarget]
    size: int
    _worker_threads: list[RewardWorkerThread] = field(default_factory=list, init=False)
    _jobs: Jobs = field(default_factory=queue.SimpleQueue, init=False)

    def __post_init__(self) -> None:
        for _ in range(self.size):
            self._worker_threads.append(RewardWorkerThread())
        for worker_thread in self._worker_threads:
            # The arguments do not include the pool, since a reference would keep it alive.
            arguments = (self._jobs, self.targets)
            threading.Thread(
                target=worker_thread.serve, args=arguments, name="weft-reward", daemon=True
            ).start()
        weakref.finalize(self, _stop_threads, self._worker_threads, self._jobs)

    def close(self) -> None:
        """Kill all workers and cancel the queued tasks.

        The pool can still be used afterwards: submitting a task starts new workers.
        """
        _cancel_queued_jobs(self._jobs)
        for worker_thread in self._worker_threads:
            worker_thread.stop()

    def start(self) -> None:
        """Start all workers that are not running.

        Raises `UserError` if a function cannot be imported.
        """
        stopped = [
            worker_thread for worker_thread in self._worker_threads if worker_thread.worker is None
        ]
        if stopped:
            with ThreadPoolExecutor(len(stopped)) as executor:
                list(executor.map(lambda worker_thread: worker_thread.start(self.targets), stopped))

    def submit(self, task: Task) -> Future[RewardReply]:
        """Queue a task for the next free worker, and return a future for the reply."""
        reply: Future[RewardReply] = Future()
        self._jobs.put((task, reply))
        return reply

    def drop(self, replies: Iterable[Future[RewardReply]]) -> None:
        """Cancel the tasks that belong to `replies`.

        Tasks that are still queued are removed. If a task is running, its worker is killed.
        """
        for reply in replies:
            if not reply.cancel():
                for worker_thread in self._worker_threads:
                    worker_thread.stop(reply)

    def collect(self, replies: Sequence[Future[RewardReply]], seconds: float) -> list[RewardReply]:
        """Wait at most `seconds` for the replies, and return them in the same order.

        Tasks that have not finished by then are cancelled, and their replies have the status
        "timeout".
        """
        unfinished = wait(replies, seconds).not_done
        self.drop(unfinished)
        return [
            RewardReply("timeout") if reply in unfinished else reply.result() for reply in replies
        ]


def _cancel_queued_jobs(jobs: Jobs) -> None:
    with contextlib.suppress(queue.Empty):
        while (entry := jobs.get_nowait()) is not None:
            entry[1].cancel()


def _stop_threads(worker_threads: list[RewardWorkerThread], jobs: Jobs) -> None:
    _cancel_queued_jobs(jobs)
    for worker_thread in worker_threads:
        jobs.put(None)
        worker_thread.stop()
