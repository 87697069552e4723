"""`weft data counts --datasets ...`: rows of datasets known by name, and their languages, as a table and as CSV."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from weft.cli.open_assistant.commands import named_datasets
from weft.data.datasets.base import Tokenized
from weft.data.loader import LoadedData
from weft.data.named import find, names
from weft.data.named.entry import Entry
from weft.data.named.fetch import local
from weft.data.named.prepare import Prepared, Split, cache_root, prepare
from weft.data.spec import DatasetSpec, SourceSpec, sources_of
from weft.errors import ConfigError, DataError
from weft.extras import install

COLUMNS = ("dataset_name", "train_counts", "eval_counts", "total_counts")


@dataclass(frozen=True)
class Counted:
    """One dataset: its rows, and how many texts are in each language (where rows say it, or it was detected)."""

    name: str
    train: int
    evaluation: int
    languages: Counter[str] = field(default_factory=Counter)

    def cells(self) -> list[str]:
        return [self.name, *(f"{count:,}" for count in (self.train, self.evaluation, self.train + self.evaluation))]


def sources(words: Sequence[str], mode: str, spec: DatasetSpec) -> list[SourceSpec]:
    """The named sources that a command asks for: `all` of a mode, names (also `a,b`), those that a section of settings lists,
    and those of the options."""
    asked = [name for word in words for name in word.split(",") if name]
    if asked == ["all"]:
        asked = [name for name in names(mode, spec.named_file) if "{" not in name]
    elif "all" in asked:
        raise ConfigError(f"--datasets {' '.join(words)}: `all` stands alone")
    listed = [SourceSpec(named=name) for word in asked for name in _names(word, spec)]
    return [*listed, *(source for source in sources_of(spec) if source.named is not None)]


def _names(word: str, spec: DatasetSpec) -> list[str]:
    """A dataset's name, or those that the section of that name lists. Raises `ConfigError` with the nearest names."""
    try:
        return [find(word, spec.named_file).name]
    except ConfigError:
        listed = named_datasets([word])
        if listed == [word]:
            raise
    return [find(name, spec.named_file).name for name in listed]


def allow(wanted: Sequence[SourceSpec], spec: DatasetSpec, yes: bool) -> list[SourceSpec]:
    """The sources that may be read: those at hand, and where the user agrees (`yes`, or asked on a terminal) those that
    have to be fetched."""
    cache = cache_root(spec.cache_dir)
    missing = [source for source in wanted if local(_entry(source, spec), source.path or None, cache) is None]
    if not missing or yes:
        return list(wanted)
    for source in missing:
        entry = _entry(source, spec)
        licence = f" (licence: {entry.licence})" if entry.licence else ""
        print(f"{source.named}: would be fetched from {entry.origin}{licence}", file=sys.stderr)
    if sys.stdin.isatty():
        print(f"fetch these {len(missing)}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return list(wanted)
    else:
        print("note: --yes fetches them; they are left out", file=sys.stderr)
    return [source for source in wanted if source not in missing]


def count(source: SourceSpec, mode: str, spec: DatasetSpec, detect: Callable[[str], str] | None) -> Counted:
    """The rows of one source, each text's language with them. Raises `DataError` where it cannot be had."""
    share = spec.valid_split if source.valid_split is None else source.valid_split
    split = Split(share, own=source.valid_split != 0)
    made = prepare(source, mode, cache_root(spec.cache_dir), split, spec.named_file)
    languages: Counter[str] = Counter()
    sizes = []
    for path in _files(made):
        sizes.append(0)
        with open(path) as lines:
            for line in lines:
                sizes[-1] += 1
                languages.update(_languages(json.loads(line), detect))
    evaluation = sizes[1] if len(sizes) > 1 else 0
    return Counted(str(source.named), sizes[0], min(evaluation, source.max_valid or evaluation), languages)


def detector() -> Callable[[str], str]:
    """What tells the language of a text, by the package langdetect. Raises `ConfigError` where it is not installed."""
    try:
        package = importlib.import_module("langdetect")
    except ImportError as error:
        raise ConfigError(f"--detect-language needs the package langdetect; run: {install('languages')}") from error
    package.DetectorFactory.seed = 0

    def detect(text: str) -> str:
        try:
            return str(package.detect(text))
        except package.LangDetectException:  # a text of digits, say
            return "unknown"

    return detect


def table(counted: Sequence[Counted]) -> str:
    """Plain text: a line a dataset, and their sum."""
    total = Counted("total", sum(c.train for c in counted), sum(c.evaluation for c in counted))
    rows = [list(COLUMNS), *(c.cells() for c in [*counted, *([total] if len(counted) > 1 else [])])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
             for row in rows]  # fmt: skip
    spoken = [
        f"{c.name}: {', '.join(f'{k} {n:,}' for k, n in c.languages.most_common())}" for c in counted if c.languages
    ]
    return "\n".join([*lines, *(["", "languages", *spoken] if spoken else [])])


def write_csv(file: Path, counted: Sequence[Counted]) -> None:
    """The table with a column for every language."""
    languages = sorted({language for each in counted for language in each.languages})
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*COLUMNS, *languages])
        for each in counted:
            sizes = [each.train, each.evaluation, each.train + each.evaluation]
            writer.writerow([each.name, *sizes, *(each.languages[language] for language in languages)])


