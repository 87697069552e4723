"""Files that are either there whole or not at all: written under a temporary name, flushed to the
disk, renamed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weft import writing
from weft.errors import RunError
from weft.writing import TEMPORARY, rename, sync

REPLACED = ".old"
CHUNK = 1 << 20
ENDING_SECONDS = 5.0


def sync_tree(directory: Path) -> None:
    """Flush every file and directory below `directory`, and itself."""
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))


def write_text(path: Path, text: str) -> None:
    """Write a file that is never seen half-written. A full disk is a `RunError` that says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with told(f"{path} was not written"):
        writing.write(path, text)


def write_directory(target: Path, fill: Callable[[Path], None]) -> Path:
    """Make the directory `target` by calling `fill` on an empty one under a temporary name.

    A directory of that name gives way only once the new one is whole. Where anything fails, the
    temporary one is removed and what was there before stays; a full disk is a `RunError` that says
    so.
    """
    temporary = target.with_name(target.name + TEMPORARY)
    remove(temporary)
    try:
        with told(f"{target} was not saved; what was saved before it is whole"):
            temporary.mkdir(parents=True)
            fill(temporary)
            sync_tree(temporary)
    except BaseException:
        # Where one device died, others may still write into it: that must not hide what went wrong.
        # `mend` removes the rest.
        with suppress(OSError):
            remove(temporary)
        raise
    replaced = target.with_name(target.name + REPLACED)
    if target.exists():
        rename(target, replaced)
    rename(temporary, target)
    remove(replaced)
    return target


def mend(folder: Path) -> None:
    """Remove what a killed process left: temporary directories, and replaced ones (put back where
    nothing replaced them).
    """
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.name.endswith(TEMPORARY):
            remove(path)
        elif path.name.endswith(REPLACED):
            successor = path.with_name(path.name.removesuffix(REPLACED))
            if successor.exists():
                remove(path)
            else:
                rename(path, successor)


def remove(path: Path) -> None:
    """Remove a file or a directory; nothing happens where there is none.

    A process that is being ended may still write into a directory or rename what is in it while it
    is removed: that is tried again for up to `ENDING_SECONDS`.
    """
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    deadline = time.monotonic() + ENDING_SECONDS
    while path.is_dir():
        try:
            shutil.rmtree(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def checksums(directory: Path) -> dict[str, str]:
    """Relative path -> BLAKE2b of the content, for every file below `directory`."""
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    return {str(p.relative_to(directory)): checksum(p) for p in files}


def checksum(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def told(consequence: str) -> Iterator[None]:
    """Turn an error of the operating system into a `RunError` that says what it means for the run."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full:
            reason = "the disk is full"
        else:
            reason = f"{error.strerror or error} ({error.filename or 'no file named'})"
        if full:
            fix = "; make room and start the run again, it goes on from there"
        else:
            fix = ""
        raise RunError(f"{consequence}: {reason}{fix}") from error
