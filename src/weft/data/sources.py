"""Reading of rows from JSON, JSONL(.gz), Parquet and Arrow files, directories, and the hub.

Every row comes with its file and line number. Rows of Parquet and Arrow files are read without the
null keys that these formats add to structs: Arrow gives every struct the union of the keys of all
rows, so that an added null cannot be distinguished from one in the original data. Every struct key
whose value is null is removed. Nulls in top-level columns, list entries and map values are kept,
since Arrow never adds those.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import huggingface_hub

from weft.data import hub
from weft.errors import DataError, find_nearest
from weft.reading import check_file, describe_cause, explain_read_errors, iterate_files, refuse_url
from weft.storage.buckets import is_remote
from weft.storage.copies import copy_data

if TYPE_CHECKING:
    import pyarrow


PARQUET = ".parquet"
ARROW = ".arrow"
BATCH = 1024  # number of rows of a Parquet file in memory at once
MAGIC = b"ARROW1"  # first bytes of the Arrow file format; other files use the stream format

Restore = Callable[[Any], Any]


def read_file(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number, row) for each row of a Parquet or Arrow file.

    Row numbers begin at 1. Raises `DataError` if the file cannot be parsed.
    """
    batches, form = (
        (_read_parquet, "Parquet") if file.name.endswith(PARQUET) else (_read_arrow, "Arrow")
    )
    number = 0
    with explain_read_errors(f"{file}: not {form}, or damaged", DataError):
        for batch in batches(file):
            restored = {
                field.name: restore
                for field in batch.schema
                if (restore := _build_restorer(field.type)) is not None
            }
            for row in batch.to_pylist():
                for name, restore in restored.items():
                    row[name] = restore(row[name])
                number += 1
                yield number, row


def _read_parquet(file: Path) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow.parquet  # takes 0.25 s, so imported only for Parquet files

    yield from pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=BATCH)


def _read_arrow(file: Path) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow.ipc

    with file.open("rb") as stream:
        begins = stream.read(len(MAGIC))
        stream.seek(0)
        if begins == MAGIC:
            reader = pyarrow.ipc.open_file(stream)
            yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            yield from pyarrow.ipc.open_stream(stream)


def _build_restorer(kind: pyarrow.DataType) -> Restore | None:
    """Return a function that restores the original Python form of values of the Arrow type `kind`.

    In structs, the function removes keys with the value None, which Arrow adds to give all structs
    the same keys. It converts maps from lists of pairs to dicts. Returns None if the type contains
    neither structs nor maps, because its values then need no change.
    """
    import pyarrow
    from pyarrow import types

    if isinstance(kind, pyarrow.BaseExtensionType):
        return _build_restorer(kind.storage_type)
    if types.is_struct(kind):
        inner = {}
        for index in range(kind.num_fields):
            inner[kind.field(index).name] = _build_restorer(kind.field(index).type)
        return lambda value: None if value is None else _restore_struct(value, inner)
    if types.is_map(kind):
        of_items = _build_restorer(kind.item_type)
        return lambda value: (
            None if value is None else {key: _restore_each(item, of_items) for key, item in value}
        )
    is_list = (
        types.is_list,
        types.is_large_list,
        types.is_fixed_size_list,
        types.is_list_view,
        types.is_large_list_view,
    )
    if any(check(kind) for check in is_list):
        of_entries = _build_restorer(kind.value_type)
        if of_entries is None:
            return None
        return lambda value: None if value is None else [of_entries(entry) for entry in value]
    return None


def _restore_struct(value: dict[str, Any], inner: dict[str, Restore | None]) -> dict[str, Any]:
    struct: dict[str, Any] = {}
    for key, item in value.items():
        if item is not None:
            struct[key] = _restore_each(item, inner[key])
    return struct


def _restore_each(value: Any, restore: Restore | None) -> Any:
    return value if restore is None else restore(value)


SUFFIXES = (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", PARQUET, ARROW)
ORIGIN = "weft: made of"  # key of a converted row with the place of the original row
# Files without rows, which the library `datasets` saves with its Arrow files.
SIDECARS = ("dataset_info.json", "state.json", "dataset_dict.json")
CACHED = "cache-"  # prefix of the cache files that `datasets` saves in the same folder
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval"),
    "test": ("test", "testing"),
}
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w./-]+)?", re.ASCII)


