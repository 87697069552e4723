"""Process of one device: a worker, the thread that runs its commands in order, and its reports.

It does not depend on the message transport (`weft.runtime.ray`): numbered commands arrive through
`receive`, tensors from other devices through `Peers`, and reports leave through `next_reports`.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import sysconfig
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

import weft
from weft.data.sample import SequenceSample
from weft.engine.device import peak_memory_gb, using
from weft.engine.profile import Trace
from weft.errors import TRANSPORTS, DevicesLost, NotFinite, RunError, UserError, WeftError
from weft.observe.memory import keep_freed_memory
from weft.parallel.mesh import ProcessGroups, backend_of
from weft.realloc.execute import Reallocation
from weft.realloc.kept import Kept
from weft.runtime.roles import Place
from weft.runtime.worker import Worker

COLLECTIVE_SECONDS = 1800.0  # timeout of a collective
PACKAGE = str(Path(weft.__file__).parent)
TORCH_DISTRIBUTED = os.path.join("torch", "distributed")
TRANSFER_SECONDS = 600.0  # timeout of a transfer from another device


@dataclass(frozen=True)
class Where:
    """Rank, host, pid and address of a device's process, for messages."""

    rank: int
    host: str
    pid: int
    address: str

    def __str__(self) -> str:
        return f"device {self.rank} ({self.host}, process {self.pid})"


@dataclass(frozen=True)
class Want:
    """Tensors that a command needs from the device `rank`."""

    rank: int
    ids: tuple[str, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """Progress or result of the command `number`.

    `moved` is the number of bytes received from elsewhere for it.
    """

    number: int
    kind: Literal["started", "announced", "finished", "failed"]
    value: Any = None
    moved: int = 0


@dataclass(frozen=True)
class Activity:
    """Current activity of a device: waiting for other devices, or running the code at `place`.

    `place` names a function, file and line.
    """

    waits: bool
    place: str


class Peers(Protocol):
    """Transport for tensors that other devices hold.

    `ask` returns a promise at once; `take` waits for the bytes of all promises.
    """

    def ask(self, want: Want) -> Any: ...
    def take(self, promises: Sequence[Any], seconds: float) -> list[bytes]: ...


class Command(Protocol):
    """Picklable request of the driver; its return value is sent back to the driver."""

    def run(self, process: DeviceProcess, number: int) -> Any: ...


@dataclass(frozen=True)
class Queued:
    """Command with the promises of the tensors that it needs."""

    number: int
    command: Command
    ranks: Sequence[int]  # all ranks that receive a command with this number
    promises: Sequence[Any]


class DeviceProcess:
    """Run commands in the order of their places, whatever order they arrive in.

    Ranks that communicate must run the same commands in the same order.
    """

    def __init__(self, rank: int, peers: Peers) -> None:
        keep_freed_memory()
        self.rank = rank
        self.peers = peers
        self.device = torch.device("cpu")  # until `Build` sets it
        self.groups: ProcessGroups | None = None
        self._worker: Worker | None = None
        self.reallocations: dict[str, Reallocation] = {}
        # Older weights saved for later transfers: (source, version) -> plan key -> weights.
        self.kept: dict[tuple[Place, int], dict[str, Kept]] = {}
        self.trace: Trace | None = None
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._queue: queue.SimpleQueue[Queued] = queue.SimpleQueue()
        self._next: deque[Queued] = deque()  # taken from the queue, not yet run
        self._early: dict[int, Queued] = {}
        self._place = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="weft-worker", daemon=True)
        self._thread.start()

    # -- the ranks of the run

    def open_store(self, address: str, world: int) -> int:
        """Start the TCP store through which all ranks rendezvous, and return its port."""
        self._store = dist.TCPStore(address, 0, world, is_master=True, wait_for_workers=False)
        port: int = self._store.port
        return port

    def join(self, address: str, port: int, world: int, device: str) -> None:
        """Join the process group; return once all ranks have joined."""
        # On one machine, use the loopback interface: the host name may resolve to another one.
        if address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in os.environ:
            os.environ["GLOO_SOCKET_IFNAME"] = next(
                n for _, n in socket.if_nameindex() if n.startswith("lo")
            )
        if self.rank != 0:
            self._store = dist.TCPStore(address, port, world, is_master=False)
        limit = timedelta(seconds=COLLECTIVE_SECONDS)
        backend = backend_of(torch.device(device))
        dist.init_process_group(
            backend, store=self._store, rank=self.rank, world_size=world, timeout=limit
        )
        self.groups = ProcessGroups(COLLECTIVE_SECONDS)

    # -- commands, in order

    @property
    def worker(self) -> Worker:
        assert self._worker is not None, "the worker has not been built yet"
        return self._worker

    @worker.setter
    def worker(self, worker: Worker) -> None:
        self._worker = worker

    def receive(
        self,
        place: int,
        number: int,
        command: Command,
        ranks: Sequence[int],
        wants: Sequence[Want],
        shared: Sequence[Any],
    ) -> None:
        """Queue the command that runs as number `place` in this device's order.

        The tensors that it needs from other devices are requested now; `shared` are promises of
        rows that the driver sends.
        """
        with self._lock:
            self._early[place] = Queued(
                number, command, ranks, [*(self.peers.ask(want) for want in wants), *shared]
            )
            while self._place in self._early:
                self._queue.put(self._early.pop(self._place))
                self._place += 1

    def report(self, report: Report) -> None:
        """Queue a report for the driver."""
        self._reports.put(report)

    def next_reports(self, seconds: float) -> list[Report]:
        """Return all queued reports; wait at most `seconds` for the first."""
        try:
            found = [self._reports.get(timeout=seconds)]
        except queue.Empty:
            return []
        while not self._reports.empty():
            found.append(self._reports.get())
        return found

    def waiting(self) -> Sequence[Queued]:
        """Return the pending commands in order.

        Only the thread that runs commands calls this, and `run_next`.
        """
        while not self._queue.empty():
            self._next.append(self._queue.get())
        return self._next

    def run_next(self, seconds: float | None = None) -> int:
        """Run the next command and return its number; a running command may call this too.

        Raises `DevicesLost` if no command arrives within `seconds`.
        """
        try:
            if self._next:
                queued = self._next.popleft()
            else:
                queued = self._queue.get(timeout=seconds)
        except queue.Empty:
            raise DevicesLost(
                f"a command that other devices received did not arrive within {seconds:g} s"
            ) from None
        self.report(Report(queued.number, "started"))
        try:
            moved = self._take_in(queued.promises)
            with using(self.device):
                made = queued.command.run(self, queued.number)
            self.report(Report(queued.number, "finished", made, moved))
        except BaseException as error:
            traceback.print_exc()
            self.report(Report(queued.number, "failed", portable(error, self.where(""))))
        return queued.number

    def _work(self) -> None:
        while True:
            self.run_next()

    def _take_in(self, promises: Sequence[Any]) -> int:
        """Store the tensors that other devices sent; return their size in bytes."""
        raws = self.peers.take(promises, TRANSFER_SECONDS) if promises else []
        for raw in raws:
            self.worker.store.put(SequenceSample.from_bytes(raw))
        return sum(map(len, raws))

    # -- requests of other processes, served by other threads while a command runs

    def export(self, ids: Sequence[str], keys: Sequence[str]) -> bytes:
        """Return serialized tensors of the store, without metadata."""
        found = self.worker.store.fetch(ids, keys)
        return SequenceSample(found.ids, found.lengths, found.offsets, found.data).to_bytes()

    def peak_memory_gb(self) -> float:
        return peak_memory_gb(self.device)

    def activity(self) -> Activity:
        """Return the current activity of the thread that runs commands, from its stack."""
        assert self._thread.ident is not None
        return describe_stack(traceback.extract_stack(sys._current_frames()[self._thread.ident]))

    def where(self, address: str) -> Where:
        return Where(self.rank, socket.gethostname(), os.getpid(), address)


