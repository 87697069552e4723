"""Messages from a run's process to its supervisor process (`weft.launch.supervisor`).

They report which calls are running, and the end of the process. A process that ends without
reporting it was killed by the system or by Ray's library, which ends processes that use a lost
raylet (Ray's local daemon).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from weft.runtime.processes import end_with_parent

if TYPE_CHECKING:
    from weft.runtime.device_process import CommandReport

# DESCRIPTOR:RESTARTS:PID, where PID is the supervisor's: "5:0:4711". Descendants of the run's
# process inherit the variable and ignore it, since their parent has another pid.
SUPERVISOR_VARIABLE = "WEFT_SUPERVISED"


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
        wire = cls.from_environment(environment)
        if wire._descriptor is not None:
            os.set_inheritable(wire._descriptor, False)
            end_with_parent()
        return wire

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
            self._send({"began": number, "call": call, "firing": firing, "where": list(where)})

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
                self._send({"over": number})

    def report_released(self) -> None:
        """Report that the devices were released and that no call is running."""
        with self._lock:
            self._unfinished_ranks.clear()
            self._send({"anew": True})

    def report_lost_part(self, what: str) -> None:
        """Report that part of Ray is lost; `what` describes this part.

        This should be called at once, since Ray can end this process at any moment.
        """
        with self._lock:
            self._send({"gone": what})

    def report_exit_code(self, code: int) -> None:
        """Report the exit code with which this process ends."""
        with self._lock:
            self._send({"ends": code})

    def _send(self, what: Mapping[str, Any]) -> None:
        if self._descriptor is not None:
            with suppress(OSError):  # the supervisor has died; this process is about to be killed
                os.write(self._descriptor, json.dumps(what).encode() + b"\n")
