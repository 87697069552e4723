"""`weft data counts --datasets ...`: rows of datasets known by name, and their languages, as a
table and as CSV.
"""

from __future__ import annotations

import csv
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.cli.stacked_data import NO_SETTINGS, Settings
from weft.data.datasets.base import Tokenized
from weft.data.loader import LoadedData, named_apart
from weft.data.mixture import Share, hold_out, per_epoch
from weft.data.named import find, names
from weft.data.named.entry import Entry
from weft.data.named.fetch import local
from weft.data.named.prepare import Prepared, Split, cache_root, prepare
from weft.data.rows import ANSWER_KEYS, MESSAGE_KEYS, PROMPT_KEYS, Row, first_of
from weft.data.sources import Unreadable, find_files, read_rows
from weft.data.spec import DatasetSpec, SourceSpec, sources_of
from weft.errors import ConfigError, DataError, UnknownName, nearest
from weft.extras import install
from weft.writing import replacing

COLUMNS = ("dataset_name", "train_counts", "eval_counts", "total_counts")
LISTS = "weft data counts --datasets all names the datasets, weft config ls the sections"
OF_FORMS = ("text", "prompt")  # columns of texts, in rows of named datasets
OF_ANY = ("text", *PROMPT_KEYS, *ANSWER_KEYS, "chosen", "rejected")  # and in any
PER_EPOCH = "epoch_counts"  # of training rows, where a source gives an epoch a part of them


@dataclass(frozen=True)
class Counted:
    """One dataset: its rows, how many an epoch takes, and how many messages are in each language
    (where rows say it, or it was detected).
    """

    name: str
    train: int
    evaluation: int
    languages: Counter[str] = field(default_factory=Counter)
    per_epoch: int = 0
    unreadable: int = 0

    def numbers(self, drawn: bool) -> list[int]:
        """The counts of a line of the table; with `drawn` also those of an epoch."""
        counts = [self.train, self.evaluation, self.train + self.evaluation]
        return [*counts, self.per_epoch] if drawn else counts


def sources(
    words: Sequence[str], mode: str, spec: DatasetSpec, settings: Settings = NO_SETTINGS
) -> list[SourceSpec]:
    """The sources that a command asks for: `all` of a mode, names (also `a,b`), those that a
    section of settings lists, and those of the options.
    """
    asked = [name for word in words for name in word.split(",") if name]
    if asked == ["all"]:
        asked = [name for name in names(mode, spec.named_file) if "{" not in name]
    elif "all" in asked:
        raise ConfigError(f"--datasets {' '.join(words)}: `all` stands alone")
    found = [source for word in asked for source in _of_word(word, mode, spec, settings)]
    return settings.applied([*found, *sources_of(spec)], spec.named_file)


def _of_word(word: str, mode: str, spec: DatasetSpec, settings: Settings) -> list[SourceSpec]:
    """A dataset by its name, or the entries of the section of that name.

    Raises `ConfigError` with the nearest names.
    """
    try:
        return [SourceSpec(named=find(word, spec.named_file).name)]
    except UnknownName as error:
        section = settings.section(word)
        if section is None:
            close = nearest(word, [*names(None, spec.named_file), *settings.library.names()])
            hint = f"did you mean {' or '.join(close)}?" if close else LISTS
            raise ConfigError(f"unknown dataset or section {word!r}; {hint}") from error
    return settings.listed(section, mode)


