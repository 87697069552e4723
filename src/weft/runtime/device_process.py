"""The process of one of many devices: the worker, the one thread that does its work in order, and
what it has to tell.

It knows nothing of what carries messages (`weft.runtime.ray`): commands come in with a number,
tensors that they need come from other devices through `Peers`, reports go out of `next_reports`.
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

COLLECTIVE_SECONDS = 1800.0  # a rank that waits longer for the others of a collective gives up
PACKAGE = str(Path(weft.__file__).parent)
TORCH_DISTRIBUTED = os.path.join("torch", "distributed")
TRANSFER_SECONDS = 600.0  # for tensors that another device holds already


@dataclass(frozen=True)
class Where:
    """A device's process, for people."""

    rank: int
    host: str
    pid: int
    address: str

    def __str__(self) -> str:
        return f"device {self.rank} ({self.host}, process {self.pid})"


@dataclass(frozen=True)
class Want:
    """Tensors that a command needs and another device holds."""

    rank: int
    ids: tuple[str, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """What became of the command `number`.

    `moved` are the bytes that came from elsewhere for it.
    """

    number: int
    kind: Literal["started", "announced", "finished", "failed"]
    value: Any = None
    moved: int = 0


@dataclass(frozen=True)
class Activity:
    """What a device is doing: waiting for other devices, or running the code at `place`, a
    function, file and line.
    """

    waits: bool
    place: str


class Peers(Protocol):
    """How a device gets what others hold.

    An ask returns at once, `take` waits for what was promised.
    """

    def ask(self, want: Want) -> Any: ...
    def take(self, promises: Sequence[Any], seconds: float) -> list[bytes]: ...


class Command(Protocol):
    """What the driver asks for. It can be pickled; what it returns goes back to the driver."""

    def run(self, process: DeviceProcess, number: int) -> Any: ...


@dataclass(frozen=True)
class Queued:
    number: int
    command: Command
    ranks: Sequence[int]  # that get a command of this number
    promises: Sequence[Any]


class DeviceProcess:
    """Commands run in the order that their places say, whatever order they arrive in: ranks that
    talk to each other must do the same things in the same order.
    """

    def __init__(self, rank: int, peers: Peers) -> None:
        keep_freed_memory()
        self.rank = rank
        self.peers = peers
        self.device = torch.device("cpu")  # until a command says which
        self.groups: ProcessGroups | None = None
        self._worker: Worker | None = None
        self.reallocations: dict[str, Reallocation] = {}
        # Weights that are no longer the newest, by whose they are and their version, then by the
        # way that they go.
        self.kept: dict[tuple[Place, int], dict[str, Kept]] = {}
        self.trace: Trace | None = None
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._queue: queue.SimpleQueue[Queued] = queue.SimpleQueue()
        self._next: deque[Queued] = deque()  # taken out of the queue and not yet run
        self._early: dict[int, Queued] = {}
        self._place = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="weft-worker", daemon=True)
        self._thread.start()

    # -- the ranks of the run

    def open_store(self, address: str, world: int) -> int:
        """Make the place where all ranks meet, on this machine; its port."""
        self._store = dist.TCPStore(address, 0, world, is_master=True, wait_for_workers=False)
        port: int = self._store.port
        return port

    def join(self, address: str, port: int, world: int, device: str) -> None:
        """Meet the other ranks; returns once all of them have come."""
        # the host's name may lead elsewhere
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
        assert self._worker is not None, "the worker is built first"
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
        """Take in the command that is to be run as the `place`-th.

        What it needs of others is asked for now; `shared` is what the driver hands out.
        """
        with self._lock:
            self._early[place] = Queued(
                number, command, ranks, [*(self.peers.ask(want) for want in wants), *shared]
            )
            while self._place in self._early:
                self._queue.put(self._early.pop(self._place))
                self._place += 1

    def report(self, report: Report) -> None:
        self._reports.put(report)

    def next_reports(self, seconds: float) -> list[Report]:
        """All that there is to tell; waits for something at most so long."""
        try:
            found = [self._reports.get(timeout=seconds)]
        except queue.Empty:
            return []
        while not self._reports.empty():
            found.append(self._reports.get())
        return found

    def waiting(self) -> Sequence[Queued]:
        """The commands that are there to be run next, in order.

        Asked by the one that runs, as is `run_next`.
        """
        while not self._queue.empty():
            self._next.append(self._queue.get())
        return self._next

    def run_next(self, seconds: float | None = None) -> int:
        """Run the next one, whose number is returned: in the middle of the one that runs.

        Raises `DevicesLost` where it has not come after so many seconds.
        """
        try:
            if self._next:
                queued = self._next.popleft()
            else:
                queued = self._queue.get(timeout=seconds)
        except queue.Empty:
            raise DevicesLost(
                f"a command that other devices have did not come within {seconds:g} s"
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
        """Put what others send into the store; its bytes."""
        raws = self.peers.take(promises, TRANSFER_SECONDS) if promises else []
        for raw in raws:
            self.worker.store.put(SequenceSample.from_bytes(raw))
        return sum(map(len, raws))

    # -- what others ask for meanwhile, in other threads

    def export(self, ids: Sequence[str], keys: Sequence[str]) -> bytes:
        """Tensors of the store, without what is no tensor: descriptions carry that."""
        found = self.worker.store.fetch(ids, keys)
        return SequenceSample(found.ids, found.lengths, found.offsets, found.data).to_bytes()

    def peak_memory_gb(self) -> float:
        return peak_memory_gb(self.device)

    def activity(self) -> Activity:
        """Return what the thread that runs commands is doing, from its stack."""
        assert self._thread.ident is not None
        return describe_stack(traceback.extract_stack(sys._current_frames()[self._thread.ident]))

    def where(self, address: str) -> Where:
        return Where(self.rank, socket.gethostname(), os.getpid(), address)


def describe_stack(stack: Sequence[traceback.FrameSummary]) -> Activity:
    """Return what a thread with this stack, outermost frame first, is doing.

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
    """Whether the error, or what led to it, is that other ranks are gone or late."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, DevicesLost | dist.DistError | ConnectionError):
            return True
        if isinstance(cause, RuntimeError) and any(sign in str(cause) for sign in TRANSPORTS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def portable(error: BaseException, where: Where) -> WeftError:
    """The error as the driver can raise it: a user's as it is, any other as a `RunError` that says
    where, with the traceback as its note; `DevicesLost` where others did not answer.
    """
    if isinstance(error, UserError):
        return error
    name = "" if isinstance(error, RunError) else f"{type(error).__name__}: "
    kind = NotFinite if isinstance(error, NotFinite) else RunError
    told = (DevicesLost if is_of_others(error) else kind)(f"{where}: {name}{error}")
    for note in [*getattr(error, "__notes__", []), "".join(traceback.format_exception(error))]:
        told.add_note(note)
    return told
