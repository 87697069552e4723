"""Temporary folders of processes, and removal of those that killed processes left behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

PREFIX = "weft-"
LOCK = "owner.lock"


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
        held = _lock_if_abandoned(folder)
        if held is not None:
            shutil.rmtree(folder, ignore_errors=True)
            held.close()
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
