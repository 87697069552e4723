"""What a run's process tells the one that supervises it (`weft.launch.supervise`): which calls are
under way, and its end.

A process that ends without having told so was ended by something else: by Ray, whose library ends
whoever uses a raylet that is gone, or by the system.
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

# The descriptor to write to, how many processes of the run were lost before, and the supervisor:
# "5:0:4711". Processes further down have it too, and are not meant.
SUPERVISED = "WEFT_SUPERVISED"


class Wire:
    """One line of JSON for each thing told; nothing where nobody supervises."""

    def __init__(self, descriptor: int | None = None, restarts: int = 0) -> None:
        self.restarts = restarts
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._waits_for: dict[int, set[int]] = {}  # job -> ranks

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Wire:
        told = environment.get(SUPERVISED, "").split(":")
        if told[2:] == [str(os.getppid())]:
            return cls(int(told[0]), int(told[1]))
        return cls()

    @property
    def supervised(self) -> bool:
        return self._descriptor is not None

    @classmethod
    def begin(cls, environment: Mapping[str, str]) -> Wire:
        """Called first by every command: one that a supervisor started ends with it, and does not
        hand the wire on.
        """
        wire = cls.of(environment)
        if wire._descriptor is not None:
            os.set_inheritable(wire._descriptor, False)
            die_with_parent()
        return wire

    def began(
        self, number: int, call: str, firing: int, ranks: Sequence[int], where: Sequence[str]
    ) -> None:
        """The job `number` is a call on these ranks; told once however often it is said."""
        with self._lock:
            if self._descriptor is None or number in self._waits_for:
                return
            self._waits_for[number] = set(ranks)
            self._tell({"began": number, "call": call, "firing": firing, "where": list(where)})

    def heard(self, rank: int, reports: Sequence[Report]) -> None:
        for report in reports:
            if report.kind in ("finished", "failed"):
                self.over(report.number, rank)

    def over(self, number: int, rank: int) -> None:
        """On one of its ranks."""
        with self._lock:
            if number not in self._waits_for:
                return
            self._waits_for[number].discard(rank)
            if not self._waits_for[number]:
                del self._waits_for[number]
                self._tell({"over": number})

    def anew(self) -> None:
        """The devices were let go of, and their calls with them."""
        with self._lock:
            self._waits_for.clear()
            self._tell({"anew": True})

    def gone(self, what: str) -> None:
        """What Ray has lost, told before it may end this process."""
        with self._lock:
            self._tell({"gone": what})

    def ends(self, code: int) -> None:
        with self._lock:
            self._tell({"ends": code})

    def _tell(self, what: Mapping[str, Any]) -> None:
        if self._descriptor is not None:
            with suppress(OSError):  # the supervisor is gone, and this process with it in a moment
                os.write(self._descriptor, json.dumps(what).encode() + b"\n")
