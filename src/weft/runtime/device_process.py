"""Process of one device: its worker, the thread that runs commands in order, and its reports.

The process does not depend on how messages are transported (`weft.runtime.ray`). The transport
passes numbered commands to `receive` and fetches reports with `next_reports`. Tensors of other
devices are read through a `PeerTransport`. The only device of a run can be part of the driver's own
process.
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
from weft.engine.device import DeviceTrace, measure_peak_memory_gib, use_device
from weft.errors import TRANSPORTS, DevicesLost, NotFinite, RunError, UserError, WeftError
from weft.parallel.mesh import ProcessGroups, choose_backend
from weft.realloc.execute import ParameterSnapshot, Reallocation
from weft.runtime.roles import EngineKey
from weft.runtime.store import TensorRequest, TensorStore
from weft.runtime.worker import Worker

COLLECTIVE_SECONDS = 1800.0  # timeout of a collective
PACKAGE = str(Path(weft.__file__).parent)
TORCH_DISTRIBUTED = os.path.join("torch", "distributed")
TRANSFER_SECONDS = 600.0  # timeout of a transfer from another device
NO_COMMAND = -1  # means "no command" in collectives; no job has this number


@dataclass(frozen=True)
class ProcessAddress:
    """Location of a device's process.

    Attributes:
        rank: Rank of the device.
        host: Name of the machine.
        pid: Process id.
        address: Network address of the machine.
    """

    rank: int
    host: str
    pid: int
    address: str

    def __str__(self) -> str:
        return f"device {self.rank} ({self.host}, process {self.pid})"


@dataclass(frozen=True)
class CommandReport:
    """Report on the progress or result of a command, sent to the driver.

    Attributes:
        number: Index of the job to which the command belongs. A job consists of one command for
            each of several ranks.
        kind: Type of the report.
        value: Result of a finished command, error of a failed one, or event with early outputs.
        num_bytes_received: Size in bytes of the tensors that were received to run the command.
    """

    number: int
    kind: Literal["started", "announced", "finished", "failed"]
    value: Any = None
    num_bytes_received: int = 0


@dataclass(frozen=True)
class DeviceActivity:
    """Description of what a device is doing at the moment.

    Attributes:
        is_waiting: True if the device is waiting for other devices.
        place: Function, file and line of the code that is running.
    """

    is_waiting: bool
    place: str


class PeerTransport(Protocol):
    """Transport that reads tensors from other devices.

    `request` asks for tensors and immediately returns a promise. `take` waits up to `seconds`
    seconds for the bytes of all `promises`, and returns them.
    """

    def request(self, request: TensorRequest) -> Any: ...
    def take(self, promises: Sequence[Any], seconds: float) -> list[bytes]: ...


class DeviceCommand(Protocol):
    """Picklable command that the driver sends to a device.

    The return value of `run` is sent back to the driver.
    """

    def run(self, process: DeviceProcess, number: int) -> Any: ...


@dataclass(frozen=True)
class StopCommands:
    """Command to end the thread that runs commands."""

    def run(self, process: DeviceProcess, number: int) -> None:
        process.is_stopped = True


@dataclass(frozen=True)
class QueuedCommand:
    """Command that is waiting to run.

    `promises` are handles of the tensors that the command needs, which may not have arrived yet.
    """

    number: int
    command: DeviceCommand
    ranks: Sequence[int]  # all ranks that receive a command with this number
    promises: Sequence[Any]


class DeviceProcess:
    """Process of one device, which runs the driver's commands in a background thread.

    Each command has an index (`place`). Commands run in the order of this index, even if they
    arrive in another order, because ranks that communicate with each other must run the same
    commands in the same order.

    `peers` is None if the device is part of the driver's process; it is then the only device, and
    `is_driver` is True. The driver uses the device's tensor store `store` as its own, and gets
    errors as they were raised.
    """

    def __init__(
        self, rank: int, peers: PeerTransport | None, device: torch.device | None = None
    ) -> None:
        self.rank = rank
        self.peers = peers
        self.is_driver = peers is None
        self.device = device or torch.device("cpu")  # until `BuildWorker` sets it
        self.store = TensorStore()
        self.groups: ProcessGroups | None = None
        self.worker: Worker  # set by `BuildWorker`
        self.reallocations: dict[str, Reallocation] = {}
        # Older weights saved for later transfers: (source, version) -> plan key -> weights.
        self.saved_weights: dict[tuple[EngineKey, int], dict[str, ParameterSnapshot]] = {}
        self.trace: DeviceTrace | None = None
        self.is_stopped = False
        self._reports: queue.SimpleQueue[CommandReport] = queue.SimpleQueue()
        self._queue: queue.SimpleQueue[QueuedCommand] = queue.SimpleQueue()
        self._pending: deque[QueuedCommand] = deque()  # taken from the queue, not yet run
        self._early_commands: dict[int, QueuedCommand] = {}
        self._next_place = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.run_commands, name="weft-worker", daemon=True)
        self._thread.start()

    # -- the ranks of the run

    def open_store(self, address: str, world: int) -> int:
        """Start the TCP store through which all ranks rendezvous, and return its port."""
        self._store = dist.TCPStore(address, 0, world, is_master=True, wait_for_workers=False)
        port: int = self._store.port
        return port

    def join(self, address: str, port: int, world: int, device: str) -> None:
        """Join the process group of the `world` ranks, and wait until all of them have joined."""
        # On one machine, use the loopback interface: the host name may resolve to another one.
        if address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in os.environ:
            os.environ["GLOO_SOCKET_IFNAME"] = next(
                n for _, n in socket.if_nameindex() if n.startswith("lo")
            )
        if self.rank != 0:
            self._store = dist.TCPStore(address, port, world, is_master=False)
        limit = timedelta(seconds=COLLECTIVE_SECONDS)
        backend = choose_backend(torch.device(device))
        dist.init_process_group(
            backend, store=self._store, rank=self.rank, world_size=world, timeout=limit
        )
        self.groups = ProcessGroups(COLLECTIVE_SECONDS)

    # -- commands, in order

    def receive(
        self,
        place: int,
        number: int,
        command: DeviceCommand,
        ranks: Sequence[int],
        requests: Sequence[TensorRequest],
        shared: Sequence[Any],
    ) -> None:
        """Queue a command; `place` is its index in the order in which this device runs commands.

        `number` identifies the command's job, and `ranks` are all ranks that receive a command of
        this job. `requests` are the tensors to request from other devices; the requests are sent
        immediately. `shared` are handles of the tensors that the driver provides.
        """
        promises = (
            [] if self.peers is None else [self.peers.request(request) for request in requests]
        )
        with self._lock:
            self._early_commands[place] = QueuedCommand(
                number, command, ranks, [*promises, *shared]
            )
            while self._next_place in self._early_commands:
                self._queue.put(self._early_commands.pop(self._next_place))
                self._next_place += 1

    def report(self, report: CommandReport) -> None:
        """Queue a report for the driver."""
        self._reports.put(report)

    def next_reports(self, seconds: float) -> list[CommandReport]:
        """Return all queued reports, waiting up to `seconds` seconds for the first.

        Returns an empty list if there is none by then.
        """
        try:
            reports = [self._reports.get(timeout=seconds)]
        except queue.Empty:
            return []
        while not self._reports.empty():
            reports.append(self._reports.get())
        return reports

    def list_pending(self) -> Sequence[QueuedCommand]:
        """Return the commands that have arrived but not run yet, in order.

        Like `run_commands`, this must be called only by the thread that runs the commands.
        """
        while not self._queue.empty():
            self._pending.append(self._queue.get())
        return self._pending

    def run_commands(self, last: int | None = None, seconds: float | None = None) -> None:
        """Run commands in order, waiting for each if necessary, until `StopCommands` has run.

        A running command may also call this method, to run commands that have arrived in the
        meantime: those up to the command of the job `last`. Raises `DevicesLost` if a command does
        not arrive within `seconds` seconds. If `seconds` is None, waits without a limit.
        """
        is_done = False
        while not is_done:
            try:
                if self._pending:
                    queued = self._pending.popleft()
                else:
                    queued = self._queue.get(timeout=seconds)
            except queue.Empty:
                raise DevicesLost(
                    f"a command that other devices received did not arrive within {seconds:g} s"
                ) from None
            self.report(CommandReport(queued.number, "started"))
            result = None
            try:
                moved = self._store_tensors(queued.promises)
                with use_device(self.device):
                    result = queued.command.run(self, queued.number)
                self.report(CommandReport(queued.number, "finished", result, moved))
            except BaseException as error:
                self.report(CommandReport(queued.number, "failed", self._to_reported_error(error)))
            is_done = self.is_stopped if last is None else queued.number == last
            del queued, result  # their tensors can be freed while the thread waits

    def stop(self, seconds: float) -> None:
        """End the thread after the commands that have arrived, waiting up to `seconds` seconds."""
        self._queue.put(QueuedCommand(NO_COMMAND, StopCommands(), (self.rank,), ()))
        self._thread.join(seconds)

    def _to_reported_error(self, error: BaseException) -> BaseException:
        if self.is_driver:
            return error
        traceback.print_exc()
        return to_picklable_error(error, self.describe_address(""))

    def _store_tensors(self, promises: Sequence[Any]) -> int:
        """Wait for tensors that were requested from other devices, and store them.

        `promises` are the results of `PeerTransport.request`. Returns the size of the tensors in
        bytes.
        """
        if not promises:
            return 0
        assert self.peers is not None, "the driver's own process needs no tensors of others"
        raws = self.peers.take(promises, TRANSFER_SECONDS)
        for raw in raws:
            self.store.put(SequenceSample.from_bytes(raw))
        return sum(map(len, raws))

    # -- requests of other processes, served by other threads while a command runs

    def export(self, ids: Sequence[str], keys: Sequence[str]) -> bytes:
        """Return the tensors of the given ids and keys, serialized without their metadata."""
        sample = self.store.fetch(ids, keys)
        return SequenceSample(sample.ids, sample.lengths, sample.offsets, sample.data).to_bytes()

    def peak_memory_gb(self) -> float:
        return measure_peak_memory_gib(self.device)

    def activity(self) -> DeviceActivity:
        """Return the current activity of the thread that runs commands, read from its stack."""
        assert self._thread.ident is not None
        return describe_stack(traceback.extract_stack(sys._current_frames()[self._thread.ident]))

    def describe_address(self, address: str) -> ProcessAddress:
        return ProcessAddress(self.rank, socket.gethostname(), os.getpid(), address)


def describe_stack(stack: Sequence[traceback.FrameSummary]) -> DeviceActivity:
    """Return the activity of a thread, given its stack with the outermost frame first.

    The thread counts as waiting for other devices if the innermost function of weft or of the
    user's code is waiting for a collective operation, for tensors, or for the next command.
    """
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    user_frames = []
    for index, frame in enumerate(stack):
        if frame.filename.startswith(PACKAGE) or not frame.filename.startswith(libraries):
            user_frames.append(index)
    inmost = stack[user_frames[-1]]
    called = stack[user_frames[-1] + 1 :]
    waits = (
        inmost.name in ("run_commands", "_take")
        or any(TORCH_DISTRIBUTED in frame.filename for frame in called)
        or ".wait(" in (inmost.line or "")
    )
    return DeviceActivity(waits, f"{inmost.name} ({Path(inmost.filename).name}:{inmost.lineno})")


def is_caused_by_others(error: BaseException) -> bool:
    """Return whether the loss or delay of other ranks caused an error, possibly indirectly."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, DevicesLost | dist.DistError | ConnectionError):
            return True
        if isinstance(cause, RuntimeError) and any(sign in str(cause) for sign in TRANSPORTS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def to_picklable_error(error: BaseException, where: ProcessAddress) -> WeftError:
    """Convert an error into one that can be sent to the driver.

    A `UserError` is returned unchanged. An error caused by the loss or delay of other ranks becomes
    a `DevicesLost`, and any other error a `RunError`. Both name the device in their message and
    have the traceback as a note.
    """
    if isinstance(error, UserError):
        return error
    name = "" if isinstance(error, RunError) else f"{type(error).__name__}: "
    kind = NotFinite if isinstance(error, NotFinite) else RunError
    picklable_error = (DevicesLost if is_caused_by_others(error) else kind)(
        f"{where}: {name}{error}"
    )
    for note in [*getattr(error, "__notes__", []), "".join(traceback.format_exception(error))]:
        picklable_error.add_note(note)
    return picklable_error
