"""`weft data counts --datasets ...`: rows and languages of named datasets.

The counts are printed as a table and can be written as CSV.
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

from weft.cli.parsing import split_names
from weft.cli.stacked_data import NO_SETTINGS, NamedDataSettings
from weft.data.datasets.base import TokenizedDataset
from weft.data.loader import LoadedData, assign_unique_names
from weft.data.mixture import SourceShare, count_per_epoch, hold_out
from weft.data.named import find_entry, list_names
from weft.data.named.catalogue import CatalogueEntry
from weft.data.named.fetch import find_local
from weft.data.named.prepare import ValidationSplit, find_cache_root, prepare
from weft.data.rows import ANSWER_KEYS, MESSAGE_KEYS, PROMPT_KEYS, Row, find_first_key
from weft.data.sources import UnreadableRow, find_files, read_rows
from weft.data.spec import DatasetSpec, SourceSpec, list_source_specs
from weft.errors import ConfigError, DataError, UnknownName, find_nearest
from weft.extras import install
from weft.writing import replace_file

COLUMNS = ("dataset_name", "train_counts", "eval_counts", "total_counts")
LISTING_HINT = "weft data counts --datasets all lists the datasets, weft config ls the sections"
# text columns of named datasets, and of other data
NAMED_TEXT_COLUMNS = ("text", "prompt")
ALL_TEXT_COLUMNS = ("text", *PROMPT_KEYS, *ANSWER_KEYS, "chosen", "rejected")
PER_EPOCH = "epoch_counts"  # column with the training rows per epoch, if sources are subsampled


@dataclass(frozen=True)
class DatasetCounts:
    """Counts for one dataset: rows, rows per epoch, and messages per language.

    `train` and `evaluation` are numbers of rows, `per_epoch` is the number of training rows per
    epoch, and `unreadable` is the number of rows that cannot be read. The language of a message is
    read from the row or detected from its text.
    """

    name: str
    train: int
    evaluation: int
    languages: Counter[str] = field(default_factory=Counter)
    per_epoch: int = 0
    unreadable: int = 0

    def to_table_cells(self, is_sampled: bool) -> list[int]:
        """Return the numbers of training rows, validation rows, and all rows.

        If `is_sampled` is True, the number of rows per epoch follows.
        """
        counts = [self.train, self.evaluation, self.train + self.evaluation]
        return [*counts, self.per_epoch] if is_sampled else counts


def resolve_sources(
    words: Sequence[str], mode: str, spec: DatasetSpec, settings: NamedDataSettings = NO_SETTINGS
) -> list[SourceSpec]:
    """Return the data sources named on the command line and those in `spec`.

    Each of `words` is the name of a dataset, the name of a config section that lists datasets, or
    several such names separated by commas. The single word `all` means all datasets for `mode`.
    `settings` are applied to the sources. Raises `ConfigError` for unknown names.
    """
    names = split_names(words)
    if names == ["all"]:
        names = []
        for name in list_names(mode, spec.named_file):
            if "{" not in name:
                names.append(name)
    elif "all" in names:
        raise ConfigError(
            f"--datasets {' '.join(words)}: `all` cannot be combined with other names"
        )
    sources = []
    for word in names:
        sources.extend(_resolve_word(word, mode, spec, settings))
    return settings.apply_to([*sources, *list_source_specs(spec)], spec.named_file)


def _resolve_word(
    word: str, mode: str, spec: DatasetSpec, settings: NamedDataSettings
) -> list[SourceSpec]:
    """Return the source of the dataset `word`, or the sources in the config section `word`.

    Raises a `ConfigError` that suggests similar names if the name is unknown.
    """
    try:
        return [SourceSpec(named=find_entry(word, spec.named_file).name)]
    except UnknownName as error:
        section = settings.find_section(word)
        if section is None:
            similar = find_nearest(
                word, [*list_names(None, spec.named_file), *settings.library.list_names()]
            )
            hint = f"did you mean {' or '.join(similar)}?" if similar else LISTING_HINT
            raise ConfigError(f"unknown dataset or section {word!r}; {hint}") from error
    return settings.list_sources(section, mode)


def select_permitted(
    sources: Sequence[SourceSpec], spec: DatasetSpec, is_download_allowed: bool
) -> list[SourceSpec]:
    """Return the sources that are available locally or that the user allows weft to download.

    All downloads are allowed if `is_download_allowed` is True, or if the user agrees when asked on
    a terminal. Otherwise, the sources that are not on this machine are left out.
    """
    cache_root = find_cache_root(spec.cache_dir)
    missing = []
    for source in sources:
        if (
            source.named
            and find_local(_find_entry(source, spec), source.path or None, cache_root) is None
        ):
            missing.append(source)
    if not missing or is_download_allowed:
        return list(sources)
    entries = {str(source.named): _find_entry(source, spec) for source in missing}
    for name, entry in entries.items():
        licence = f" (licence: {entry.licence})" if entry.licence else ""
        print(f"{name}: would be downloaded from {entry.origin}{licence}", file=sys.stderr)
    if sys.stdin.isatty():
        print(f"download these {len(entries)}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return list(sources)
    else:
        print(
            "note: they are left out; --yes downloads them, datasets.NAME.data_path=FILE reads a "
            "copy",
            file=sys.stderr,
        )
    return [source for source in sources if source not in missing]


def count_source(
    source: SourceSpec,
    name: str,
    request: CountRequest,
    detect_language: Callable[[str], str] | None,
) -> DatasetCounts:
    """Count the rows of one source and the languages of their messages.

    `name` is the name of the dataset in the result. `detect_language` returns the language of a
    text; if it is None, languages are read from the rows. Raises `DataError` if the source cannot
    be read.
    """
    spec = request.spec
    if source.valid_split is None:
        valid_share = spec.valid_split
    else:
        valid_share = source.valid_split
    has_validation_file = spec.valid_path is not None
    if source.named is not None:
        split = ValidationSplit(
            0.0 if has_validation_file else valid_share,
            own=not has_validation_file and source.valid_split != 0,
        )
        source = prepare(
            source, request.mode, find_cache_root(spec.cache_dir), split, spec.named_file
        ).source
        valid_share = 0.0
    counter = _LanguageCounter(
        detect_language, NAMED_TEXT_COLUMNS if source.named is not None else ALL_TEXT_COLUMNS
    )
    train = counter.count_file(source.path, source.split)
    evaluation = 0
    if source.valid_path:
        evaluation = counter.count_file(source.valid_path, None)
    elif source.valid_split is not None or not has_validation_file:
        evaluation = int(hold_out([str(index) for index in range(train)], valid_share).sum())
        train -= evaluation
    evaluation_count = min(evaluation, source.max_valid or evaluation)
    return DatasetCounts(
        name, train, evaluation_count, counter.languages, unreadable=counter.unreadable
    )


class _LanguageCounter:
    """Counter of texts per language, and of unreadable rows, in several files.

    `detect` returns the language of a text; if it is None, languages are read from the messages.
    `columns` are the columns with texts.
    """

    def __init__(self, detect: Callable[[str], str] | None, columns: Sequence[str]) -> None:
        self.detect = detect
        self.columns = columns
        self.languages = Counter[str]()
        self.unreadable = 0

    def count_file(self, path: str, split: str | None) -> int:
        """Count the languages in a file, and return the number of readable rows."""
        number = 0
        for file in find_files(path, split):
            for _, row in read_rows(file):
                if isinstance(row, UnreadableRow):
                    self.unreadable += 1
                    continue
                number += 1
                if self.detect:
                    self.languages.update(map(self.detect, _iterate_texts(row, self.columns)))
                    continue
                for message in _get_messages(row):
                    if isinstance(message.get("lang"), str):
                        self.languages[message["lang"]] += 1
        return number


def load_language_detector() -> Callable[[str], str]:
    """Return a function that detects the language of a text, using the package langdetect.

    Raises `ConfigError` if the package is not installed.
    """
    try:
        langdetect = importlib.import_module("langdetect")
    except ImportError as error:
        raise ConfigError(
            f"--detect-language needs the package langdetect; run: {install('languages')}"
        ) from error
    langdetect.DetectorFactory.seed = 0

    def detect(text: str) -> str:
        try:
            return str(langdetect.detect(text))
        except langdetect.LangDetectException:  # for example a text of digits
            return "unknown"

    return detect


def format_counts_table(counts: Sequence[DatasetCounts], is_sampled: bool = False) -> str:
    """Return a plain-text table with one row per dataset, and a row of totals if there are several.

    If `is_sampled` is True, the last column has the number of rows per epoch. If languages are
    known, a second table has the number of messages in each language.
    """
    totals = []
    for column in zip(*(each.to_table_cells(is_sampled) for each in counts), strict=True):
        totals.append(sum(column))
    numbers_by_name = [(each.name, each.to_table_cells(is_sampled)) for each in counts]
    if len(counts) > 1:
        numbers_by_name.append(("total", totals))
    rows = [_list_columns(is_sampled)]
    for name, numbers in numbers_by_name:
        rows.append([name, *(f"{number:,}" for number in numbers)])
    lines = _align_columns(rows)
    language_rows = _list_language_counts(counts)
    if language_rows:
        lines += ["", "messages by language", *_align_columns(language_rows)]
    return "\n".join(lines)


def _list_columns(is_sampled: bool) -> list[str]:
    return [*COLUMNS, *([PER_EPOCH] if is_sampled else [])]


def _list_language_counts(counts: Sequence[DatasetCounts]) -> list[list[str]]:
    """Return the table of messages by language: a header row, and a row per dataset.

    Datasets without language information are left out. The most frequent language comes first.
    """
    total = sum((dataset.languages for dataset in counts), Counter[str]())
    languages = [language for language, _ in total.most_common()]
    with_languages = [dataset for dataset in counts if dataset.languages]
    rows = []
    for dataset in with_languages:
        rows.append([dataset.name, *(f"{dataset.languages[language]:,}" for language in languages)])
    return [["dataset_name", *languages], *rows] if rows else []


def _align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows with the first column left-aligned and the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]))
    return lines


def write_csv(file: Path, counts: Sequence[DatasetCounts], is_sampled: bool = False) -> None:
    """Write the row counts and the languages of each dataset to a CSV file.

    Each language has a column with its number of messages. If `is_sampled` is True, the file also
    has a column with the number of training rows per epoch.
    """
    languages = sorted({language for dataset in counts for language in dataset.languages})
    with replace_file(file) as partial, partial.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*_list_columns(is_sampled), *languages])
        for dataset in counts:
            writer.writerow(
                [
                    dataset.name,
                    *dataset.to_table_cells(is_sampled),
                    *(dataset.languages[language] for language in languages),
                ]
            )


@dataclass(frozen=True)
class CountRequest:
    """Request to count the rows of `sources`, read for the training mode `mode`.

    `spec` are the other dataset options. `yes` is True if missing datasets may be downloaded.
    """

    sources: Sequence[SourceSpec]
    mode: str
    spec: DatasetSpec
    yes: bool


def to_source_entry(source: SourceSpec) -> dict[str, Any]:
    """Return a source as an entry of `dataset.sources`, without fields that are not set."""
    values = {spec.name: getattr(source, spec.name) for spec in fields(source)}
    return {name: value for name, value in values.items() if value not in (None, "", {})}


def format_length_table(data: LoadedData, limit: int) -> list[str]:
    """Return a table of the lengths of rows in tokens, with one line for each source.

    The columns are the length of the longest row, the 99th percentile, and the number of rows
    longer than `limit`. Raises `ConfigError` for a user's dataset class, whose row lengths are
    unknown.
    """
    lines: list[tuple[str, ...]] = [("source", "longest", "p99", f"above {limit:,}")]
    for subset in [*data.parts, *data.valid.values()]:
        if not isinstance(subset.dataset, TokenizedDataset):
            raise ConfigError(f"{subset.name}: only weft's own dataset types have row lengths")
        sizes = subset.dataset.table.compute_seqlens()[subset.indices]
        if any(subset is each for each in data.parts):
            label = subset.name
        else:
            label = f"{subset.name} (valid)"
        percentile_99 = int(np.percentile(sizes, 99, method="higher"))
        counts = (int(sizes.max()), percentile_99, int((sizes > limit).sum()))
        lines.append((label, *(f"{count:,}" for count in counts)))
    return _align_columns(lines)


def run(request: CountRequest, *, output: Path | None, detect: bool) -> int:
    """Print the table of counts, and return the exit code.

    If some of the datasets cannot be read, the reasons are printed and the exit code is 2. If
    `output` is not None, the table is also written to this file as CSV. If `detect` is True,
    languages are detected instead of being read from the rows. Raises `DataError` if none of the
    datasets can be read.
    """
    # Count every source.
    detect_language = load_language_detector() if detect else None
    counts = []
    shares = []
    problems = []
    permitted = select_permitted(request.sources, request.spec, request.yes)
    for source, name in assign_unique_names(permitted):
        try:
            counts.append(count_source(source, name, request, detect_language))
        except DataError as error:
            problems.append(str(error))
        else:
            shares.append(
                SourceShare(name, counts[-1].train, source.fraction, source.size, source.weight)
            )
    if problems and not counts:
        raise DataError(problems)
    # Add the rows per epoch, and the counts of the validation file.
    is_sampled = any(share.fraction or share.size or share.weight for share in shares)
    counts = [
        replace(each, per_epoch=num_rows)
        for each, num_rows in zip(counts, count_per_epoch(shares), strict=True)
    ]
    if counts and request.spec.valid_path is not None:
        validation_source = SourceSpec(request.spec.valid_path)
        valid_counts = count_source(
            validation_source,
            f"{assign_unique_names([validation_source])[0][1]} (valid)",
            replace(request, spec=DatasetSpec()),
            detect_language,
        )
        counts.append(replace(valid_counts, train=0, evaluation=valid_counts.train))
    # Print and write the table, then print the problems.
    if counts:
        print(format_counts_table(counts, is_sampled))
    if output is not None and counts:
        write_csv(output, counts, is_sampled)
        print(f"written to {output}")
    for each in counts:
        if each.unreadable:
            problems.append(f"{each.name}: {each.unreadable:,} rows cannot be read")
    for reason in problems:
        print(f"note: {reason}", file=sys.stderr)
    if len(problems) > sum(each.unreadable > 0 for each in counts) or not counts:
        return 2
    return 0


def list_named_files(spec: DatasetSpec, mode: str) -> dict[str, str]:
    """Return the display name of each file of the named datasets, keyed by the file's path."""
    names_by_file: dict[str, str] = {}
    for source in (each for each in list_source_specs(spec) if each.named is not None):
        prepared = prepare(
            source, mode, find_cache_root(spec.cache_dir), ValidationSplit(0.0), spec.named_file
        )
        names_by_file[prepared.source.path] = str(source.named)
        if prepared.source.valid_path:
            names_by_file[prepared.source.valid_path] = f"{source.named} (valid)"
    return names_by_file


def _find_entry(source: SourceSpec, spec: DatasetSpec) -> CatalogueEntry:
    return find_entry(str(source.named), spec.named_file)


def _get_messages(row: Row) -> list[Mapping[str, Any]]:
    key = find_first_key(row, (*MESSAGE_KEYS, "prompt"))
    messages = row[key] if key is not None else None
    if isinstance(messages, list):
        return [each for each in messages if isinstance(each, Mapping)]
    return []


def _iterate_texts(row: Row, columns: Sequence[str]) -> Iterator[str]:
    """Yield the texts of a row: messages, replies, and the columns `columns`."""
    contents = (message.get("content") or message.get("value") for message in _get_messages(row))
    replies = row.get("replies")
    candidates = [
        *contents,
        *(row.get(column) for column in columns),
        *(replies if isinstance(replies, list) else []),
    ]
    return (text for text in candidates if text and isinstance(text, str))