@dataclass(frozen=True)
class RowLocation:
    """Location of a row, written as `FILE:LINE`.

    In Parquet and Arrow files, `line` is the row number. If the location concerns several rows of a
    file, `line` is 0, and the location is written as `FILE`.
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class UnreadableRow:
    """Line of a file that cannot be read as a row. `reason` says why."""

    reason: str


def find_files(path: str, split: str | None = None) -> list[Path]:
    """Return the data files at `path`, sorted by name.

    `path` is a file, a directory, a hub dataset (`owner/name[:folder]`), or the URL of a file or
    folder in a bucket, which is copied to this machine. `split` selects the
    files whose path names that split. By default, the files of the split "train" are selected, or
    all files if there are none. Raises `DataError` if there is nothing to read.
    """
    if is_remote(path):
        path = str(copy_data(path, SUFFIXES))
    refuse_url(path, path, DataError)
    place = Path(path).expanduser()
    if place.is_file():
        if not place.name.endswith(SUFFIXES):
            raise DataError(
                f"{path}: weft reads {', '.join(SUFFIXES)}; convert the file to one of them"
            )
        return [place]
    # List the data files in a directory or a copy from the hub.
    if not place.exists():
        place = _download_from_hub(path)
    if not place.is_dir():
        check_file(place, path, DataError)
    files = []
    for f in iterate_files(place, path, DataError):
        is_hidden = any(part.startswith(".") for part in f.relative_to(place).parts)
        if f.name.endswith(SUFFIXES) and f.exists() and not is_hidden:
            files.append(f)
    files.sort()
    if any(f.name.endswith(ARROW) for f in files):
        files = [f for f in files if f.name not in SIDECARS and not f.name.startswith(CACHED)]
    if not files:
        raise DataError(f"{path}: no data files in it; weft reads {', '.join(SUFFIXES)}")
    # Select the files of the split.
    splits = {f: _find_split(f.relative_to(place)) for f in files}
    if split:
        low = split.lower()
        canonical = next((name for name, spellings in SPLITS.items() if low in spellings), low)
        selected = [f for f in files if splits[f] == canonical]
    elif "train" in splits.values():
        selected = [f for f in files if splits[f] == "train"]
    else:
        selected = files
    if not selected:
        split_names = sorted({name for name in splits.values() if name})
        raise DataError(
            f"{path}: no files of the split {split!r}; it has "
            f"{', '.join(split_names) or 'no named splits'}"
        )
    for file in selected:
        check_file(file, str(file), DataError)
    return selected


def read_rows(
    file: Path, *, texts_as: str | None = None
) -> Iterator[tuple[RowLocation, Mapping[str, Any] | UnreadableRow]]:
    """Yield (location, row) for each row of a file.

    A line that is not a row gives an `UnreadableRow`. A row that was converted from another file
    can have its original location under the key `ORIGIN`; if so, the original location is yielded.
    With `texts_as`, a JSON string counts as a row whose only column is `texts_as`.

    Raises `DataError` if the file is empty, or if its format does not match its suffix.
    """
    check_file(file, str(file), DataError)
    if file.stat().st_size == 0:
        raise DataError(f"{file}: the file is empty")
    of_arrow = file.name.endswith((PARQUET, ARROW))
    if of_arrow:
        rows: Iterator[tuple[int, Any]] = read_file(file)
    else:
        rows = _read_text_rows(file)
    count = 0
    for line, value in rows:
        count += 1
        if texts_as is not None and isinstance(value, str):
            value = {texts_as: value}
        if not isinstance(value, Mapping | UnreadableRow):
            value = UnreadableRow(f"a row must be a JSON object, not {type(value).__name__}")
        origin = value.pop(ORIGIN, None) if isinstance(value, dict) else None
        yield RowLocation(str(file), line) if origin is None else RowLocation(*origin), value
    if count == 0:
        raise DataError(f"{file}: the file has no rows")


def hash_content(files: list[Path]) -> str:
    """Return the sha256 of the contents of the files, in order."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            for block in iter(lambda: stream.read(1 << 20), b""):
                digest.update(block)
        digest.update(b"\0weft: next file\0")
    return digest.hexdigest()


def _read_text_rows(file: Path) -> Iterator[tuple[int, Any]]:
    with explain_read_errors(str(file), DataError), _open_text(file) as stream:
        if _peek_character(stream) == "[":
            yield from _parse_list_rows(stream.read())
        else:
            yield from _read_line_rows(stream)


def _open_text(file: Path) -> IO[str]:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8")
    return file.open(encoding="utf-8")


def _peek_character(stream: IO[str]) -> str:
    """Return the first character that is not white space, without advancing the stream.

    A byte order mark counts as white space.
    """
    character = " "
    while character and (character.isspace() or character == "\ufeff"):
        character = stream.read(1)
    stream.seek(0)
    return character


