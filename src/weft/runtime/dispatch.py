"""Jobs on many devices: issued in order, finished by reports, failed when a device dies.

A job is one command on each of several ranks. It is issued when the jobs in `after` are finished
and no earlier job that shares a role with it is still held back. So each role runs its requests in
the order in which they were made, and all ranks run the same commands in the same order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from weft.errors import DevicesLost, RunError
from weft.runtime.device_process import Activity, Command, Report, Want, Where
from weft.runtime.events import Task

# A rank can report a broken connection before the death of its peer is noticed. Its error is held
# back this long, since the death of the peer explains more.
DOUBT_SECONDS = 5.0
# timeout of building, saving and moving parameters; the master enforces the deadlines of calls
REQUEST_SECONDS = 3600.0


@dataclass(frozen=True)
class Lost:
    """Reason why a device is lost; it sends no more reports."""

    reason: str


class Devices(Protocol):
    """Processes of a run by rank, behind the message transport. Must be thread-safe."""

    @property
    def where(self) -> Sequence[Where]: ...
    def send(
        self,
        rank: int,
        place: int,
        number: int,
        command: Command,
        ranks: Sequence[int],
        given: Given,
    ) -> None:
        """Send a command to one of the `ranks` of a job."""
        ...

    def receive(self) -> Sequence[tuple[int, Sequence[Report] | Lost]]:
        """Return new reports or losses by rank; wait briefly if there are none."""
        ...

    def share(self, raw: bytes) -> Any:
        """Return a handle to `raw` that all devices can read; it is transferred once."""
        ...

    def export(self, wants: Sequence[Want]) -> list[bytes]: ...
    def peak_memory_gb(self) -> float: ...

    def activities(self, ranks: Sequence[int]) -> Mapping[int, Activity]:
        """Return the activity of each rank, without ranks that don't answer in a few seconds."""
        ...

    def close(self, deadline_s: float) -> None: ...


@dataclass(frozen=True)
class Given:
    """Tensors for a command: requests to other devices, and rows that the driver shares."""

    wants: Sequence[Want] = ()
    shared: Sequence[Any] = ()


@dataclass(eq=False)
class Job:
    """Command on each of several `ranks`.

    `make` builds a rank's command when the job is issued. `done` gets the final reports by rank.
    """

    name: str  # for error messages
    ranks: Sequence[int]
    make: Callable[[int], tuple[Command, Given]]
    done: Callable[[Mapping[int, Report]], None]
    failed: Callable[[BaseException], None]
    started: Callable[[], None] = lambda: None
    announced: Callable[[int, Any], None] = lambda rank, value: None
    roles: frozenset[str] = frozenset()
    after: Sequence[Job] = ()
    seconds: float | None = REQUEST_SECONDS
    task: Task | None = None  # for calls: the task whose events the master expects
    number: int = -1
    began: bool = False
    expires: float | None = None
    ends: dict[int, Report] = field(default_factory=dict)

    @property
    def waits_for(self) -> list[int]:
        """Ranks that have not finished."""
        return [rank for rank in self.ranks if rank not in self.ends]


