"""Runs a Python program and its tests in two processes, behind the protections that this system
allows.

`_launcher.py` is what is started, `_isolation.py` the protections, `_peer.py` how the tests call
the program's functions. docs/code-reward.md says what is protected and what is not.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LAUNCHER = Path(__file__).with_name("_launcher.py")
END_SECONDS = 5.0  # that the launcher may take to end what it has started
PROBE_SECONDS = 20.0
# In the order in which they are tried, and what each one does.
PROTECTIONS: Mapping[str, str] = {
    "namespaces": (
        "own process, mount, network and IPC namespaces (no network, no other process in sight)"
    ),
    "files": "own file tree (only the system and Python, read-only, and an empty /tmp)",
    "landlock": "Landlock (no files but those of the system, of Python and of an empty folder)",
    "user": "another user",
    "seccomp": "seccomp (no sockets, no access to other processes)",
}
# Programs import from the standard library; a protection that prevents this is of no use.
PROBE = "import hashlib, math, random, struct\ndef probe(x):\n    open('f', 'w').close()\n    return math.floor(x)"
# no process may start threads
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Limits:
    """Limits of each of the two processes: `seconds` of wall time for both together, and of
    processor time; `memory_mb` of address space; `file_mb` of the largest file; `disk_mb` of all
    files in its folder, where that has a file tree of its own; `processes` it may start (root is
    not held to this).
    """

    seconds: float = 5.0
    memory_mb: int = 1024
    file_mb: int = 16
    disk_mb: int = 64
    processes: int = 0

    def as_resources(self) -> dict[str, int]:
        return {
            "RLIMIT_AS": self.memory_mb << 20,
            "RLIMIT_CPU": math.ceil(self.seconds) + 1,
            "RLIMIT_FSIZE": self.file_mb << 20,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
        }


@dataclass(frozen=True)
class Task:
    """A program and its tests.

    Names that the tests use and do not define come from `prompt`, where that is code, and for the
    rest, `entry_point` among them, from the program.
    """

    program: str
    tests: str
    prompt: str = ""
    entry_point: str | None = None


class Launcher:
    """The process that forks others for programs (`_launcher.py`). It ends with this process."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self.owner = os.getpid()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(LAUNCHER)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict.fromkeys(THREADS, "1"),
                start_new_session=True,
            )
        atexit.register(self.close)

    def close(self) -> None:
        """End the process that forks others, in the process that has started it."""
        self._socket.close()
        if self.owner == os.getpid():
            self.process.kill()  # a fork of this process may still hold the socket
            self.process.wait()

    def fork(self, descriptors: Sequence[int]) -> int:
        """Return the process id of a fork that reads from the first descriptor and writes to the
        second.
        """
        with self._lock:
            socket.send_fds(self._socket, [b"+"], list(descriptors))
            number = self._socket.recv(4, socket.MSG_WAITALL)
        if len(number) < 4:
            raise ConnectionError("the launcher of programs has ended")
        return int.from_bytes(number, "little")


_launchers: list[Launcher] = []  # of this process: none or one


def _launcher() -> Launcher:
    if (
        not _launchers
        or _launchers[0].owner != os.getpid()
        or _launchers[0].process.poll() is not None
    ):
        _launchers[:] = [Launcher()]
    return _launchers[0]


def passes(task: Task, limits: Limits, active: Sequence[str] | None = None) -> bool:
    """Return whether the program runs to its end and its tests do, within the limits.

    Nothing that either of them starts outlives the call. `active`: protections; by default all that
    work here.
    """
    word = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(_folder()) for _ in range(2)]
        first = {
            "protections": list(protections() if active is None else active),
            "limits": limits.as_resources(),
            "folders": folders,
            "disk_mb": limits.disk_mb,
            "program": task.program,
        }
        second = {
            "tests": task.tests,
            "prompt": task.prompt,
            "entry_point": task.entry_point,
            "word": word,
        }
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        stack.callback(os.close, ours_out)
        try:
            leader = _launcher().fork([theirs_in, theirs_out])
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        with contextlib.suppress(BrokenPipeError), os.fdopen(ours_in, "wb") as file:
            file.write(_message(first) + _message(second))
        said = _read_to_end(ours_out, limits.seconds)
        if said is None:
            _end(leader, ours_out)
    return said == word.encode()


def _message(content: Mapping[str, object]) -> bytes:
    text = json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text


def _read_to_end(descriptor: int, seconds: float) -> bytes | None:
    """Everything up to the end of the processes that write to this pipe; None where they do not end
    in time.
    """
    said = b""
    end = time.monotonic() + seconds
    while select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
        part = os.read(descriptor, 4096)
        if not part:
            return said
        said += part
    return None


def _end(leader: int, pipe: int) -> None:
    """End a fork of the launcher, which ends what it has started first; where it cannot, end its
    process group.
    """
    for kind, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, END_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            (os.kill if kind == signal.SIGTERM else os.killpg)(leader, kind)
        if _read_to_end(pipe, seconds) is not None:
            return


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """An empty folder that every user may write in."""
    with tempfile.TemporaryDirectory(prefix="weft-code-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o777)
        yield folder


@functools.cache
def protections() -> tuple[str, ...]:
    """The names of the protections that work on this system, found by trying them."""
    if sys.platform != "linux":
        return ()
    possible = [name for name in PROTECTIONS if name != "user" or os.geteuid() == 0]
    best = tuple(name for name in possible if name != "landlock")
    if _works(best):
        return best
    found: tuple[str, ...] = ()
    for name in possible:
        superfluous = name == "landlock" and "files" in found
        impossible = name == "files" and "namespaces" not in found
        if not superfluous and not impossible and _works((*found, name)):
            found = (*found, name)
    return found


def _works(names: Sequence[str]) -> bool:
    return passes(Task(PROBE, "assert probe(1.5) == 1"), Limits(seconds=PROBE_SECONDS), names)


def described(active: Sequence[str]) -> list[str]:
    """Lines that say which protections hold, and which ones this system refuses."""
    held = [PROTECTIONS[name] for name in active]
    lines = [
        f"code reward: programs run behind {'; '.join([*held, 'limits of time, memory and files'])}"
    ]
    # One of a pair is enough; the other user is for root.
    covers = {"landlock": "files", "files": "landlock"}
    missing = [
        name for name in PROTECTIONS if name not in active and covers.get(name) not in active
    ]
    if os.geteuid() != 0:
        missing = [name for name in missing if name != "user"]
    if missing:
        refused = "; ".join(PROTECTIONS[name] for name in missing)
        lines.append(
            f"code reward: NOT protected by {refused}: this system refuses it; see "
            f"docs/code-reward.md"
        )
    return lines
