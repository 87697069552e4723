"""Dispatcher of jobs on many devices, which fails jobs if a device dies.

A job is one command on each of several ranks. It is finished when all of these ranks have reported
the end of their command. A job is issued (sent to its ranks) when all jobs in its field `after` are
finished and no earlier job that shares a role with it is still waiting to be issued. Each role
therefore runs its requests in the order in which they were made, and all ranks run the same
commands in the same order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from weft.errors import DevicesLost, RunError
from weft.runtime.calls import Task
from weft.runtime.device_process import (
    CommandReport,
    DeviceActivity,
    DeviceCommand,
    DeviceProcess,
    ProcessAddress,
)
from weft.runtime.store import TensorRequest, TensorStore

# A rank can report a broken connection before the death of its peer is noticed. Its error is held
# back this long, since the death of the peer explains more.
DOUBT_SECONDS = 5.0
# timeout of building, saving and moving parameters; the master enforces the deadlines of calls
REQUEST_SECONDS = 3600.0
POLL_SECONDS = 1.0  # a device in this process is asked for reports again after this time


@dataclass(frozen=True)
class DeviceLoss:
    """Notice that a device is lost, with the reason.

    It is received in place of further reports from the device.
    """

    reason: str


class DeviceTransport(Protocol):
    """Thread-safe connection to the processes of a run's devices, which are identified by rank."""

    @property
    def addresses(self) -> Sequence[ProcessAddress]: ...
    @property
    def shared_store(self) -> TensorStore | None:
        """Tensor store of the only device if it is in this process, otherwise None.

        The driver uses it as its own store, so no tensors are moved.
        """
        ...

    def send(
        self,
        rank: int,
        place: int,
        number: int,
        command: DeviceCommand,
        ranks: Sequence[int],
        tensors: CommandTensors,
    ) -> None:
        """Send a command to the device `rank`.

        `place` is the index of the command among all commands for this device, and `number` is the
        number of the command's job. `ranks` are all ranks that receive a command of the job, and
        `tensors` are those that the command needs.
        """
        ...

    def receive(self) -> Sequence[tuple[int, Sequence[CommandReport] | DeviceLoss]]:
        """Return new reports and losses of devices, each with the rank of its device.

        If there are none, waits briefly and may return an empty list.
        """
        ...

    def share(self, raw: bytes) -> Any:
        """Transfer `raw` once, and return a handle through which all devices can read it."""
        ...

    def export(self, requests: Sequence[TensorRequest]) -> list[bytes]: ...
    def peak_memory_gb(self) -> float: ...

    def describe_activities(self, ranks: Sequence[int]) -> Mapping[int, DeviceActivity]:
        """Return the activity of each rank that answers within a few seconds."""
        ...

    def close(self, deadline_s: float) -> None: ...


@dataclass(frozen=True)
class CommandTensors:
    """Tensors that a command needs.

    Attributes:
        requests: Requests to other devices for tensors.
        shared: Handles of tensors that the driver sends.
    """

    requests: Sequence[TensorRequest] = ()
    shared: Sequence[Any] = ()


class ThreadDevice:
    """`DeviceTransport` to the only device of a run, which is a thread of this process.

    The thread is a daemon, so a call that hangs does not keep the process alive.
    """

    def __init__(self, device: torch.device) -> None:
        self._process = DeviceProcess(0, None, device)
        self.addresses = [self._process.describe_address("")]
        self.shared_store = self._process.store

    def send(
        self,
        rank: int,
        place: int,
        number: int,
        command: DeviceCommand,
        ranks: Sequence[int],
        tensors: CommandTensors,
    ) -> None:
        self._process.receive(place, number, command, ranks, tensors.requests, tensors.shared)

    def receive(self) -> list[tuple[int, Sequence[CommandReport]]]:
        return [(0, self._process.next_reports(POLL_SECONDS))]

    def share(self, raw: bytes) -> bytes:
        return raw

    def export(self, requests: Sequence[TensorRequest]) -> list[bytes]:
        return [self._process.export(request.ids, request.keys) for request in requests]

    def peak_memory_gb(self) -> float:
        return self._process.peak_memory_gb()

    def describe_activities(self, ranks: Sequence[int]) -> dict[int, DeviceActivity]:
        return {0: self._process.activity()}

    def close(self, deadline_s: float) -> None:
        self._process.stop(deadline_s)


