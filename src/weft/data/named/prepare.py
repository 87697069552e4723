"""Conversion of a named dataset to files of rows for weft's own dataset types.

The files are cached under a hash of everything that they depend on.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TextIO, get_args, get_type_hints

from weft.data.lengths import LengthLimits
from weft.data.messages import track_unread_keys
from weft.data.mixture import hold_out
from weft.data.named.catalogue import CatalogueEntry, find_entry
from weft.data.named.example import TYPES, Example, ReaderContext, to_row
from weft.data.named.fetch import DatasetFiles, format_file_name, locate, read_entry_rows
from weft.data.rows import BadRow, Row
from weft.data.sources import ORIGIN, RowLocation, UnreadableRow, hash_content
from weft.data.spec import SourceSpec
from weft.errors import ConfigError, DataError, find_nearest
from weft.registry import datasets, readers
from weft.writing import rename, resolve_destination, write

VERSION = 3  # increased when the same rows give other examples or another report
# dataset type -> mode in which named datasets are prepared for it
MODE_BY_TYPE = {
    "prompt_answer": "sft",
    "chat": "sft",
    "text": "sft",
    "paired_comparison": "rm",
    "preference": "rm",
    "ranking": "rm",
    "prompt": "rl",
}

Reader = Callable[..., Iterator[Example]]


@dataclass(frozen=True)
class ValidationSplit:
    """Rule for choosing the validation rows of a named dataset.

    If `own` is set and the dataset has a validation split, that split is used. Otherwise, a
    fraction `share` of the training rows is held out. Rows of the same group are held out together.
    """

    share: float = 0.0
    own: bool = True


@dataclass(frozen=True)
class PreparedSource:
    """Source that reads the prepared files of a named dataset, with notes for the user.

    The notes report rows and parts of conversations that were left out.
    """

    source: SourceSpec
    notes: tuple[str, ...] = ()


def find_mode(dataset_type: str) -> str:
    """Return the mode (sft, rm or rl) in which to prepare named datasets for a dataset type.

    Raises `ConfigError` for a type that is not built into weft.
    """
    if dataset_type not in MODE_BY_TYPE:
        raise ConfigError(
            f"dataset.type={dataset_type!r}: named datasets have rows of weft's own types; leave "
            f"dataset.type out, and set "
            "`type` of the sources that are files"
        )
    return MODE_BY_TYPE[dataset_type]


def find_cache_root(cache_dir: str | None) -> Path:
    if cache_dir:
        return Path(cache_dir).expanduser()
    return Path.home() / ".cache" / "weft"


def prepare(
    source: SourceSpec, mode: str, cache: Path, split: ValidationSplit, files: Sequence[str] = ()
) -> PreparedSource:
    """Write the rows of the dataset `source.named` to files, unless they are in the cache.

    Returns the source that reads these files, with notes for the user. `files` are the user's YAML
    files with catalogue entries. Raises `ConfigError` or `DataError` with a message that names the
    dataset and says what to change.
    """
    # Find the entry, its reader, and the files.
    assert source.named is not None
    entry = find_entry(source.named, files)
    if "source_url" in source.args:  # another file in the same format
        entry = replace(entry, repo=None, url=str(source.args["source_url"]))
        source = replace(
            source,
            args={name: value for name, value in source.args.items() if name != "source_url"},
        )
    if mode not in entry.modes:
        raise ConfigError(
            f"{entry.name}: is of no use in mode {mode}; it is for {', '.join(entry.modes)}"
        )
    reader: Reader = readers.get(entry.reader)
    reader_options, type_options = _split_options(entry, reader, source.args, mode)
    dataset_files = locate(entry, source.path or None, cache)
    conversion = _DatasetConversion(entry, reader, reader_options, mode)
    # The folder is hidden, so that it is not read as data if it is inside a folder of copies.
    folder = (
        cache / ".named" / entry.name / f"{mode}-{conversion.compute_digest(dataset_files, split)}"
    )
    # Write the rows, and describe the files as a source.
    report = _read_report(folder) or conversion.write_rows(dataset_files, split, folder)
    if not report["train"]:
        reasons = (
            ", ".join(f"{count:,} {reason}" for reason, count in report["left_out"].items())
            or "the files have none"
        )
        raise DataError(f"{entry.name}: no row is left for mode {mode} ({reasons})")
    valid_path = source.valid_path
    if report["valid"] and valid_path is None:
        valid_path = str(folder / "valid.jsonl")
    prepared = replace(
        source,
        path=str(folder / "train.jsonl"),
        type=report["type"],
        valid_path=valid_path,
        valid_split=0.0,
        split=None,
        args=type_options,
    )
    return PreparedSource(prepared, tuple(_build_notes(entry.name, report)))


def _build_notes(name: str, report: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on left-out rows, omitted parts of conversations, and ignored message keys."""
    left_out = report["left_out"]
    if left_out:
        breakdown = ", ".join(f"{reason}: {count:,}" for reason, count in left_out.items())
        yield f"{name}: {sum(left_out.values()):,} left out ({breakdown})"
    if report["cut"]:
        breakdown = ", ".join(f"{part}: {count:,}" for part, count in report["cut"].items())
        yield f"{name}: parts of conversations left out, by the number of rows ({breakdown})"
    if report["unread"]:
        yield f"{name}: unused keys of messages: {', '.join(report['unread'])}"


