"""Write files safely.

Symbolic links are followed. Pipes, devices and folders are refused, so that they are never replaced
by a file.

    write(path, "text")                       # atomic: temporary file, flush, rename
    with replace_file(path) as partial: ...   # likewise, for a library that writes to `partial`
    with open_file(path, "ab") as file: ...   # append to a file or change a part of it
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


def resolve_destination(path: Path) -> Path:
    """Return the path of the file to write: `path`, or its target if it is a symbolic link.

    Raises `UserError` for a URL or an existing path that is not a regular file, and `OSError` for a
    link to itself.
    """
    refuse_url(path, str(path))
    try:
        status = os.stat(path)
    except FileNotFoundError:
        status = None
    if status is not None and not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise UserError(
            f"{path}: is {kind}, and weft writes files; name a file, or one that does not exist yet"
        )
    if not os.path.islink(path):
        return Path(path)
    real = Path(os.path.realpath(path))
    if status is not None and not (real.exists() and os.path.samestat(status, real.stat())):
        raise UserError(
            f"{path}: leads to an open file without a name; name a file, or one that does not "
            f"exist yet"
        )
    return real


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield an empty temporary file that replaces `path` at the end of the context.

    If the body fails, the temporary file is removed and `path` is unchanged. If `path` exists, the
    new file gets the permissions of the old one.
    """
    target = resolve_destination(path)
    # several processes can write the same file at once, such as the ranks of a role
    own = secrets.token_hex(4)
    partial = target.with_name(f".{target.name}.{own}{TEMPORARY}")
    try:
        partial.touch(exist_ok=False)
        mode = stat.S_IMODE((target if target.exists() else partial).stat().st_mode)
        yield partial
        partial.chmod(mode)  # a library can have created the file readable only by its owner
        sync(partial)
        rename(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write(path: Path, content: str | bytes, *, errors: str = "strict") -> Path:
    """Write a file atomically and return `path`; text is encoded as UTF-8."""
    with replace_file(path) as partial:
        partial.write_bytes(
            content if isinstance(content, bytes) else content.encode("utf-8", errors)
        )
    return path


def open_file(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Open a file to append to it or to change a part of it in place.

    The path is resolved by `resolve_destination`; `mode` and `options` are passed to `open`.
    """
    return resolve_destination(path).open(mode, **options)


def rename(source: Path, target: Path) -> None:
    """Rename a complete file or folder to `target`, and flush the directory entry to disk."""
    os.replace(source, target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Flush one file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
