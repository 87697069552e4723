"""Several devices that are forked processes of this machine: the real group, jobs, commands, stores
and collectives, no Ray.

They start in a fraction of a second, where Ray's take seconds. What Ray itself does is tested in
`test_ray.py`.
"""

from __future__ import annotations

import os
import pickle
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch

from tests.processes import fork_server
from weft.errors import DevicesLost
from weft.experiment import Experiment
from weft.runtime.device_process import (
    CommandReport,
    DeviceActivity,
    DeviceCommand,
    DeviceProcess,
    ProcessAddress,
)
from weft.runtime.dispatch import CommandTensors, DeviceLoss
from weft.runtime.store import TensorRequest

START_SECONDS = 120.0
POLL_SECONDS = 0.5
ACTIVITY_SECONDS = 5.0


class _Line:
    """A connection to a device, which answers one request at a time."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._connection = Client(str(folder / str(rank)), "AF_UNIX")
        self._lock = threading.Lock()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method of `DeviceProcess`, or raise its error; `DevicesLost` if
        the process ended.
        """
        try:
            with self._lock:
                self._connection.send_bytes(pickle.dumps((method, arguments)))
                good, found = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise DevicesLost("a device's process ended") from error
        if not good:
            raise found
        return found

    def close(self) -> None:
        self._connection.close()


def _export(folder: Path, request: TensorRequest) -> bytes:
    try:
        line = _Line(folder, request.rank)
    except OSError as error:
        raise DevicesLost(f"device {request.rank} ended") from error
    try:
        found: bytes = line.ask("export", request.ids, request.keys)
        return found
    finally:
        line.close()


class _Peers:
    """Implements `weft.runtime.device_process.PeerTransport`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._pool = folder, ThreadPoolExecutor(4)

    def request(self, request: TensorRequest) -> Future[bytes]:
        return self._pool.submit(_export, self._folder, request)

    def take(self, promises: Sequence[Any], seconds: float) -> list[bytes]:
        try:
            return [each.result(seconds) if isinstance(each, Future) else each for each in promises]
        except TimeoutError:
            raise DevicesLost(
                f"tensors of another device did not arrive within {seconds:g} s"
            ) from None


def _serve(rank: int, folder: Path, environment: Mapping[str, str], ready: Connection) -> None:
    os.environ.clear()  # what the fork server began with
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    process = DeviceProcess(rank, _Peers(folder))
    with Listener(str(folder / str(rank)), "AF_UNIX", backlog=16) as listener:
        ready.send(process.describe_address("127.0.0.1"))
        while True:
            connection = listener.accept()
            threading.Thread(target=_answer, args=(process, connection), daemon=True).start()


def _answer(process: DeviceProcess, connection: Connection) -> None:
    with suppress(EOFError, OSError):
        while True:
            method, arguments = pickle.loads(connection.recv_bytes())
            try:
                answer = (True, getattr(process, method)(*arguments))
            except Exception as error:
                answer = (False, error)
            connection.send_bytes(pickle.dumps(answer))


class ForkedDevices:
    """Implements `weft.runtime.dispatch.DeviceTransport`.

    The devices have the environment of this process, and `environment`.
    """

    shared_store = None

    def __init__(self, world: int, environment: Mapping[str, str] | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="devices-"))
        given = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
        context, pipes = fork_server(), []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._folder, given, theirs), daemon=True
            )
            process.start()
            self._processes.append(process)
            pipes.append(ours)
        self.addresses: list[ProcessAddress] = []
        for pipe in pipes:
            assert pipe.poll(START_SECONDS), "a device does not start"
            self.addresses.append(pipe.recv())
        self._lines = [_Line(self._folder, rank) for rank in range(world)]
        port = self._lines[0].ask("open_store", "127.0.0.1", world)
        self._each(lambda line: line.ask("join", "127.0.0.1", port, world, "cpu"))
        self._told: queue.SimpleQueue[tuple[int, list[CommandReport] | DeviceLoss]] = (
            queue.SimpleQueue()
        )
        for rank in range(world):
            threading.Thread(target=self._listen, args=(rank,), daemon=True).start()

    def send(
        self,
        rank: int,
        place: int,
        number: int,
        command: DeviceCommand,
        ranks: Sequence[int],
        given: CommandTensors,
    ) -> None:
        with suppress(DevicesLost):  # a device that ended is reported by `receive`
            self._lines[rank].ask(
                "receive", place, number, command, ranks, given.requests, given.shared
            )

    def receive(self) -> list[tuple[int, list[CommandReport] | DeviceLoss]]:
        try:
            return [self._told.get(timeout=POLL_SECONDS)]
        except queue.Empty:
            return []

    def share(self, raw: bytes) -> bytes:
        return raw

    def export(self, requests: Sequence[TensorRequest]) -> list[bytes]:
        return [_export(self._folder, request) for request in requests]

    def peak_memory_gb(self) -> float:
        return max(self._each(lambda line: line.ask("peak_memory_gb")))

    def describe_activities(self, ranks: Sequence[int]) -> dict[int, DeviceActivity]:
        with ThreadPoolExecutor(len(ranks)) as pool:
            asked = {pool.submit(_Line(self._folder, rank).ask, "activity"): rank for rank in ranks}
            ready, _ = wait(asked, timeout=ACTIVITY_SECONDS)
            return {asked[each]: each.result() for each in ready}

    def close(self, deadline_s: float) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _each(self, ask: Callable[[_Line], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self._lines)) as pool:
            return list(pool.map(ask, self._lines))

    def _listen(self, rank: int) -> None:
        """Pass on the reports of a device until its process ends."""
        try:
            line = _Line(self._folder, rank)
            while True:
                reports = line.ask("next_reports", POLL_SECONDS)
                if reports:
                    self._told.put((rank, reports))
        except (DevicesLost, OSError):
            self._told.put((rank, DeviceLoss("its process ended")))


class ForkedLaunch:
    """Starts a forked process per device in the place of `weft.runtime.ray.DeviceLaunch`; it is its own
    cluster, too.
    """

    def __init__(self, experiment: Experiment, mode: str, cluster: None = None) -> None:
        self.cluster = self
        self._devices = ForkedDevices(experiment.num_devices, experiment.control.env)

    def wait_for_devices(self) -> ForkedDevices:
        return self._devices

    def close(self) -> None:
        self._devices.close(0.0)


def fork_devices(set_attribute: Callable[[str, Any], object]) -> None:
    """Let runs in this process start forked devices; `set_attribute` is `MonkeyPatch.setattr`."""
    set_attribute("weft.launch.cluster.launch_devices", ForkedLaunch)
    set_attribute("weft.launch.cluster.relaunch_devices", ForkedLaunch)
    set_attribute("weft.launch.cluster.can_start_early", lambda experiment, mode: False)
