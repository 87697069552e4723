"""Several devices that are threads of this process: the real group, jobs, commands and stores, no
Ray and no collectives.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.realloc.plan import ParameterTransfer
from weft.runtime.commands import PrepareReallocation
from weft.runtime.device_process import (
    CommandReport,
    DeviceActivity,
    DeviceCommand,
    DeviceProcess,
    ProcessAddress,
)
from weft.runtime.dispatch import CommandTensors, DeviceLoss
from weft.runtime.store import TensorRequest

SECONDS = 30.0  # until a device gives another one up, and the test with it


@dataclass(frozen=True)
class Peers:
    processes: list[DeviceProcess]

    def request(self, request: TensorRequest) -> bytes:
        return self.processes[request.rank].export(request.ids, request.keys)

    def take(self, promises: Sequence[bytes], seconds: float) -> list[bytes]:
        return list(promises)


class Way:
    """Where ranks meet, and what is on its way."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.meet = threading.Barrier(len(ranks), timeout=SECONDS)
        self.version, self.values = 0, list[Any]()


class HandedOver:
    """In the place of `Reallocation`: whole parameters go from the rank that has them to the
    others, which meet for it.
    """

    def __init__(self, way: Way, transfers: Sequence[ParameterTransfer], rank: int) -> None:
        self.way, self.rank = way, rank
        self.sent_names = list(
            dict.fromkeys(each.name for each in transfers if each.source == rank)
        )

    def move(self, giver: Any, taker: Any, *, eta: float) -> Any:
        if self.sent_names:
            self.way.version = giver.version
            self.way.values = [
                (name, where, values.clone()) for name, where, values in giver.read(self.sent_names)
            ]
        self.way.meet.wait()
        if taker is not None:
            taker.write(self.way.values, version=self.way.version, eta=eta)
        self.way.meet.wait()
        return self.way


@dataclass(frozen=True)
class PrepareHere:
    """`PrepareReallocation` without a process group."""

    asked: PrepareReallocation
    way: Way

    def run(self, process: DeviceProcess, number: int) -> None:
        made: Any = HandedOver(self.way, self.asked.transfers, process.rank)
        process.reallocations[self.asked.key] = made


class ThreadDevices:
    """Implements `weft.runtime.dispatch.DeviceTransport`."""

    shared_store = None

    def __init__(self, world: int) -> None:
        self.processes: list[DeviceProcess] = []
        self.processes += [DeviceProcess(rank, Peers(self.processes)) for rank in range(world)]
        self._ways: dict[str, Way] = {}

    @property
    def addresses(self) -> list[ProcessAddress]:
        return [ProcessAddress(process.rank, "here", 0, "127.0.0.1") for process in self.processes]

    def send(
        self,
        rank: int,
        place: int,
        number: int,
        command: DeviceCommand,
        ranks: Sequence[int],
        given: CommandTensors,
    ) -> None:
        if isinstance(command, PrepareReallocation):
            command = PrepareHere(command, self._ways.setdefault(command.key, Way(ranks)))
        self.processes[rank].receive(place, number, command, ranks, given.requests, given.shared)

    def receive(self) -> list[tuple[int, list[CommandReport] | DeviceLoss]]:
        found = [(process.rank, process.next_reports(0.001)) for process in self.processes]
        return [each for each in found if each[1]]

    def share(self, raw: bytes) -> bytes:
        return raw

    def export(self, requests: Sequence[TensorRequest]) -> list[bytes]:
        return [
            self.processes[request.rank].export(request.ids, request.keys) for request in requests
        ]

    def peak_memory_gb(self) -> float:
        return 0.0

    def describe_activities(self, ranks: Sequence[int]) -> dict[int, DeviceActivity]:
        return {rank: self.processes[rank].activity() for rank in ranks}

    def close(self, deadline_s: float) -> None:
        """Their threads end with this process."""
