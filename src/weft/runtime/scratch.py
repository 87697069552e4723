"""Folders for what a process needs while it lives, under the system's own for such things; what
dead ones left is removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

PREFIX = "weft-"
LOCK = "owner.lock"


class Scratch:
    """A folder `weft-PID-...` of this process.

    The system lets go of its lock when the process ends, however it ends.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        lock = self.path / f"{LOCK}.tmp"
        self._file = lock.open("w", encoding="utf-8")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        lock.rename(self.path / LOCK)  # nobody sees it without its lock

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._file.close()


def remove_leftovers() -> list[Path]:
    """Remove the folders of this user's processes that were killed; these."""
    gone = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        held = _abandoned(folder)
        if held is not None:
            shutil.rmtree(folder, ignore_errors=True)
            held.close()
            gone.append(folder)
    return gone


def _abandoned(folder: Path) -> IO[str] | None:
    """The lock of a folder that nobody else holds, taken; None for another user's, and for one in
    use or being made.
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