class Dispatch:
    """Issue jobs to `devices` and run their callbacks.

    Callbacks (`done`, `failed`, ...) run in the thread that receives reports, or in the submitting
    thread once a device is lost.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._lock = threading.RLock()
        self._jobs: dict[int, Job] = {}  # issued and unfinished, in order
        self._held: list[Job] = []
        self._next = 0
        self._places = [0] * len(devices.where)
        # (expiry, job, error): failures that the death of a device may explain
        self._doubts: list[tuple[float, Job, BaseException]] = []
        self._broken: RunError | None = None
        self._closed = False
        threading.Thread(target=self._hear, name="weft-devices", daemon=True).start()

    def submit(self, *jobs: Job) -> None:
        """Submit jobs; each is issued as soon as its dependencies allow, in this order."""
        with self._lock:
            for job in jobs:
                job.number = self._next
                self._next = self._next + 1
                self._held.append(job)
            self._issue()

    def explained(self, error: DevicesLost) -> RunError:
        """Return the error that explains `error`, which was met outside of any job.

        Waits up to `DOUBT_SECONDS` for the death of a device, whose error names the device and job.
        """
        end = time.monotonic() + DOUBT_SECONDS
        while self._broken is None and time.monotonic() < end:
            time.sleep(0.05)
        return self._broken or error

    def overdue(self, task: Task, told: str) -> DevicesLost:
        """Return the error for a call past its deadline, naming the ranks that are late."""
        with self._lock:
            job = next(
                (job for job in [*self._jobs.values(), *self._held] if job.task == task), None
            )
        return DevicesLost(
            f"{told}; it waits for {self._describe_late(job.waits_for)}"
            if job is not None
            else told
        )

    def close(self) -> None:
        """Stop receiving reports and fail all unfinished jobs."""
        self._closed = True
        self._break(RunError("the devices were released"))

    # -- issuing

    def _issue(self) -> None:
        blocked: set[str] = set()
        for job in list(self._held):
            if self._broken is not None:
                self._held.remove(job)
                job.failed(self._broken)
            elif not any(self._is_open(other) for other in job.after) and blocked.isdisjoint(
                job.roles
            ):
                self._held.remove(job)
                self._send(job)
            else:
                blocked |= job.roles

    def _is_open(self, job: Job) -> bool:
        return job.number in self._jobs or job in self._held

    def _send(self, job: Job) -> None:
        self._jobs[job.number] = job
        if job.seconds is None:
            job.expires = None
        else:
            job.expires = time.monotonic() + job.seconds
        try:
            for rank in job.ranks:
                command, given = job.make(rank)
                self._devices.send(rank, self._places[rank], job.number, command, job.ranks, given)
                self._places[rank] += 1
        except DevicesLost as error:
            self._break(DevicesLost(f"{error}, in {job.name}"))

    # -- receiving reports

    def _hear(self) -> None:
        while not self._closed:
            try:
                for rank, found in self._devices.receive():
                    if isinstance(found, Lost):
                        self._break(self._death(rank, found))
                    else:
                        for report in found:
                            self._take(rank, report)
                self._settle()
                self._expire()
            except DevicesLost as error:
                self._break(DevicesLost(f"{error}{self._at(range(len(self._places)))}"))
                return
            except BaseException as error:  # otherwise every job would wait forever
                if not self._closed:
                    self._break(
                        RunError(
                            f"receiving reports of the devices failed "
                            f"({type(error).__name__}: {error})"
                        )
                    )
                return

    def _take(self, rank: int, report: Report) -> None:
        with self._lock:
            job = self._jobs.get(report.number)
            if job is None:  # the job has already failed on another rank
                return
            match report.kind:
                case "started":
                    if not job.began:
                        job.began = True
                        job.started()
                case "announced":
                    job.announced(rank, report.value)
                case "finished":
                    job.ends[rank] = report
                    if not job.waits_for:
                        del self._jobs[job.number]
                        job.done(job.ends)
                        self._issue()
                case "failed" if isinstance(report.value, DevicesLost):
                    doubted = type(report.value)(f"{report.value} (in {job.name})")
                    self._doubts.append((time.monotonic() + DOUBT_SECONDS, job, doubted))
                case "failed":
                    self._fail(job, report.value)

    def _settle(self) -> None:
        """Fail the jobs whose doubtful errors were not explained by a death in time."""
        with self._lock:
            over = [doubt for doubt in self._doubts if doubt[0] < time.monotonic()]
            self._doubts = [doubt for doubt in self._doubts if doubt not in over]
            for _, job, error in over:
                if job.number in self._jobs:
                    self._fail(job, error)

    def _fail(self, job: Job, error: BaseException) -> None:
        del self._jobs[job.number]
        job.failed(error)
        for other in [held for held in self._held if job in held.after]:
            self._held.remove(other)
            other.failed(error)
        self._issue()

    def _death(self, rank: int, lost: Lost) -> RunError:
        return DevicesLost(f"{self._devices.where[rank]} died{self._at([rank])}: {lost.reason}")

    def _at(self, ranks: Sequence[int]) -> str:
        """Return " in JOB or JOB", the unfinished jobs of these ranks, for error messages."""
        with self._lock:
            names = [
                job.name for job in self._jobs.values() if not set(ranks).isdisjoint(job.waits_for)
            ]
        return f" in {' or '.join(names[:3])}" if names else ""

    def _describe_late(self, ranks: Sequence[int]) -> str:
        """Describe the devices that delay a job, given its unfinished ranks.

        These are the ranks that don't answer; else those that don't wait for others, with the code
        that they run; else all.
        """
        activities = self._devices.activities(ranks)
        silent = [rank for rank in ranks if rank not in activities]
        if silent and activities:
            return ", ".join(
                f"{self._devices.where[rank]}, which does not answer" for rank in silent
            )
        busy = {rank: each.place for rank, each in activities.items() if not each.waits}
        if busy:
            return ", ".join(
                f"{self._devices.where[rank]}, which is in {place}" for rank, place in busy.items()
            )
        return ", ".join(str(self._devices.where[rank]) for rank in ranks)

    def _expire(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = next(
                (
                    job
                    for job in self._jobs.values()
                    if job.expires is not None and job.expires < now
                ),
                None,
            )
        if late is not None:
            who = self._describe_late(late.waits_for)
            self._break(
                DevicesLost(
                    f"{late.name} did not end within {late.seconds:g} s; it waits for {who}"
                )
            )

    def _break(self, error: RunError) -> None:
        """Fail all unfinished jobs, and every job submitted from now on."""
        with self._lock:
            if self._broken is None:
                self._broken = error
            jobs = list(self._jobs.values())
            self._jobs = {}
            for job in jobs:
                job.failed(self._broken)
            self._issue()