@dataclass(eq=False)
class DeviceJob:
    """Job that consists of one command for each of several ranks.

    A job is issued when its commands are sent to the ranks.

    Attributes:
        name: Description of the job for error messages.
        ranks: Ranks that run a command.
        make_command: Function that returns a rank's command and the tensors for it; called when the
            job is issued.
        on_finished: Callback for the final reports of all ranks, keyed by rank.
        on_failed: Callback for the error of a failed job.
        on_started: Callback for the start of the first command.
        on_announced: Callback for outputs that are reported while the job runs, called with the
            rank and the event.
        roles: Roles that the job uses. Jobs that share a role are issued in order.
        after: Jobs that must be finished before this job is issued.
        seconds: Time limit in seconds, counted from when the job is issued; None for no limit. A
            device in this process has no limit.
        task: Identifier of the model call in events, or None if the job is not a model call.
        number: Index of the job in the order of submission, by which reports refer to it.
        has_started: True once the first command has started.
        expires_at: Time at which the time limit ends, on the monotonic clock.
        final_reports: Final report of each rank that has finished its command.
    """

    name: str  # for error messages
    ranks: Sequence[int]
    make_command: Callable[[int], tuple[DeviceCommand, CommandTensors]]
    on_finished: Callable[[Mapping[int, CommandReport]], None]
    on_failed: Callable[[BaseException], None]
    on_started: Callable[[], None] = lambda: None
    on_announced: Callable[[int, Any], None] = lambda rank, value: None
    roles: frozenset[str] = frozenset()
    after: Sequence[DeviceJob] = ()
    seconds: float | None = REQUEST_SECONDS
    task: Task | None = None  # for calls: the task whose events the master expects
    number: int = -1
    has_started: bool = False
    expires_at: float | None = None
    final_reports: dict[int, CommandReport] = field(default_factory=dict)

    @property
    def unfinished_ranks(self) -> list[int]:
        """Ranks that have not finished their command yet."""
        result: list[int] = []
        for rank in self.ranks:
            if rank not in self.final_reports:
                result.append(rank)
        return result


def repeat_command(
    command: DeviceCommand,
) -> Callable[[int], tuple[DeviceCommand, CommandTensors]]:
    """Return a function for `DeviceJob.make_command` that gives every rank the same command."""
    return lambda rank: (command, CommandTensors())


