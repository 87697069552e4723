"""Files that weft writes.

Links are followed; a pipe, a device or a folder is refused, so none is replaced by a file.

write(path, "text")                           # whole or not at all: another name, flushed to the disk, renamed
with replacing(path) as partial: ...          # the same where a library fills the file `partial`
with opened(path, "ab") as file: ...          # to append to a file or to change a part of it
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from weft.errors import UserError
from weft.reading import refuse_url

TEMPORARY = ".tmp"


def destination(path: Path) -> Path:
    """Return the path of the file to write: `path`, or the file that a link of this name leads to.

    Raises `UserError` for a URL and for anything but a regular file or a new name, and `OSError`
    for a link that leads to itself.
    """
    refuse_url(path, str(path))
    try:
        found = os.stat(path)
    except FileNotFoundError:
        found = None
    if found is not None and not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
        raise UserError(
            f"{path}: is {kind}, and weft writes files; name a file, or one that does not exist yet"
        )
    if not os.path.islink(path):
        return Path(path)
    real = Path(os.path.realpath(path))
    if found is not None and not (real.exists() and os.path.samestat(found, real.stat())):
        raise UserError(
            f"{path}: leads to an open file that has no name; name a file, or one that does not "
            f"exist yet"
        )
    return real


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield an empty file to fill, which takes the place of `path` at the end of the block.

    If the block fails, the file is removed and `path` stays as it was. A file that is replaced
    keeps its permissions.
    """
    target = destination(path)
    # several processes may write one file at once, as the ranks of a role do
    own = secrets.token_hex(4)
    partial = target.with_name(f".{target.name}.{own}{TEMPORARY}")
    try:
        partial.touch(exist_ok=False)
        mode = stat.S_IMODE((target if target.exists() else partial).stat().st_mode)
        yield partial
        partial.chmod(mode)  # a library may have made a file that only its owner reads
        sync(partial)
        rename(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write(path: Path, content: str | bytes, *, errors: str = "strict") -> Path:
    """Write a file that nobody sees half-written, and return `path`; text is written as UTF-8."""
    with replacing(path) as partial:
        partial.write_bytes(
            content if isinstance(content, bytes) else content.encode("utf-8", errors)
        )
    return path


def opened(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Open a file to append to it or to change a part of it; `mode` and `options` are those of
    `open`.
    """
    return destination(path).open(mode, **options)


def rename(source: Path, target: Path) -> None:
    """Give a complete file or folder its name, and flush the entry of the folder."""
    os.replace(source, target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Flush one file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
