"""Machines of a Ray cluster: assignment of devices, monitoring of addresses, and temporary folders.

This module imports neither ray nor torch.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import IO, Any

from weft.runtime.processes import SIGNALS

INTERVAL_SECONDS = 1.0
ANSWER_SECONDS = 5.0
CONNECT_SECONDS = 20.0
# Start of an HTTP/2 connection (RFC 9113, section 3.4): a fixed text, then a SETTINGS frame
# from either side, here an empty one. The fourth byte of a frame is its type.
FRAME = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + FRAME
PREFIX = "weft-"
LOCK = "owner.lock"


@dataclass(frozen=True)
class RayNode:
    """Machine of a Ray cluster, as listed by `ray.nodes()`.

    `id` is the id that Ray assigned to the machine, `host` is its host name, and `address` is its
    IP address. `cpus` and `gpus` are the numbers of CPUs and GPUs that Ray can use on it.
    """

    id: str
    host: str
    address: str
    cpus: int
    gpus: int

    @classmethod
    def from_listing(cls, listed: Mapping[str, Any]) -> RayNode:
        """Create a `RayNode` from an entry of `ray.nodes()`."""
        return cls(
            id=listed["NodeID"],
            host=listed["NodeManagerHostname"],
            address=listed["NodeManagerAddress"],
            cpus=int(listed["Resources"].get("CPU", 0)),
            gpus=int(listed["Resources"].get("GPU", 0)),
        )


def sort_nodes(nodes: Iterable[RayNode], here: str) -> list[RayNode]:
    """Return the machine with the id `here`, followed by the others sorted by address.

    With this order, device 0 is on the machine where the run was started.
    """
    return sorted(
        nodes,
        key=lambda node: (
            node.id != here,
            [int(part) for part in re.findall(r"\d+", node.address)],
        ),
    )


def order_bundles(on: Mapping[int, str], nodes: Sequence[RayNode]) -> list[int]:
    """Return the indices of the placement group's bundles, ordered by machine as in `nodes`.

    A bundle is what Ray reserves for one device. `on` maps the index of each bundle to the id of
    its machine.
    """
    order = [node.id for node in nodes]
    return sorted(on, key=lambda index: (order.index(on[index]), index))


def count_threads(on: Mapping[int, str], nodes: Sequence[RayNode]) -> dict[str, int]:
    """Return the number of CPU threads that each device on a machine uses, by machine id.

    It is the number of CPUs divided by the number of devices on the machine, but at least 1. `on`
    maps the index of each bundle (one per device) to the id of its machine.
    """
    threads: dict[str, int] = {}
    for node in nodes:
        threads[node.id] = max(1, node.cpus // max(1, list(on.values()).count(node.id)))
    return threads


# -- network addresses; a connection to each is attempted every second


class AddressWatch:
    """Monitor of network addresses, which runs in a background thread.

    `places` maps names to (host, port). `lost_part` describes the first address that has not
    responded for `seconds` seconds, or is None.
    """

    def __init__(self, places: Mapping[str, tuple[str, int]], seconds: float) -> None:
        self.lost_part: str | None = None
        self._addresses = places
        self._seconds = seconds
        self._closed = threading.Event()
        threading.Thread(target=self._poll_addresses, name="weft-watch", daemon=True).start()

    def check(self, *names: str) -> None:
        """Try to connect to the addresses with these names, or to all addresses if none is named.

        Sets `lost_part` if an address does not respond.
        """
        for name in names or self._addresses:
            if self.lost_part is None and not can_connect(self._addresses[name]):
                self.lost_part = self._describe_loss(name)

    def close(self) -> None:
        """Stop monitoring the addresses."""
        self._closed.set()

    def _poll_addresses(self) -> None:
        last_contact = dict.fromkeys(self._addresses, time.monotonic())
        while self.lost_part is None and not self._closed.wait(INTERVAL_SECONDS):
            for name, place in self._addresses.items():
                if can_connect(place):
                    last_contact[name] = time.monotonic()
                elif time.monotonic() - last_contact[name] > self._seconds:
                    self.lost_part = self._describe_loss(name)

    def _describe_loss(self, name: str) -> str:
        host, port = self._addresses[name]
        return f"{name} ({host}:{port}) does not respond"


def check_listens(address: str) -> None:
    """Raise `OSError` if no HTTP/2 server, such as Ray's head, listens at `address`.

    The address has the form HOST:PORT; an address of another form is not checked. Without this
    check, Ray itself would retry for minutes and print every attempt.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in address:
        return
    with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS) as line:
        if os.environ.get("RAY_USE_TLS", "0") == "1":
            return
        line.sendall(PREFACE)
        answer = b""
        while len(answer) < len(FRAME) and (received := line.recv(len(FRAME) - len(answer))):
            answer += received
    if answer[3:4] != FRAME[3:4]:
        raise OSError("another program listens there")


def can_connect(place: tuple[str, int]) -> bool:
    """Return whether a TCP connection to `place`, a (host, port), can be opened."""
    try:
        socket.create_connection(place, timeout=ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


# -- the library, and temporary folders


@contextmanager
def silence_library(library: str) -> Iterator[None]:
    """Suppress a library's output in the block.

    If the library replaces the handlers of Ctrl-C and SIGTERM, they are restored.
    """
    logging.getLogger(library).setLevel(logging.ERROR)
    main = threading.current_thread() is threading.main_thread()
    if main:
        previous = {number: signal.getsignal(number) for number in SIGNALS}
    else:
        previous = {}
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class ScratchFolder:
    """Temporary folder of this process, named `weft-PID-...` and locked by it.

    The operating system releases the lock when the process ends, even if the process is killed.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        lock = self.path / f"{LOCK}.tmp"
        self._file = lock.open("w", encoding="utf-8")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        lock.rename(self.path / LOCK)  # renamed once locked, so that it never appears unlocked

    def remove(self) -> None:
        """Remove the folder and release its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._file.close()


def remove_leftovers() -> list[Path]:
    """Remove temporary folders that dead processes of this user left behind.

    Returns the paths of the removed folders.
    """
    folders = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        lock = _lock_if_abandoned(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            lock.close()
            folders.append(folder)
    return folders


def _lock_if_abandoned(folder: Path) -> IO[str] | None:
    """Lock a folder whose owner is dead, and return the lock file.

    Returns None if the folder belongs to another user, is in use, or is being created.
    """
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return None
        file = (folder / LOCK).open("r+", encoding="utf-8")
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