def list_reader_options(reader: Reader) -> list[str]:
    """Return the names of the options that a reader accepts."""
    parameters = list(inspect.signature(reader).parameters.values())[2:]
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    for p in parameters:
        if p.kind is p.VAR_KEYWORD:
            (kind,) = get_args(get_type_hints(reader)[p.name])  # `**options: Unpack[SomeOptions]`
            names += list(kind.__annotations__)
    return names


def _split_options(
    entry: CatalogueEntry, reader: Reader, args: Mapping[str, Any], mode: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide options into (options of the reader, options of the dataset type).

    The reader's options are the options of the entry, overridden by the user's `args`. Raises
    `ConfigError` for unknown options, and if an option that the reader requires is missing.
    """
    reader_options = list_reader_options(reader)
    type_options = set()
    for options_class in (datasets.get(TYPES[mode]).form, LengthLimits):
        for spec in fields(options_class):
            type_options.add(spec.name)
    for name in args:
        if name not in reader_options and name not in type_options:
            close = find_nearest(name, [*reader_options, *type_options])
            if close:
                hint = f"did you mean {' or '.join(close)}?"
            else:
                hint = f"known: {', '.join(reader_options)}"
            raise ConfigError(f"{entry.name}: {name}={args[name]!r}: no such argument; {hint}")
    unknown = [name for name in entry.options if name not in reader_options]
    if unknown:
        raise ConfigError(
            f"{entry.name}: reader {entry.reader} has no option {unknown[0]!r}; known: "
            f"{', '.join(reader_options)}"
        )
    options = {
        **entry.options,
        **{name: value for name, value in args.items() if name in reader_options},
    }
    try:
        inspect.signature(reader).bind(None, None, **options)
    except TypeError as error:
        raise ConfigError(
            f"{entry.name}: reader {entry.reader}: {error}; set it in the entry"
        ) from error
    return options, {name: value for name, value in args.items() if name not in reader_options}


def _read_report(folder: Path) -> dict[str, Any] | None:
    try:
        report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return report


@dataclass(frozen=True)
class _DatasetConversion:
    """Converter of a named dataset to rows for one mode (sft, rm or rl)."""

    entry: CatalogueEntry
    reader: Reader
    options: dict[str, Any]
    mode: str

    def compute_digest(self, files: DatasetFiles, split: ValidationSplit) -> str:
        """Return a hash of the files, the entry, the options, the split and the reader's code."""
        source = inspect.getsourcefile(self.reader)
        if source:
            code = hashlib.sha256(Path(source).read_bytes()).hexdigest()
        else:
            code = ""
        places = [str(file) for file in (*files.train, *files.valid)]  # used in error messages
        settings = [
            VERSION,
            asdict(self.entry),
            self.options,
            self.mode,
            asdict(split),
            code,
            places,
        ]
        contents = [hash_content(files.train), hash_content(files.valid)]
        return hashlib.sha256(
            json.dumps([settings, contents], sort_keys=True, default=str).encode()
        ).hexdigest()[:24]

    def write_rows(
        self, files: DatasetFiles, split: ValidationSplit, folder: Path
    ) -> dict[str, Any]:
        """Write `train.jsonl`, `valid.jsonl` and finally `report.json`, and return the report."""
        folder.mkdir(parents=True, exist_ok=True)
        names = [folder / f"{name}.jsonl" for name in ("train", "valid")]
        parts = [name.with_name(f".{name.name}.{os.getpid()}") for name in names]
        counters = ReaderContext(self.entry.name, self.mode)
        valid_files = files.valid if split.own else []
        try:
            # Write the rows to temporary files.
            with (
                parts[0].open("w") as train,
                parts[1].open("w") as valid,
                track_unread_keys() as unread,
            ):
                dataset_type, groups = self._write(files.train, train, counters)
                counts = [len(groups), 0]
                if valid_files:
                    valid_type, valid_groups = self._write(
                        valid_files, valid, replace(counters, training=False), start=len(groups)
                    )
                    counts[1] = len(valid_groups)
                    dataset_type = dataset_type or valid_type
            # Hold out rows for validation if the source has no validation split.
            if split.share > 0 and not valid_files:
                counts = _divide_rows(parts, hold_out(groups, split.share).tolist())
            for part, name in zip(parts, names, strict=True):
                rename(part, resolve_destination(name))
        finally:
            for part in parts:
                part.unlink(missing_ok=True)
        report = {
            "type": dataset_type,
            "train": counts[0],
            "valid": counts[1],
            "left_out": dict(+counters.left_out),
            "cut": dict(+counters.cut),
            "unread": sorted(unread),
        }
        write(folder / "report.json", json.dumps(report))
        return report

    def _write(
        self, files: list[Path], stream: TextIO, use: ReaderContext, start: int = 0
    ) -> tuple[str, list[str]]:
        """Convert the rows of `files`, write them to `stream`, and return (dataset type, groups).

        `groups` contains one group name per row. Rows of the same group stay together when
        validation rows are held out. Row ids are numbered from `start`.
        """
        groups: list[str] = []
        types: set[str] = set()
        rows = _FileRows(self.entry, files)
        for example in self._read_examples(rows, use):
            typed_row = to_row(example, self.mode)
            origin = [rows.place.file, rows.place.line]
            if typed_row is None:
                use.skip("too little for this mode")
                continue
            type, row = typed_row
            types.add(type)
            stream.write(
                json.dumps(
                    {"id": str(start + len(groups)), **row, ORIGIN: origin}, ensure_ascii=False
                )
                + "\n"
            )
            groups.append(example.group if example.group is not None else f"{len(groups)}")
        if len(types) > 1:
            raise DataError(
                f"{self.entry.name}: reader {self.entry.reader} makes rows of several types: "
                f"{', '.join(types)}"
            )
        return next(iter(types), ""), groups

    def _read_examples(self, rows: _FileRows, use: ReaderContext) -> Iterator[Example]:
        try:
            yield from self.reader(rows, use, **self.options)
        except BadRow as error:
            raise DataError(f"{rows.place}: {error}") from error
        except KeyError as error:
            raise DataError(
                f"{rows.place}: lacks the key {error}, which reader {self.entry.reader} reads"
            ) from error
        except (TypeError, AttributeError, ValueError, IndexError) as error:
            if isinstance(error, ConfigError | DataError):
                raise
            raise DataError(
                f"{rows.place}: cannot be read by reader {self.entry.reader} ({error})"
            ) from error


class _FileRows:
    """Iterable over the rows of several files.

    `place` is the location of the last row that was read, for error messages. After all rows have
    been read, `place` refers to all files together.
    """

    def __init__(self, entry: CatalogueEntry, files: list[Path]) -> None:
        self.entry = entry
        self.files = files
        self.place = RowLocation(format_file_name(entry, files[0]), 0)

    def __iter__(self) -> Iterator[Row]:
        for file in self.files:
            for place, row in read_entry_rows(self.entry, file):
                self.place = RowLocation(format_file_name(self.entry, file), place.line)
                if isinstance(row, UnreadableRow):
                    raise BadRow(row.reason)
                yield row
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        # Some readers collect all rows first. Later errors do not concern a single row.
        self.place = RowLocation(f"{format_file_name(self.entry, self.files[0])}{more}", 0)


def _divide_rows(parts: Sequence[Path], is_held_out: Sequence[bool]) -> list[int]:
    """Move the rows marked in `is_held_out` from the training file to the validation file.

    `parts` are the two files, and `is_held_out` has one value per row of the training file. Returns
    the row counts of both files.
    """
    all_rows = parts[0].with_name(f"{parts[0].name}.all")
    rename(parts[0], all_rows)
    with all_rows.open() as lines, parts[0].open("w") as train, parts[1].open("w") as valid:
        for line, goes_to_valid in zip(lines, is_held_out, strict=True):
            target = valid if goes_to_valid else train
            target.write(line)
    all_rows.unlink()
    return [len(is_held_out) - sum(is_held_out), sum(is_held_out)]
