"""Descendants of this process, which are found in /proc.

None are found on systems other than Linux.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessId:
    """Identity of a process: its pid and its start time in clock ticks since boot.

    The start time distinguishes processes that use the same pid one after another.
    """

    pid: int
    start_time: int


def find_descendants() -> set[ProcessId]:
    """Return the children of this process, their children, and so on."""
    children: dict[int, list[ProcessId]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        entry = _read_process(int(folder.name))
        if entry is not None:
            parent, process = entry
            children.setdefault(parent, []).append(process)
    below = set()
    todo = [os.getpid()]
    while todo:
        new = children.get(todo.pop(), [])
        below |= set(new)
        todo += [process.pid for process in new]
    return below


def kill_processes(processes: Iterable[ProcessId]) -> None:
    """Send SIGKILL to those of the processes that still exist."""
    for process in processes:
        entry = _read_process(process.pid)
        if entry is not None and entry[1] == process:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent process ends (Linux only)."""
    _call_prctl(1, signal.SIGKILL)


def adopt_orphans() -> None:
    """Let the kernel make this process the new parent of orphaned descendants (Linux only).

    A descendant becomes an orphan when its own parent process ends.
    """
    _call_prctl(36, 1)


def _call_prctl(what: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(what, value, 0, 0, 0)


def _read_process(pid: int) -> tuple[int, ProcessId] | None:
    """Return the parent's pid and the `ProcessId` of a process, or None if it does not exist."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(words[1]), ProcessId(pid, int(words[19]))