def allow(wanted: Sequence[SourceSpec], spec: DatasetSpec, yes: bool) -> list[SourceSpec]:
    """The sources that may be read: those at hand, and where the user agrees (`yes`, or asked on a
    terminal) those that have to be fetched.
    """
    cache = cache_root(spec.cache_dir)
    missing = [
        source
        for source in wanted
        if source.named and local(_entry(source, spec), source.path or None, cache) is None
    ]
    if not missing or yes:
        return list(wanted)
    entries = {str(source.named): _entry(source, spec) for source in missing}
    for name, entry in entries.items():
        licence = f" (licence: {entry.licence})" if entry.licence else ""
        print(f"{name}: would be fetched from {entry.origin}{licence}", file=sys.stderr)
    if sys.stdin.isatty():
        print(f"fetch these {len(entries)}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return list(wanted)
    else:
        print(
            "note: --yes fetches them, datasets.NAME.data_path=FILE reads a copy; they are left "
            "out",
            file=sys.stderr,
        )
    return [source for source in wanted if source not in missing]


def count(
    source: SourceSpec, name: str, asked: Asked, detect: Callable[[str], str] | None
) -> Counted:
    """The rows of one source, each message's language with them.

    Raises `DataError` where it cannot be had.
    """
    spec = asked.spec
    if source.valid_split is None:
        share = spec.valid_split
    else:
        share = source.valid_split
    elsewhere = spec.valid_path is not None
    if source.named is not None:
        split = Split(0.0 if elsewhere else share, own=not elsewhere and source.valid_split != 0)
        source = prepare(
            source, asked.mode, cache_root(spec.cache_dir), split, spec.named_file
        ).source
        share = 0.0
    read = _Rows(detect, OF_FORMS if source.named is not None else OF_ANY)
    train = read.count(source.path, source.split)
    evaluation = 0
    if source.valid_path:
        evaluation = read.count(source.valid_path, None)
    elif source.valid_split is not None or not elsewhere:
        evaluation = int(hold_out([str(index) for index in range(train)], share).sum())
        train -= evaluation
    kept = min(evaluation, source.max_valid or evaluation)
    return Counted(name, train, kept, read.languages, unreadable=read.unreadable)


class _Rows:
    """Rows of files, counted by language, and those that are no rows."""

    def __init__(self, detect: Callable[[str], str] | None, columns: Sequence[str]) -> None:
        self.detect = detect
        self.columns = columns
        self.languages = Counter[str]()
        self.unreadable = 0

    def count(self, path: str, split: str | None) -> int:
        """How many rows there are."""
        number = 0
        for file in find_files(path, split):
            for _, row in read_rows(file):
                if isinstance(row, Unreadable):
                    self.unreadable += 1
                    continue
                number += 1
                self.languages.update(
                    map(self.detect, _texts(row, self.columns))
                    if self.detect
                    else _said_languages(row)
                )
        return number


def detector() -> Callable[[str], str]:
    """What tells the language of a text, by the package langdetect.

    Raises `ConfigError` where it is not installed.
    """
    try:
        package = importlib.import_module("langdetect")
    except ImportError as error:
        raise ConfigError(
            f"--detect-language needs the package langdetect; run: {install('languages')}"
        ) from error
    package.DetectorFactory.seed = 0

    def detect(text: str) -> str:
        try:
            return str(package.detect(text))
        except package.LangDetectException:  # a text of digits, say
            return "unknown"

    return detect


def table(counted: Sequence[Counted], drawn: bool = False) -> str:
    """Plain text: a line a dataset, and their sum; with `drawn` also how many rows an epoch takes."""
    sums = [sum(numbers) for numbers in zip(*(c.numbers(drawn) for c in counted), strict=True)]
    lines = [(c.name, c.numbers(drawn)) for c in counted] + (
        [("total", sums)] if len(counted) > 1 else []
    )
    rows = [
        _columns(drawn),
        *([name, *(f"{number:,}" for number in numbers)] for name, numbers in lines),
    ]
    spoken = _by_language(counted)
    return "\n".join(
        [*_aligned(rows), *(["", "messages by language", *_aligned(spoken)] if spoken else [])]
    )


def _columns(drawn: bool) -> list[str]:
    return [*COLUMNS, *([PER_EPOCH] if drawn else [])]


def _by_language(counted: Sequence[Counted]) -> list[list[str]]:
    """A line a dataset that says its languages, the most frequent language first."""
    total = sum((each.languages for each in counted), Counter[str]())
    languages = [language for language, _ in total.most_common()]
    spoken = [each for each in counted if each.languages]
    rows = [
        [each.name, *(f"{each.languages[language]:,}" for language in languages)] for each in spoken
    ]
    return [["dataset_name", *languages], *rows] if rows else []


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def write_csv(file: Path, counted: Sequence[Counted], drawn: bool = False) -> None:
    """The table with a column for every language."""
    languages = sorted({language for each in counted for language in each.languages})
    with replacing(file) as partial, partial.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*_columns(drawn), *languages])
        for each in counted:
            writer.writerow(
                [
                    each.name,
                    *each.numbers(drawn),
                    *(each.languages[language] for language in languages),
                ]
            )


@dataclass(frozen=True)
class Asked:
    """Sources whose rows a command counts, what for, and whether they may be fetched."""

    sources: Sequence[SourceSpec]
    mode: str
    spec: DatasetSpec
    yes: bool


