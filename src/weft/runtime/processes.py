"""Descendant processes of this one, read from /proc (empty on other systems than Linux)."""

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
class Process:
    """Process id with its start time, which tells reused ids apart."""

    pid: int
    began: int


def descendants() -> set[Process]:
    """Return the children of this process, their children, and so on."""
    children: dict[int, list[Process]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        found = _look(int(folder.name))
        if found is not None:
            parent, process = found
            children.setdefault(parent, []).append(process)
    below = set()
    todo = [os.getpid()]
    while todo:
        new = children.get(todo.pop(), [])
        below |= set(new)
        todo += [process.pid for process in new]
    return below


def kill(processes: Iterable[Process]) -> None:
    """Send SIGKILL to the processes that still exist."""
    for process in processes:
        found = _look(process.pid)
        if found is not None and found[1] == process:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _prctl(1, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process."""
    _prctl(36, 1)


def _prctl(what: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(what, value, 0, 0, 0)


def _look(pid: int) -> tuple[int, Process] | None:
    """Return (parent's pid, process), or None if the process does not exist."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(words[1]), Process(pid, int(words[19]))