@dataclass(frozen=True)
class Asked:
    """Datasets that a command names, what for, with which options, and whether they may be fetched."""

    words: Sequence[str]
    mode: str
    spec: DatasetSpec
    yes: bool


def said(source: SourceSpec) -> dict[str, Any]:
    """A named source as its entry of `dataset.named`."""
    plain = {
        spec.name: getattr(source, spec.name) for spec in fields(source) if spec.name not in ("named", "type", "split")
    }
    return {name: value for name, value in plain.items() if value not in (None, "", {})}


def spread(data: LoadedData, limit: int) -> Iterator[str]:
    """A line a source: the most tokens of a row, the 99th percentile, and how many rows have more than `limit`."""
    for part in [*data.parts, *(part for part in data.valid.values())]:
        if not isinstance(part.dataset, Tokenized):
            raise ConfigError(f"{part.name}: only weft's own dataset types tell the lengths of their rows")
        sizes = part.dataset.table.sizes()[part.indices]
        label = part.name if any(part is each for each in data.parts) else f"{part.name} (valid)"
        above = int((sizes > limit).sum())
        yield f"{label}: {sizes.max()} (p99 {int(np.percentile(sizes, 99, method='higher'))}, >{limit}: {above})"


def run(asked: Asked, *, output: Path | None, detect: bool) -> int:
    """Print the table; 2 where a dataset could not be read, each with its reason."""
    tell = detector() if detect else None
    counted, wrong = [], []
    for source in allow(sources(asked.words, asked.mode, asked.spec), asked.spec, asked.yes):
        try:
            counted.append(count(source, asked.mode, asked.spec, tell))
        except DataError as error:
            wrong.append(str(error))
    if counted:
        print(table(counted))
    if output is not None and counted:
        write_csv(output, counted)
        print(f"written to {output}")
    for reason in wrong:
        print(f"note: {reason}", file=sys.stderr)
    return 2 if wrong or not counted else 0


def files_of(spec: DatasetSpec, mode: str) -> dict[str, str]:
    """The file of rows of each named dataset among the options, and what to call it."""
    found: dict[str, str] = {}
    for source in (each for each in sources_of(spec) if each.named is not None):
        made = prepare(source, mode, cache_root(spec.cache_dir), Split(0.0), spec.named_file)
        found |= dict(zip(_files(made), (str(source.named), f"{source.named} (valid)"), strict=False))
    return found


def _entry(source: SourceSpec, spec: DatasetSpec) -> Entry:
    return find(str(source.named), spec.named_file)


def _files(made: Prepared) -> list[str]:
    return [made.source.path, *([made.source.valid_path] if made.source.valid_path else [])]


def _languages(row: dict[str, Any], detect: Callable[[str], str] | None) -> Iterator[str]:
    """The language of every text of a row: what the row says, or what is detected."""
    messages = row.get("messages") or row.get("prompt")
    for message in messages if isinstance(messages, list) else []:
        if detect is not None:
            yield detect(message["content"])
        elif "lang" in message:
            yield message["lang"]
    if detect is not None:
        plain = [row.get("text"), messages if isinstance(messages, str) else None, *(row.get("replies") or [])]
        yield from (detect(text) for text in plain if text)
