"""Execution of a Python program and its tests in two isolated processes.

`_launcher.py` is the process that starts both, `_isolation.py` has the protections, and `_peer.py`
lets the tests call the program's functions. docs/code-reward.md describes which dangers are
covered, and which are not.
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
END_SECONDS = 5.0  # time for the launcher to end the processes that it has started
PROBE_SECONDS = 20.0
# Name -> description, in the order in which they are tried.
PROTECTIONS: Mapping[str, str] = {
    "namespaces": (
        "own process, mount, network and IPC namespaces (no network, no other process visible)"
    ),
    "files": "own file tree (only the system and Python, read-only, and an empty /tmp)",
    "landlock": "Landlock (only files of the system, of Python and of an empty folder)",
    "user": "another user",
    "seccomp": "seccomp (no sockets, no access to other processes)",
}
# Program for trying a protection. Programs import modules and write files; a protection that
# prevents this cannot be used.
PROBE = "import hashlib, math, random, struct\ndef probe(x):\n    open('f', 'w').close()\n    return math.floor(x)"
# Environment variables that limit libraries to one thread, since processes must not start threads
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class SandboxLimits:
    """Limits for running a program and its tests, which run in two separate processes.

    Attributes:
        seconds: Wall time of both processes together. The processor time of each process is limited
            to about the same value.
        memory_mb: Address space of each process, in MiB.
        file_mb: Size of each file that is written, in MiB.
        disk_mb: Total size of the files in the folder of each process, in MiB. Enforced only if the
            process has its own file tree (protection `files`).
        processes: Number of processes that each process can start. It does not apply to root.
    """

    seconds: float = 5.0
    memory_mb: int = 1024
    file_mb: int = 16
    disk_mb: int = 64
    processes: int = 0

    def to_resources(self) -> dict[str, int]:
        """Return the limits, keyed by the names of limits in the module `resource`."""
        return {
            "RLIMIT_AS": self.memory_mb << 20,
            "RLIMIT_CPU": math.ceil(self.seconds) + 1,
            "RLIMIT_FSIZE": self.file_mb << 20,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
        }


@dataclass(frozen=True)
class SandboxTask:
    """Program to run, with its tests.

    `entry_point` is the name of the function to test, which the program defines. If it is set and
    `prompt` is code, the tests use the helper functions that `prompt` defines instead of the
    program's versions. Thus a wrong program cannot pass by changing a helper function.
    """

    program: str
    tests: str
    prompt: str = ""
    entry_point: str | None = None


class ProgramLauncher:
    """Launcher process (`_launcher.py`), which forks a process for each program to run.

    The launcher ends when the process that started it ends.
    """

    def __init__(self) -> None:
        self._socket, launcher_end = socket.socketpair()
        self._lock = threading.Lock()
        self.owner = os.getpid()
        with launcher_end:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(LAUNCHER)],
                stdin=launcher_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict.fromkeys(THREADS, "1"),
                start_new_session=True,
            )
        atexit.register(self.close)

    def close(self) -> None:
        """Close the connection to the launcher process, and end that process.

        In a fork of the process that started the launcher, only the connection is closed, because
        the original process still uses the launcher.
        """
        self._socket.close()
        if self.owner == os.getpid():
            self.process.kill()  # a fork of this process may keep the socket open
            self.process.wait()

    def fork(self, descriptors: Sequence[int]) -> int:
        """Fork a process for one program and return its process id.

        The new process reads from the first descriptor and writes to the second descriptor. Raises
        `ConnectionError` if the launcher has ended.
        """
        with self._lock:
            socket.send_fds(self._socket, [b"+"], list(descriptors))
            number = self._socket.recv(4, socket.MSG_WAITALL)
        if len(number) < 4:
            raise ConnectionError("the launcher of programs has ended")
        return int.from_bytes(number, "little")


_launchers: list[ProgramLauncher] = []  # launcher of this process, or empty if not started


def _get_launcher() -> ProgramLauncher:
    if (
        not _launchers
        or _launchers[0].owner != os.getpid()
        or _launchers[0].process.poll() is not None
    ):
        _launchers[:] = [ProgramLauncher()]
    return _launchers[0]


def run_tests(
    task: SandboxTask, limits: SandboxLimits, active: Sequence[str] | None = None
) -> bool:
    """Run a program and its tests, and return whether they finish without error within the limits.

    All processes that they start have ended when the call returns. `active` has the names of the
    protections to use; by default, all protections that work on this system are used.
    """
    # The tests' process writes this word after the last test; the program cannot know it.
    word = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        # Build the two messages; the program is sent before the tests.
        folders = [stack.enter_context(_create_folder()) for _ in range(2)]
        program_message = {
            "protections": list(find_protections() if active is None else active),
            "limits": limits.to_resources(),
            "folders": folders,
            "disk_mb": limits.disk_mb,
            "program": task.program,
        }
        tests_message = {
            "tests": task.tests,
            "prompt": task.prompt,
            "entry_point": task.entry_point,
            "word": word,
        }
        # Fork the process, send it the messages, and wait for the word.
        input_read, input_write = os.pipe()
        output_read, output_write = os.pipe()
        stack.callback(os.close, output_read)
        try:
            leader = _get_launcher().fork([input_read, output_write])
        finally:
            os.close(input_read)
            os.close(output_write)
        with contextlib.suppress(BrokenPipeError), os.fdopen(input_write, "wb") as file:
            file.write(_encode_message(program_message) + _encode_message(tests_message))
        output = _read_to_end(output_read, limits.seconds)
        if output is None:
            _end(leader, output_read)
    return output == word.encode()


def _encode_message(content: Mapping[str, object]) -> bytes:
    text = json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text


def _read_to_end(descriptor: int, seconds: float) -> bytes | None:
    """Return everything that is written to a pipe, once all writers have closed it.

    Returns None if the pipe is still open after `seconds`.
    """
    output = b""
    end = time.monotonic() + seconds
    while select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
        part = os.read(descriptor, 4096)
        if not part:
            return output
        output += part
    return None


def _end(leader: int, pipe: int) -> None:
    """End a process that the launcher forked, and its child processes.

    `leader` is the id of the process. It is first asked to kill its children and exit. `pipe` is
    the read end of a pipe that closes when all of these processes have ended. If it does not close
    in time, the process group is killed.
    """
    for kind, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, END_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            (os.kill if kind == signal.SIGTERM else os.killpg)(leader, kind)
        if _read_to_end(pipe, seconds) is not None:
            return


@contextlib.contextmanager
def _create_folder() -> Iterator[str]:
    """Create an empty folder in which every user can write; delete it after the `with` block."""
    with tempfile.TemporaryDirectory(prefix="weft-code-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o777)
        yield folder


@functools.cache
def find_protections() -> tuple[str, ...]:
    """Try out the protections, and return the names of those that work on this system."""
    if sys.platform != "linux":
        return ()
    possible = []
    for name in PROTECTIONS:
        if name != "user" or os.geteuid() == 0:
            possible.append(name)
    best = tuple(name for name in possible if name != "landlock")
    if _can_protect(best):
        return best
    protections: tuple[str, ...] = ()
    for name in possible:
        is_superfluous = name == "landlock" and "files" in protections
        is_impossible = name == "files" and "namespaces" not in protections
        if not is_superfluous and not is_impossible and _can_protect((*protections, name)):
            protections = (*protections, name)
    return protections


def _can_protect(names: Sequence[str]) -> bool:
    """Return whether a small test program runs successfully under the protections `names`."""
    return run_tests(
        SandboxTask(PROBE, "assert probe(1.5) == 1"), SandboxLimits(seconds=PROBE_SECONDS), names
    )


def describe_protections(active: Sequence[str]) -> list[str]:
    """Return lines of text that list the active protections, and those that this system lacks."""
    descriptions = [PROTECTIONS[name] for name in active]
    descriptions.append("limits of time, memory and files")
    lines = [f"code reward: programs run behind {'; '.join(descriptions)}"]
    # One of each pair is enough; the protection `user` is available to root only.
    covers = {"landlock": "files", "files": "landlock"}
    missing = []
    for name in PROTECTIONS:
        if name not in active and covers.get(name) not in active:
            missing.append(name)
    if os.geteuid() != 0:
        missing = [name for name in missing if name != "user"]
    if missing:
        refused = "; ".join(PROTECTIONS[name] for name in missing)
        lines.append(
            f"code reward: NOT protected by {refused}: this system refuses it; see "
            f"docs/code-reward.md"
        )
    return lines