def said(source: SourceSpec) -> dict[str, Any]:
    """A source as an entry of `dataset.sources`."""
    plain = {spec.name: getattr(source, spec.name) for spec in fields(source)}
    return {name: value for name, value in plain.items() if value not in (None, "", {})}


def spread(data: LoadedData, limit: int) -> Iterator[str]:
    """A line a source: the most tokens of a row, the 99th percentile, and how many rows have more
    than `limit`.
    """
    for part in [*data.parts, *(part for part in data.valid.values())]:
        if not isinstance(part.dataset, Tokenized):
            raise ConfigError(
                f"{part.name}: only weft's own dataset types tell the lengths of their rows"
            )
        sizes = part.dataset.table.sizes()[part.indices]
        if any(part is each for each in data.parts):
            label = part.name
        else:
            label = f"{part.name} (valid)"
        above = int((sizes > limit).sum())
        yield f"{label}: {sizes.max()} (p99 {int(np.percentile(sizes, 99, method='higher'))}, >{limit}: {above})"


def run(asked: Asked, *, output: Path | None, detect: bool) -> int:
    """Print the table; 2 where a dataset could not be read, each with its reason."""
    tell = detector() if detect else None
    counted = []
    shares = []
    wrong = []
    allowed = allow(asked.sources, asked.spec, asked.yes)
    for source, name in named_apart(allowed):
        try:
            counted.append(count(source, name, asked, tell))
        except DataError as error:
            wrong.append(str(error))
        else:
            shares.append(
                Share(name, counted[-1].train, source.fraction, source.size, source.weight)
            )
    if wrong and not counted:
        raise DataError(wrong)
    drawn = any(share.fraction or share.size or share.weight for share in shares)
    counted = [
        replace(each, per_epoch=n) for each, n in zip(counted, per_epoch(shares), strict=True)
    ]
    if counted and asked.spec.valid_path is not None:
        elsewhere = SourceSpec(asked.spec.valid_path)
        found = count(
            elsewhere,
            f"{named_apart([elsewhere])[0][1]} (valid)",
            replace(asked, spec=DatasetSpec()),
            tell,
        )
        counted.append(replace(found, train=0, evaluation=found.train))
    if counted:
        print(table(counted, drawn))
    if output is not None and counted:
        write_csv(output, counted, drawn)
        print(f"written to {output}")
    wrong += [
        f"{each.name}: {each.unreadable:,} rows cannot be read"
        for each in counted
        if each.unreadable
    ]
    for reason in wrong:
        print(f"note: {reason}", file=sys.stderr)
    if len(wrong) > sum(each.unreadable > 0 for each in counted) or not counted:
        return 2
    return 0


def files_of(spec: DatasetSpec, mode: str) -> dict[str, str]:
    """The file of rows of each named dataset among the options, and what to call it."""
    found: dict[str, str] = {}
    for source in (each for each in sources_of(spec) if each.named is not None):
        made = prepare(source, mode, cache_root(spec.cache_dir), Split(0.0), spec.named_file)
        found |= dict(
            zip(_files(made), (str(source.named), f"{source.named} (valid)"), strict=False)
        )
    return found


def _entry(source: SourceSpec, spec: DatasetSpec) -> Entry:
    return find(str(source.named), spec.named_file)


def _files(made: Prepared) -> list[str]:
    return [made.source.path, *([made.source.valid_path] if made.source.valid_path else [])]


def _messages(row: Row) -> list[Mapping[str, Any]]:
    key = first_of(row, (*MESSAGE_KEYS, "prompt"))
    listed = row[key] if key is not None else None
    if isinstance(listed, list):
        return [each for each in listed if isinstance(each, Mapping)]
    return []


def _said_languages(row: Row) -> Iterator[str]:
    """The languages that a row's messages say."""
    return (message["lang"] for message in _messages(row) if isinstance(message.get("lang"), str))


def _texts(row: Row, columns: Sequence[str]) -> Iterator[str]:
    """The texts of a row: of its messages, of replies, and of columns."""
    spoken = (message.get("content") or message.get("value") for message in _messages(row))
    replies = row.get("replies")
    found = [
        *spoken,
        *(row.get(column) for column in columns),
        *(replies if isinstance(replies, list) else []),
    ]
    return (text for text in found if text and isinstance(text, str))