class JobDispatcher:
    """Dispatcher that sends jobs to `devices` and runs their callbacks.

    Callbacks (`on_finished`, `on_failed`, ...) run in the thread that receives reports or, once a
    device is lost, in the thread that submits the job.
    """

    def __init__(self, devices: DeviceTransport) -> None:
        self._devices = devices
        self._lock = threading.RLock()
        self._jobs: dict[int, DeviceJob] = {}  # issued and unfinished, in order
        self._held_jobs: list[DeviceJob] = []
        self._next_number = 0
        self._places = [0] * len(devices.addresses)
        # (expiry, job, error): failures that the death of a device may explain
        self._doubts: list[tuple[float, DeviceJob, BaseException]] = []
        self._fatal_error: RunError | None = None
        self._closed = False
        threading.Thread(target=self._receive_reports, name="weft-devices", daemon=True).start()

    def submit(self, *jobs: DeviceJob) -> None:
        """Submit jobs in the given order.

        Each job is sent to its devices once it no longer has to wait for other jobs.
        """
        with self._lock:
            for job in jobs:
                job.number = self._next_number
                self._next_number = self._next_number + 1
                self._held_jobs.append(job)
            self._issue_jobs()

    def find_cause(self, error: DevicesLost) -> RunError:
        """Return the error that reports the death of a device, or `error` if no device died.

        Used if `error` was raised outside of any job; the death of a device may have caused it.
        Waits up to `DOUBT_SECONDS` seconds for a report of the death.
        """
        end = time.monotonic() + DOUBT_SECONDS
        while self._fatal_error is None and time.monotonic() < end:
            time.sleep(0.05)
        return self._fatal_error or error

    def build_overdue_error(self, task: Task, message: str) -> DevicesLost:
        """Return the error for a call that missed its deadline.

        `message` is extended by a description of the devices that delay the call.
        """
        with self._lock:
            job = next(
                (job for job in [*self._jobs.values(), *self._held_jobs] if job.task == task), None
            )
        return DevicesLost(
            f"{message}; it waits for {self._describe_late(job.unfinished_ranks)}"
            if job is not None
            else message
        )

    def close(self) -> None:
        """Stop receiving reports and fail all unfinished jobs."""
        self._closed = True
        self._fail_all(RunError("the devices were released"))

    # -- issuing

    def _issue_jobs(self) -> None:
        blocked: set[str] = set()
        for job in list(self._held_jobs):
            if self._fatal_error is not None:
                self._held_jobs.remove(job)
                job.on_failed(self._fatal_error)
            elif not any(self._is_open(other) for other in job.after) and blocked.isdisjoint(
                job.roles
            ):
                self._held_jobs.remove(job)
                self._send(job)
            else:
                blocked |= job.roles

    def _is_open(self, job: DeviceJob) -> bool:
        return job.number in self._jobs or job in self._held_jobs

    def _send(self, job: DeviceJob) -> None:
        self._jobs[job.number] = job
        if job.seconds is None or self._devices.shared_store is not None:
            job.expires_at = None
        else:
            job.expires_at = time.monotonic() + job.seconds
        try:
            for rank in job.ranks:
                command, tensors = job.make_command(rank)
                self._devices.send(
                    rank, self._places[rank], job.number, command, job.ranks, tensors
                )
                self._places[rank] += 1
        except DevicesLost as error:
            self._fail_all(DevicesLost(f"{error}, in {job.name}"))

    # -- receiving reports

    def _receive_reports(self) -> None:
        while not self._closed:
            try:
                for rank, response in self._devices.receive():
                    if isinstance(response, DeviceLoss):
                        death = f"{self._devices.addresses[rank]} died"
                        unfinished = self._describe_unfinished([rank])
                        self._fail_all(DevicesLost(f"{death}{unfinished}: {response.reason}"))
                    else:
                        for report in response:
                            self._process_report(rank, report)
                self._fail_doubtful_jobs()
                self._fail_expired_jobs()
            except DevicesLost as error:
                self._fail_all(
                    DevicesLost(f"{error}{self._describe_unfinished(range(len(self._places)))}")
                )
                return
            except BaseException as error:  # otherwise every job would wait forever
                if not self._closed:
                    self._fail_all(
                        RunError(
                            f"receiving reports of the devices failed "
                            f"({type(error).__name__}: {error})"
                        )
                    )
                return

    def _process_report(self, rank: int, report: CommandReport) -> None:
        with self._lock:
            job = self._jobs.get(report.number)
            if job is None:  # the job has already failed on another rank
                return
            match report.kind:
                case "started":
                    if not job.has_started:
                        job.has_started = True
                        job.on_started()
                case "announced":
                    job.on_announced(rank, report.value)
                case "finished":
                    job.final_reports[rank] = report
                    if not job.unfinished_ranks:
                        del self._jobs[job.number]
                        job.on_finished(job.final_reports)
                        self._issue_jobs()
                case "failed" if isinstance(report.value, DevicesLost):
                    doubted = type(report.value)(f"{report.value} (in {job.name})")
                    self._doubts.append((time.monotonic() + DOUBT_SECONDS, job, doubted))
                case "failed":
                    self._fail_job(job, report.value)

    def _fail_doubtful_jobs(self) -> None:
        """Fail jobs that have had a connection error for a while without a report of a dead device.

        A connection error is held back for `DOUBT_SECONDS` seconds, because the death of a device
        may have caused it. In that case, the report of the death is the more helpful error.
        """
        with self._lock:
            expired = []
            for doubt in self._doubts:
                if doubt[0] < time.monotonic():
                    expired.append(doubt)
            self._doubts = [doubt for doubt in self._doubts if doubt not in expired]
            for _, job, error in expired:
                if job.number in self._jobs:
                    self._fail_job(job, error)

    def _fail_job(self, job: DeviceJob, error: BaseException) -> None:
        del self._jobs[job.number]
        job.on_failed(error)
        for other in [held for held in self._held_jobs if job in held.after]:
            self._held_jobs.remove(other)
            other.on_failed(error)
        self._issue_jobs()

    def _describe_unfinished(self, ranks: Sequence[int]) -> str:
        """Return a phrase for an error message that names unfinished jobs of these ranks.

        The phrase is " in " followed by up to three names, or "" if all jobs are finished.
        """
        with self._lock:
            names = []
            for job in self._jobs.values():
                if not set(ranks).isdisjoint(job.unfinished_ranks):
                    names.append(job.name)
        return f" in {' or '.join(names[:3])}" if names else ""

    def _describe_late(self, ranks: Sequence[int]) -> str:
        """Describe the devices that delay a job, given the `ranks` that have not finished it.

        If some of these devices do not answer while others do, the silent ones are listed.
        Otherwise, each device that is not waiting for others is listed, with the code that it is
        running. If all devices are waiting or none answers, all `ranks` are listed.
        """
        activities = self._devices.describe_activities(ranks)
        silent = [rank for rank in ranks if rank not in activities]
        if silent and activities:
            return ", ".join(
                f"{self._devices.addresses[rank]}, which does not answer" for rank in silent
            )
        busy = {}
        for rank, activity in activities.items():
            if not activity.is_waiting:
                busy[rank] = activity.place
        if busy:
            return ", ".join(
                f"{self._devices.addresses[rank]}, which is in {place}"
                for rank, place in busy.items()
            )
        return ", ".join(str(self._devices.addresses[rank]) for rank in ranks)

    def _fail_expired_jobs(self) -> None:
        now = time.monotonic()
        with self._lock:
            expired = next(
                (
                    job
                    for job in self._jobs.values()
                    if job.expires_at is not None and job.expires_at < now
                ),
                None,
            )
        if expired is not None:
            waits_for = self._describe_late(expired.unfinished_ranks)
            self._fail_all(
                DevicesLost(
                    f"{expired.name} did not end within {expired.seconds:g} s; "
                    f"it waits for {waits_for}"
                )
            )

    def _fail_all(self, error: RunError) -> None:
        """Fail all unfinished jobs and every job that is submitted later."""
        with self._lock:
            if self._fatal_error is None:
                self._fatal_error = error
            jobs = list(self._jobs.values())
            self._jobs = {}
            for job in jobs:
                job.on_failed(self._fatal_error)
            self._issue_jobs()
