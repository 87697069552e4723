"""Where rows come from: JSON, JSONL(.gz) and Parquet files, directories of them, and the hub. Rows know their line."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import huggingface_hub
import pyarrow
import pyarrow.parquet

from weft.data import hub
from weft.errors import DataError, nearest

SUFFIXES = (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".parquet")
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval"),
    "test": ("test", "testing"),
}
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w./-]+)?")


@dataclass(frozen=True)
class Place:
    """Where a row stands; written `FILE:LINE` (in Parquet the row's number)."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Unreadable:
    """A line that is no row, and why."""

    wrong: str


def find_files(path: str, split: str | None = None) -> list[Path]:
    """The data files at `path`, sorted: itself, those in a directory, or those of a hub dataset (`owner/name[:folder]`).

    `split` keeps the files of that split by their names; without it, files named after a split other than train are left
    out where some are named train. Raises `DataError` where there is nothing to read.
    """
    place = Path(path).expanduser()
    if place.is_file():
        if not place.name.endswith(SUFFIXES):
            raise DataError(f"{path}: weft reads {', '.join(SUFFIXES)}; convert the file to one of them")
        return [place]
    if not place.exists():
        place = _from_hub(path)
    files = sorted(f for f in place.rglob("*") if f.name.endswith(SUFFIXES) and not _hidden(f.relative_to(place)))
    if not files:
        raise DataError(f"{path}: no data files in it; weft reads {', '.join(SUFFIXES)}")
    kept = (
        [f for f in files if _split_of(f.relative_to(place)) == _split_name(split)]
        if split
        else _default_split(place, files)
    )
    if not kept:
        found = sorted({name for f in files if (name := _split_of(f.relative_to(place)))})
        raise DataError(f"{path}: no files of the split {split!r}; it has {', '.join(found) or 'no named splits'}")
    return kept


def read_rows(file: Path, *, texts_as: str | None = None) -> Iterator[tuple[Place, Mapping[str, Any] | Unreadable]]:
    """Every row of a file with its place; what cannot be read comes as `Unreadable`.

    `texts_as`: a row that is a text alone is a row with that column.

    Raises `DataError` where the file as a whole is empty or of another kind than its name says.
    """
    if file.stat().st_size == 0:
        raise DataError(f"{file}: the file is empty")
    if file.name.endswith(".parquet"):
        rows = _parquet_rows(file)
    else:
        rows = _text_rows(file)
    count = 0
    for line, value in rows:
        count += 1
        if texts_as is not None and isinstance(value, str):
            value = {texts_as: value}
        if not isinstance(value, Mapping | Unreadable):
            value = Unreadable(f"a row must be a JSON object, not {type(value).__name__}")
        yield Place(str(file), line), value
    if count == 0:
        raise DataError(f"{file}: the file has no rows")


def content_hash(files: list[Path]) -> str:
    """sha256 over the bytes of the files, in order."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            for block in iter(lambda: stream.read(1 << 20), b""):
                digest.update(block)
        digest.update(b"\0weft: next file\0")
    return digest.hexdigest()


def _text_rows(file: Path) -> Iterator[tuple[int, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as stream:
        try:
            begins = _first_character(stream)
            if begins == "[":
                yield from _list_rows(stream.read())
            else:
                yield from _line_rows(stream)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
            ) from error
        except (gzip.BadGzipFile, EOFError) as error:
            raise DataError(f"{file}: the gzip data are damaged or cut short ({error})") from error


def _first_character(stream: IO[str]) -> str:
    """The first character that is no white space; the stream is left where it was. A BOM counts as white space."""
    found = " "
    while found and (found.isspace() or found == "\ufeff"):
        found = stream.read(1)
    stream.seek(0)
    return found


def _line_rows(stream: IO[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(stream, 1):
        line = line.strip().lstrip("\ufeff")
        if not line:
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            yield number, Unreadable(f"not JSON: {error.msg} at column {error.colno}")


def _list_rows(text: str) -> Iterator[tuple[int, Any]]:
    """The entries of a JSON list, each with the line it begins on."""
    decoder = json.JSONDecoder()
    at = text.index("[") + 1
    line, counted = 1, 0
    blank = re.compile(r"[\s,]*")
    while True:
        skipped = blank.match(text, at)
        at = skipped.end() if skipped else at
        line, counted = line + text.count("\n", counted, at), at
        if at >= len(text):
            yield line, Unreadable("not JSON: the list is not closed with ]")
            return
        if text[at] == "]":
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            yield error.lineno, Unreadable(f"not JSON: {error.msg} at column {error.colno}; what follows was not read")
            return
        yield line, value


def _parquet_rows(file: Path) -> Iterator[tuple[int, Any]]:
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{file}: not Parquet, or damaged ({str(error).splitlines()[0]})") from error


def _from_hub(path: str) -> Path:
    """A local copy of a hub dataset's data files. Raises `DataError` where there is none or the hub cannot be reached."""
    local = path.startswith((".", "/", "~")) or path.endswith(SUFFIXES) or not HUB_NAME.fullmatch(path)
    if local:
        parent = Path(path).expanduser().parent
        siblings = [p.name for p in parent.iterdir()] if parent.is_dir() else []
        close = nearest(Path(path).name, siblings, 1)
        hint = f"did you mean {parent / close[0]}?" if close else "check the spelling"
        raise DataError(f"{path}: there is no such file or directory; {hint}")
    name, _, folder = path.partition(":")
    patterns = [f"{folder}/**{suffix}" if folder else f"*{suffix}" for suffix in SUFFIXES]
    check_at_hand(path)
    try:
        copy = Path(huggingface_hub.snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except hub.FAILURES as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{path}: there is no such file or directory, and no dataset of this name could be fetched from the hub ({reason})"
        ) from error
    return copy / folder if folder else copy


def check_at_hand(path: str, option: str = "") -> None:
    """That a path is on this machine, or a dataset that the cache or the hub has. Raises `DataError`; other paths are not
    looked at."""
    if not Path(path).expanduser().exists() and HUB_NAME.fullmatch(path):
        hub.check_dataset(option, path.partition(":")[0], "check the spelling")


def _hidden(file: Path) -> bool:
    return any(part.startswith(".") for part in file.parts)


def _split_of(file: Path) -> str | None:
    """The split that a file's name or folder names: `data/train-00000-of-00002.parquet` -> train."""
    words = re.split(r"[^a-z0-9]+", str(file).lower())
    return next((name for name, spellings in SPLITS.items() if any(word in spellings for word in words)), None)


def _split_name(split: str) -> str:
    return next((name for name, spellings in SPLITS.items() if split.lower() in spellings), split.lower())


def _default_split(place: Path, files: list[Path]) -> list[Path]:
    named = {f: _split_of(f.relative_to(place)) for f in files}
    return [f for f in files if named[f] == "train"] if "train" in named.values() else files
