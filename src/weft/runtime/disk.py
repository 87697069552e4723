"""Atomic writing of files and directories.

They are written under a temporary name, flushed to disk and then renamed.
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
    """Flush `directory` and every file and directory below it to disk."""
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically. Raises `RunError` if the disk is full or fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with explain_disk_errors(f"{path} was not written"):
        writing.write(path, text)


def write_directory(target: Path, fill: Callable[[Path], None]) -> Path:
    """Create the directory `target` atomically; `fill` writes its contents.

    `fill` receives the path of an empty directory with a temporary name. An existing `target` is
    replaced once the new directory is complete. If anything fails, the temporary directory is
    removed and the old `target` remains. Raises `RunError` if the disk is full or fails.
    """
    temporary = target.with_name(target.name + TEMPORARY)
    remove(temporary)
    try:
        with explain_disk_errors(f"{target} was not saved; what was saved before it is intact"):
            temporary.mkdir(parents=True)
            fill(temporary)
            sync_tree(temporary)
    except BaseException:
        # If one device died, others may still be writing into it. An error here must not hide the
        # first one; `clean_up` removes the rest.
        with suppress(OSError):
            remove(temporary)
        raise
    replaced = target.with_name(target.name + REPLACED)
    if target.exists():
        rename(target, replaced)
    rename(temporary, target)
    remove(replaced)
    return target


def clean_up(folder: Path) -> None:
    """Remove what a killed process left behind while it was writing in `folder`.

    Temporary directories are removed, and so are old versions of directories that were replaced. If
    the replacement is missing, the old version is restored instead.
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
    """Remove a file or a directory, if it exists.

    The removal is retried for up to `ENDING_SECONDS` seconds, because a process that is being
    killed may still write into the directory.
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


def compute_checksums(directory: Path) -> dict[str, str]:
    """Return the BLAKE2b hash of every file below `directory`, keyed by relative path."""
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    return {str(p.relative_to(directory)): compute_checksum(p) for p in files}


def compute_checksum(path: Path) -> str:
    """Return the BLAKE2b hash of a file."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def explain_disk_errors(consequence: str) -> Iterator[None]:
    """Convert an `OSError` in the block into a `RunError` that begins with `consequence`.

    `consequence` says what the error means for the run, such as "the file was not written".
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full:
            reason = "the disk is full"
        else:
            reason = f"{error.strerror or error} ({error.filename or 'no file named'})"
        if full:
            fix = "; free some space and start the run again: it resumes from there"
        else:
            fix = ""
        raise RunError(f"{consequence}: {reason}{fix}") from error