def describe_stack(stack: Sequence[traceback.FrameSummary]) -> Activity:
    """Return the activity of a thread with this stack, outermost frame first.

    It waits for other devices if weft's or the user's innermost code waits for a collective, for
    tensors, or for the next command.
    """
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    own = [
        index
        for index, frame in enumerate(stack)
        if frame.filename.startswith(PACKAGE) or not frame.filename.startswith(libraries)
    ]
    inmost = stack[own[-1]]
    called = stack[own[-1] + 1 :]
    waits = (
        inmost.name in ("run_next", "_take")
        or any(TORCH_DISTRIBUTED in frame.filename for frame in called)
        or ".wait(" in (inmost.line or "")
    )
    return Activity(waits, f"{inmost.name} ({Path(inmost.filename).name}:{inmost.lineno})")


def is_of_others(error: BaseException) -> bool:
    """Return whether the error, or one of its causes, is the loss or delay of other ranks."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, DevicesLost | dist.DistError | ConnectionError):
            return True
        if isinstance(cause, RuntimeError) and any(sign in str(cause) for sign in TRANSPORTS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def portable(error: BaseException, where: Where) -> WeftError:
    """Return a picklable error for the driver.

    A user's error is returned unchanged. Any other becomes a `RunError` that names the device, with
    the traceback as a note, or `DevicesLost` if other ranks did not answer.
    """
    if isinstance(error, UserError):
        return error
    name = "" if isinstance(error, RunError) else f"{type(error).__name__}: "
    kind = NotFinite if isinstance(error, NotFinite) else RunError
    told = (DevicesLost if is_of_others(error) else kind)(f"{where}: {name}{error}")
    for note in [*getattr(error, "__notes__", []), "".join(traceback.format_exception(error))]:
        told.add_note(note)
    return told
