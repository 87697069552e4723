"""This process among others: its signals, its supervisor and its descendants.

After the first Ctrl-C or SIGTERM, a run stops once the current step is finished; the second signal
stops it immediately. A run's process reports to its supervisor (`weft.launch.supervisor`) which
calls are running, and its end. A process that ends without reporting it was killed by the system or
by Ray's library, which ends processes that use a lost raylet (Ray's local daemon). Descendants are
found in /proc, and therefore only on Linux.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from weft.errors import DevicesLost, Interrupted

if TYPE_CHECKING:
    from weft.runtime.device_process import CommandReport

SIGNALS = (signal.SIGINT, signal.SIGTERM)
REPEAT_NAMES: dict[int, str] = {signal.SIGINT: "Ctrl-C again"}
SIGNAL_NAMES: dict[int, str] = {signal.SIGINT: "Ctrl-C"}  # display names
# DESCRIPTOR:RESTARTS:PID, where PID is the supervisor's: "5:0:4711". Descendants of the run's
# process inherit the variable and ignore it, since their parent has another pid.
SUPERVISOR_VARIABLE = "WEFT_SUPERVISED"


class SignalHandlers:
    """Handlers of Ctrl-C and SIGTERM.

    `number` is the first signal that was received, or None.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    @contextmanager
    def handle_signals(
        self, step: Callable[[], int], tell: Callable[[str], None]
    ) -> Iterator[None]:
        """Handle signals within the block, if this is the main thread.

        `step` returns the number of the running step. `tell` shows a line to the user, and is
        called from the signal handler. A second signal raises `KeyboardInterrupt`.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self.number is not None:
                raise KeyboardInterrupt
            self.number = number
            tell(
                f"finishing step {step()}, then stopping; {REPEAT_NAMES.get(number, 'once more')} stops "
                f"now"
            )

        previous = {number: signal.signal(number, on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def build_interruption(
        self, step: int, again: str, lost: DevicesLost | None = None
    ) -> Interrupted:
        """Return the error for a run that was stopped by a signal.

        `step` is the number of completed steps, and `again` tells the user how to resume the run.
        If devices were lost during the next step, `lost` is the exception that was raised.
        """
        assert self.number is not None, "no signal was received"
        how = f"stopped by {SIGNAL_NAMES.get(self.number, signal.Signals(self.number).name)} after step {step}"
        return Interrupted(
            f"{how}{'' if lost is None else f'; in the next one {lost}'}; {again}", self.number
        )

    def build_immediate_interruption(self, step: int, again: str) -> Interrupted | None:
        """Return the error for a run that was stopped by signals in the middle of the step `step`.

        `again` is a sentence on how to resume the run. Returns None if no signal was received.
        """
        if self.number is None:
            return None
        return Interrupted(f"stopped at once in step {step}; {again}", self.number)


class SupervisorPipe:
    """Pipe to the supervisor process, through which messages are sent as lines of JSON.

    Nothing is sent if this process has no supervisor.
    """

    def __init__(self, descriptor: int | None = None, restarts: int = 0) -> None:
        self.restarts = restarts
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._unfinished_ranks: dict[int, set[int]] = {}  # job -> ranks

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> SupervisorPipe:
        """Return the pipe that the environment variable `WEFT_SUPERVISED` describes."""
        fields = environment.get(SUPERVISOR_VARIABLE, "").split(":")
        if fields[2:] == [str(os.getppid())]:
            return cls(int(fields[0]), int(fields[1]))
        return cls()

    @property
    def is_supervised(self) -> bool:
        """True if this process has a supervisor."""
        return self._descriptor is not None

    @classmethod
    def connect(cls, environment: Mapping[str, str]) -> SupervisorPipe:
        """Return the pipe to the supervisor, and tie this process to it.

        A supervised process is killed when its supervisor ends, and does not pass the pipe on to
        its children. Every command of weft calls this method first.
        """
        pipe = cls.from_environment(environment)
        if pipe._descriptor is not None:
            os.set_inheritable(pipe._descriptor, False)
            end_with_parent()
        return pipe

    def report_call(
        self, number: int, call: str, firing: int, ranks: Sequence[int], where: Sequence[str]
    ) -> None:
        """Report that the devices `ranks` start a call, unless this has been reported already.

        `number` identifies the call's job, `firing` is the index of this execution of the call, and
        `where` describes the devices.
        """
        with self._lock:
            if self._descriptor is None or number in self._unfinished_ranks:
                return
            self._unfinished_ranks[number] = set(ranks)
            self._send(
                {"started_call": number, "call": call, "firing": firing, "where": list(where)}
            )

    def report_finished(self, rank: int, reports: Sequence[CommandReport]) -> None:
        """Record which calls a rank has finished according to its `reports` (see `finish_rank`)."""
        for report in reports:
            if report.kind in ("finished", "failed"):
                self.finish_rank(report.number, rank)

    def finish_rank(self, number: int, rank: int) -> None:
        """Record that a rank has finished the call with the job number `number`.

        Once all ranks of the call have finished, the end of the call is reported.
        """
        with self._lock:
            if number not in self._unfinished_ranks:
                return
            self._unfinished_ranks[number].discard(rank)
            if not self._unfinished_ranks[number]:
                del self._unfinished_ranks[number]
                self._send({"finished_call": number})

    def report_released(self) -> None:
        """Report that the devices were released and that no call is running."""
        with self._lock:
            self._unfinished_ranks.clear()
            self._send({"released_devices": True})

    def report_lost_part(self, what: str) -> None:
        """Report that part of Ray is lost; `what` describes this part.

        This should be called at once, since Ray can end this process at any moment.
        """
        with self._lock:
            self._send({"lost_part": what})

    def report_exit_code(self, code: int) -> None:
        """Report the exit code with which this process ends."""
        with self._lock:
            self._send({"exit_code": code})

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._descriptor is not None:
            with suppress(OSError):  # the supervisor has died; this process is about to be killed
                os.write(self._descriptor, json.dumps(message).encode() + b"\n")


# -- descendants of this process


@dataclass(frozen=True)
class ProcessId:
    """Identity of a process: its pid and its start time in clock ticks since boot.

    The start time distinguishes processes that use the same pid one after another.
    """

    pid: int
    start_time: int


def find_descendants() -> set[ProcessId]:
    """Return the children of this process, their children, and so on."""
    children: dict[int, list[ProcessId]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        entry = _read_process(int(folder.name))
        if entry is not None:
            parent, process = entry
            children.setdefault(parent, []).append(process)
    descendants = set()
    todo = [os.getpid()]
    while todo:
        found_children = children.get(todo.pop(), [])
        descendants |= set(found_children)
        todo += [process.pid for process in found_children]
    return descendants


def kill_processes(processes: Iterable[ProcessId]) -> None:
    """Send SIGKILL to those of the processes that still exist."""
    for process in processes:
        entry = _read_process(process.pid)
        if entry is not None and entry[1] == process:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent process ends (Linux only)."""
    _call_prctl(1, signal.SIGKILL)


def adopt_orphans() -> None:
    """Let the kernel make this process the new parent of orphaned descendants (Linux only).

    A descendant becomes an orphan when its own parent process ends.
    """
    _call_prctl(36, 1)


def _call_prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _read_process(pid: int) -> tuple[int, ProcessId] | None:
    """Return the parent's pid and the `ProcessId` of a process, or None if it does not exist."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(words[1]), ProcessId(pid, int(words[19]))