def _read_line_rows(stream: IO[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(stream, 1):
        line = line.strip().lstrip("\ufeff")
        if not line:
            continue
        yield number, parse_line(line)


def parse_line(line: str) -> Any:
    """Parse a line as JSON. Returns an `UnreadableRow` with the reason if that fails."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        return UnreadableRow(f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return UnreadableRow(describe_cause(error))
    return _check_surrogates(value) if "\\ud" in line or "\\uD" in line else value


def _check_surrogates(value: Any) -> Any:
    """Return the value, or an `UnreadableRow` if it contains half of a surrogate pair.

    Such a half is not a valid character. It appears if a text was cut in the middle of an emoji.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        return UnreadableRow(
            f"contains half of a character (\\u{ord(half):04x}): a text was cut inside a surrogate "
            f"pair"
        )
    except RecursionError as error:
        return UnreadableRow(describe_cause(error))
    return value


def _parse_list_rows(text: str) -> Iterator[tuple[int, Any]]:
    """Yield (line, entry) for each entry of a JSON list.

    `line` is the number of the line on which the entry begins.
    """
    decoder = json.JSONDecoder()
    position = text.index("[") + 1
    line = 1
    counted = 0
    blank = re.compile(r"\s*")
    halves = "\\ud" in text or "\\uD" in text
    first = True
    while True:
        # Skip the comma after the previous entry.
        position = _skip_blank(blank, text, position)
        if not first and text.startswith(",", position):
            position = _skip_blank(blank, text, position + 1)
        elif not first and position < len(text) and text[position] != "]":
            yield (
                line + text.count("\n", counted, position),
                UnreadableRow("not JSON: a comma is missing before this entry"),
            )
            return
        first = False
        # Check for the end of the list.
        line = line + text.count("\n", counted, position)
        counted = position
        if position >= len(text):
            yield line, UnreadableRow("not JSON: the list is not closed with ]")
            return
        if text[position] == "]":
            if text[position + 1 :].strip():
                yield (
                    line,
                    UnreadableRow("not JSON: there is text after the list, which was not read"),
                )
            return
        # Parse the entry.
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            yield (
                error.lineno,
                UnreadableRow(
                    f"not JSON: {error.msg} at column {error.colno}; what follows was not read"
                ),
            )
            return
        except (ValueError, RecursionError) as error:
            yield line, UnreadableRow(f"{describe_cause(error)}; what follows was not read")
            return
        yield line, _check_surrogates(value) if halves else value


def _skip_blank(blank: re.Pattern[str], text: str, position: int) -> int:
    skipped = blank.match(text, position)
    return skipped.end() if skipped else position


def _download_from_hub(path: str) -> Path:
    """Download the data files of a hub dataset and return the local folder.

    Raises `DataError` if the dataset does not exist or the hub cannot be reached.
    """
    local = (
        path.startswith((".", "/", "~")) or path.endswith(SUFFIXES) or not HUB_NAME.fullmatch(path)
    )
    if local:
        parent = Path(path).expanduser().parent
        siblings = [p.name for p in parent.iterdir()] if parent.is_dir() else []
        close = find_nearest(Path(path).name, siblings, 1)
        if close:
            hint = f"did you mean {parent / close[0]}?"
        else:
            hint = "check the spelling"
        raise DataError(f"{path}: there is no such file or directory; {hint}")
    name, _, folder = path.partition(":")
    patterns = [f"{folder}/**{suffix}" if folder else f"*{suffix}" for suffix in SUFFIXES]
    check_available(path)
    try:
        copy = Path(
            huggingface_hub.snapshot_download(name, repo_type="dataset", allow_patterns=patterns)
        )
    except hub.FAILURES as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{path}: there is no such file or directory, and no dataset of this name could be "
            f"fetched from the hub ({reason})"
        ) from error
    return copy / folder if folder else copy


def check_available(path: str, option: str = "") -> None:
    """Raise `DataError` if a hub dataset is neither in the cache nor on the hub.

    `option` is the option that the user set, for the error message. Existing local paths, and names
    that cannot be hub datasets, are not checked.
    """
    if not Path(path).expanduser().exists() and HUB_NAME.fullmatch(path):
        hub.check_dataset(option, path, "check the spelling")


def _find_split(file: Path) -> str | None:
    """Return the split that is named in a file's path, or None if no split is named.

    For example, `data/train-00000-of-00002.parquet` belongs to train.
    """
    words = re.split(r"[^a-z0-9]+", str(file).lower())
    return next(
        (name for name, spellings in SPLITS.items() if any(word in spellings for word in words)),
        None,
    )
