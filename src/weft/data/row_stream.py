"""Sequential reading of the rows of JSONL files, in blocks and from any position.

The files are on this machine, in a bucket (`gs://B/x.jsonl`) or on the hub (`owner/name[:folder]`).
A position is a file and a byte offset in it. After a restart, reading continues at the saved
position, without reading the earlier rows again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.data.sources import HUB_NAME, UnreadableRow, parse_line
from weft.errors import DataError
from weft.reading import explain_read_errors, iterate_files
from weft.storage.buckets import BucketFolder, explain_store_errors, is_remote

SUFFIXES = (".jsonl", ".ndjson")
BLOCK_BYTES = 1 << 20  # number of bytes read at once
MAX_LINE_BYTES = 1 << 28  # maximum length of a line
CHECKED_BYTES = 1 << 10  # bytes before a position that must be unchanged when it is restored


@dataclass(frozen=True)
class StreamPosition:
    """Position in a stream of rows.

    Attributes:
        file: Index of the current file, with files sorted by name.
        offset: Number of bytes read from this file.
        line: Number of lines read from this file.
        rounds: Number of completed passes over all files.
    """

    file: int = 0
    offset: int = 0
    line: int = 0
    rounds: int = 0


class RowStream:
    """Endless stream of the rows of JSONL files. After the last row, the first one follows.

    `path` is a file or folder on this machine or in a bucket, or the name of a hub dataset. Raises
    `DataError` if there are no JSONL files.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._bucket: BucketFolder | None = None
        if is_remote(path):
            self._bucket = BucketFolder.open(path, path, DataError)
        elif not Path(path).expanduser().exists() and HUB_NAME.fullmatch(path):
            self._bucket = _open_hub(path)
        self._sizes: dict[str, int] = {}  # size in bytes of each file in a bucket
        self._names = self._list_names()
        self._block = b""  # bytes that were read in advance
        self._block_start = (0, 0)  # file index and offset of the first byte in `_block`
        self.position = StreamPosition()

    def read_next(self) -> tuple[str, Any]:
        """Return (location, row) of the next row, and advance past it.

        For a line that is not JSON, the row is an `UnreadableRow`. Blank lines are skipped. Raises
        `DataError` if a file cannot be read, or if no file has a row.
        """
        first_position = self.position
        while True:
            position = self.position
            line, length = self._read_line(position)
            if length == 0:
                following = StreamPosition(position.file + 1, rounds=position.rounds)
                if following.file == len(self._names):
                    following = StreamPosition(rounds=position.rounds + 1)
                self.position = following
                if position.rounds > first_position.rounds and position.file >= first_position.file:
                    raise DataError(f"{self.path}: the files have no rows")
                continue
            self.position = StreamPosition(
                position.file, position.offset + length, position.line + 1, position.rounds
            )
            place = f"{self._get_label(position.file)}:{position.line + 1}"
            try:
                text = line.decode().strip().lstrip("\ufeff")
            except UnicodeDecodeError as error:
                return place, UnreadableRow(f"is not UTF-8 text ({error.reason})")
            if text:
                return place, parse_line(text)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and a hash of the bytes before it, as JSON values."""
        position = self.position
        values = {
            "file": position.file,
            "offset": position.offset,
            "line": position.line,
            "rounds": position.rounds,
        }
        return {**values, "files": len(self._names), "before": self._hash_before(position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position that `state_dict` returned.

        Raises `DataError` if the files have changed since the position was saved.
        """
        position = StreamPosition(state["file"], state["offset"], state["line"], state["rounds"])
        if len(self._names) != state["files"] or self._hash_before(position) != state["before"]:
            raise DataError(
                f"{self.path}: has changed since the recovery point was written; restore the data, "
                f"or start another run"
            )
        self.position = position
        self._block = b""

    # -- files

    def _read_line(self, position: StreamPosition) -> tuple[bytes, int]:
        """Return (line, number of bytes) at a position; the number is 0 at the end of a file."""
        # Use the bytes that were read in advance, if they include the position.
        file, start = self._block_start
        skipped = position.offset - start
        content = b""
        if file == position.file and 0 <= skipped <= len(self._block):
            content = self._block[skipped:]
        # Read blocks until the end of the line.
        searched = 0
        while (end := content.find(b"\n", searched)) < 0:
            searched = len(content)
            block = self._read(position.file, position.offset + len(content), BLOCK_BYTES)
            content += block
            if not block:
                end = len(content) - 1
                break
            if len(content) > MAX_LINE_BYTES:
                raise DataError(
                    f"{self._get_label(position.file)}:{position.line + 1}: has more than "
                    f"{MAX_LINE_BYTES:,} bytes"
                )
        self._block = content
        self._block_start = (position.file, position.offset)
        return content[: end + 1], end + 1

    def _hash_before(self, position: StreamPosition) -> str:
        start = max(0, position.offset - CHECKED_BYTES)
        before = b""
        if position.offset:
            before = self._read(position.file, start, position.offset - start)
        return hashlib.blake2b(before, digest_size=16).hexdigest()

    def _read(self, file: int, start: int, count: int) -> bytes:
        name = self._names[file]
        if self._bucket is not None:
            size = self._sizes[name]
            if start >= size:
                return b""
            with explain_store_errors(self._get_label(file), DataError):
                return self._bucket.read_range(name, start, min(start + count, size))
        with explain_read_errors(name, DataError), Path(name).open("rb") as stream:
            stream.seek(start)
            return stream.read(count)

    def _list_names(self) -> list[str]:
        if self._bucket is not None:
            with explain_store_errors(self.path, DataError):
                stamps = self._bucket.list_files()
            self._sizes = {name: stamp.size for name, stamp in stamps.items()}
            names = sorted(name for name in stamps if (name or self.path).endswith(SUFFIXES))
        else:
            place = Path(self.path).expanduser()
            files = [place]
            if place.is_dir():
                files = sorted(iterate_files(place, self.path, DataError))
            names = [str(file) for file in files if file.is_file() and file.name.endswith(SUFFIXES)]
        if not names:
            raise DataError(
                f"{self.path}: there are no files {' or '.join(SUFFIXES)} there, which a stream "
                f"reads"
            )
        return names

    def _get_label(self, file: int) -> str:
        name = self._names[file]
        if self._bucket is None:
            return name
        return f"{self._bucket.url}/{name}" if name else self._bucket.url


def _open_hub(path: str) -> BucketFolder:
    """Return the folder of a hub dataset, given as `owner/name` or `owner/name:folder`."""
    from huggingface_hub import HfFileSystem

    name, _, folder = path.partition(":")
    root = f"datasets/{name}/{folder}".rstrip("/")
    return BucketFolder(f"hf://{root}", HfFileSystem(), root)
