"""Messages from a run's process to its supervisor (`weft.launch.supervise`).

They report running calls and the end of the process. A process that ends without a report was
killed by Ray, whose library ends processes that use a lost raylet, or by the system.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from weft.runtime.processes import die_with_parent

if TYPE_CHECKING:
    from weft.runtime.device_process import Report

# DESCRIPTOR:RESTARTS:PID, where PID is the supervisor's: "5:0:4711". Descendants of the run's
# process inherit the variable and ignore it, since their parent has another pid.
SUPERVISED = "WEFT_SUPERVISED"


class Wire:
    """Send messages as lines of JSON; do nothing if the process has no supervisor."""

    def __init__(self, descriptor: int | None = None, restarts: int = 0) -> None:
        self.restarts = restarts
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._waits_for: dict[int, set[int]] = {}  # job -> ranks

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Wire:
        """Return the connection that the environment describes."""
        told = environment.get(SUPERVISED, "").split(":")
        if told[2:] == [str(os.getppid())]:
            return cls(int(told[0]), int(told[1]))
        return cls()

    @property
    def supervised(self) -> bool:
        """True if the process has a supervisor."""
        return self._descriptor is not None

    @classmethod
    def begin(cls, environment: Mapping[str, str]) -> Wire:
        """Connect to the supervisor; every command calls this first.

        A supervised process ends with its supervisor and does not pass the descriptor on.
        """
        wire = cls.of(environment)
        if wire._descriptor is not None:
            os.set_inheritable(wire._descriptor, False)
            die_with_parent()
        return wire

    def began(
        self, number: int, call: str, firing: int, ranks: Sequence[int], where: Sequence[str]
    ) -> None:
        """Report, once, that job `number` is a call on these ranks."""
        with self._lock:
            if self._descriptor is None or number in self._waits_for:
                return
            self._waits_for[number] = set(ranks)
            self._tell({"began": number, "call": call, "firing": firing, "where": list(where)})

    def heard(self, rank: int, reports: Sequence[Report]) -> None:
        """Report calls that a rank has finished."""
        for report in reports:
            if report.kind in ("finished", "failed"):
                self.over(report.number, rank)

    def over(self, number: int, rank: int) -> None:
        """Note that a rank finished a call; report the call once all ranks have."""
        with self._lock:
            if number not in self._waits_for:
                return
            self._waits_for[number].discard(rank)
            if not self._waits_for[number]:
                del self._waits_for[number]
                self._tell({"over": number})

    def anew(self) -> None:
        """Report that the devices were released, with all calls."""
        with self._lock:
            self._waits_for.clear()
            self._tell({"anew": True})

    def gone(self, what: str) -> None:
        """Report which part of Ray is lost, before Ray can end this process."""
        with self._lock:
            self._tell({"gone": what})

    def ends(self, code: int) -> None:
        """Report the exit code."""
        with self._lock:
            self._tell({"ends": code})

    def _tell(self, what: Mapping[str, Any]) -> None:
        if self._descriptor is not None:
            with suppress(OSError):  # the supervisor has died; this process is about to be killed
                os.write(self._descriptor, json.dumps(what).encode() + b"\n")
