"""Preparation of a table whose rows are tokenized during training.

The order of the batches and the number of training steps depend on the ids of all samples, so the
ids must be known before training. This is possible if each row gives exactly one sample (see
`SingleSampleEncoder`) or is dropped because of its length. Before training, weft

- reads all rows and records the id and the shape of each one (its columns and the types of their
  values);
- tokenizes the first row of each shape, since invalid rows usually differ in shape from valid ones;
- tokenizes the rows that may be too long, unless such rows are truncated;
- tokenizes all rows that have the same shape as an invalid row.

All other rows are tokenized while training runs.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os import cpu_count
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from weft.data.background_table import BackgroundTokenTable, pack_outcome
from weft.data.columns import read_renamed_rows
from weft.data.lengths import LengthLimits
from weft.data.rows import BadRow, Row, is_tree, read_id
from weft.data.sources import UnreadableRow, find_files
from weft.data.table import TokenTable
from weft.data.tokenizer import Tokenizer
from weft.data.tokenizing import (
    CHUNK,
    Chunk,
    EncodingJob,
    Outcome,
    Problem,
    RowEncoder,
    RowSource,
    are_large,
    assign_ids,
    build_no_rows_error,
    encode_in_processes,
    encode_rows,
    find_cache_file,
    format_reports,
    make_job,
    tokenize,
)
from weft.errors import DataError

# A row of each shape is tokenized before training. Above this number of shapes, further rows are
# distinguished by their top-level columns only.
MAX_SHAPES = 1000
NUM_ADDED_TOKENS = 2  # maximum number of tokens added to a sample's text: BOS and EOS
VALUE_KEYS = ("role", "from")  # keys whose texts are part of a row's shape


@runtime_checkable
class SingleSampleEncoder(Protocol):
    """Row encoder that makes a single sample from each row, unless the row is a message tree.

    A message tree can give several samples. A sample has at most one completion, and the encoder
    must mark the first token of the completion as trained. Truncation never removes this token, so
    every completion keeps at least one trained token.
    """

    def render_text(self, row: Row, tokenizer: Tokenizer) -> str:
        """Return the text of a row as it is tokenized, without BOS and EOS.

        Raises the same errors as `encode`.
        """
        ...


def tokenize_in_background(
    form: RowEncoder, lengths: LengthLimits, tokenizer: Tokenizer, source: RowSource
) -> TokenTable | BackgroundTokenTable:
    """Return a table of the samples of `source`.

    If possible, the table is a `BackgroundTokenTable`, which is filled during training. The caller
    has to start it. Otherwise, it is a complete `TokenTable`. This is the case if the cache has the
    table, the files are small, `num_workers` is 0, or `source.max_samples` is set. It is also the
    case if a row can give several samples, or if the rows vary too much (see `_read_all_rows`).

    Raises `DataError` with a report on the invalid rows that were found.
    """
    files = find_files(source.path, source.split)
    if (
        source.num_workers == 0
        or source.max_samples is not None
        or not isinstance(form, SingleSampleEncoder)
        or not are_large(files)
    ):
        return tokenize(form, lengths, tokenizer, source)
    form.check(tokenizer)
    cache_file = find_cache_file(form, lengths, tokenizer, source, files)
    job = make_job(form, lengths, tokenizer)
    rows = None if cache_file.is_file() else _read_all_rows(job, source)
    if rows is None:
        return tokenize(form, lengths, tokenizer, source)
    return _build_background_table(job, rows, source, cache_file)


@dataclass
class _SourceRows:
    """All rows of a source, before tokenization. Each list has one element per row.

    Attributes:
        places: location of each row, for error messages
        pickled: each row, pickled
        own_ids: id given in each row, or None
        shapes: index of each row's shape; rows with the same columns and types share an index
        eager_rows: indices of the rows to tokenize before training
    """

    places: list[str] = field(default_factory=list)
    pickled: list[bytes] = field(default_factory=list)
    own_ids: list[str | None] = field(default_factory=list)
    shapes: list[int] = field(default_factory=list)
    eager_rows: set[int] = field(default_factory=set)

    def build_chunk(self, rows: Iterable[int]) -> Chunk:
        return [(self.places[row], self.pickled[row]) for row in rows]


def _read_all_rows(job: EncodingJob, source: RowSource) -> _SourceRows | None:
    """Read all rows of a source and choose the rows to tokenize before training.

    Returns None if all rows have to be tokenized before training. This is the case if a row is a
    message tree, or if there are more than `2 * MAX_SHAPES` row shapes (see `_compute_shape`).
    """
    rows = _SourceRows()
    number_of_shape = dict[Any, int]()
    limits = []
    for limit in (job.lengths.max_seqlen, job.lengths.max_prompt_len):
        if limit is not None:
            limits.append(limit)
    if job.lengths.overlong == "truncate":
        max_tokens = None
    else:
        max_tokens = min(limits, default=None)
    for number, (place, row) in enumerate(
        read_renamed_rows(source.path, source.split, source.columns)
    ):
        # Choose rows with a bad id, and rows that may be too long.
        own_id: str | None = None
        if not isinstance(row, UnreadableRow):
            if is_tree(row):
                return None
            try:
                own_id = read_id(row, job.form.id_key)
            except BadRow:
                rows.eager_rows.add(number)
            if max_tokens is not None and _can_exceed(job, row, max_tokens):
                rows.eager_rows.add(number)
        # Choose the first row of each shape.
        shape = _compute_shape(row, job.form.id_key, deep=len(number_of_shape) < MAX_SHAPES)
        if shape not in number_of_shape:
            if len(number_of_shape) == 2 * MAX_SHAPES:
                return None
            rows.eager_rows.add(number)
        rows.shapes.append(number_of_shape.setdefault(shape, len(number_of_shape)))
        rows.places.append(str(place))
        rows.pickled.append(pickle.dumps(row))
        rows.own_ids.append(own_id)
    return rows


def _compute_shape(row: Row | UnreadableRow, id_key: str, *, deep: bool) -> Any:
    """Return the shape of a row: the names and value types of its columns, except the id column.

    Empty texts and non-empty texts count as different types. With `deep`, nested values are
    described too. Returns None for an unreadable row.
    """
    if isinstance(row, UnreadableRow):
        return None
    kind = _compute_kind if deep else _compute_top_level_kind
    return tuple([(name, kind(value)) for name, value in row.items() if name != id_key])


def _compute_kind(value: Any, key: str = "") -> Any:
    if isinstance(value, str):
        if key in VALUE_KEYS:
            return value
        return str if value and not value.isspace() else ""
    if isinstance(value, dict):
        return tuple([(name, _compute_kind(item, name)) for name, item in value.items()])
    if isinstance(value, list):
        return (list, *[_compute_kind(item) for item in value])
    return type(value)


def _compute_top_level_kind(value: Any) -> Any:
    if value or isinstance(value, bool | int | float):
        return type(value)
    return (type(value), "empty")


def _can_exceed(job: EncodingJob, row: Row, max_tokens: int) -> bool:
    """Return whether a row may have more than `max_tokens` tokens.

    Also returns True for an invalid row, so that it is tokenized before training and reported
    early.
    """
    try:
        text = job.form.render_text(row, job.tokenizer)
        bound = job.tokenizer.bound_tokens(text)
        if bound is None or bound + NUM_ADDED_TOKENS > max_tokens:
            bound = len(job.tokenizer.encode(text))
    except (BadRow, DataError):
        return True
    return bound + NUM_ADDED_TOKENS > max_tokens


def _build_background_table(
    job: EncodingJob, rows: _SourceRows, source: RowSource, cache_file: Path
) -> BackgroundTokenTable:
    """Tokenize the rows in `rows.eager_rows`, and build a table with the ids of all samples.

    The remaining samples are tokenized during training, and the complete table is then written to
    `cache_file`. Raises `DataError` with reports on all invalid rows that were found.
    """
    outcomes: list[tuple[list[int], Outcome]] = []
    problems: list[Problem] = []

    def encode(numbers: Sequence[int]) -> None:
        for chunk, outcome in _encode_eagerly(job, rows, numbers, source):
            outcomes.append((chunk, outcome))
            for index, message, long in outcome[2]:
                problems.append((chunk[index], message, long))

    # Encode the chosen rows. If some are bad, report on them by encoding all rows of their shapes.
    eager_rows = sorted(rows.eager_rows)
    encode(eager_rows)
    bad_shapes = {rows.shapes[row] for row, _, long in problems if long is None}
    if bad_shapes:
        encode(
            [
                row
                for row, shape in enumerate(rows.shapes)
                if shape in bad_shapes and row not in rows.eager_rows
            ]
        )
    # Assign ids to the rows that are not left out.
    used = {chunk[index] for chunk, outcome in outcomes for index, _, _ in outcome[0]}
    kept_rows = []
    for row in range(len(rows.places)):
        if row in used or row not in rows.eager_rows:
            kept_rows.append(row)
    ids, duplicates = assign_ids([(row, rows.own_ids[row]) for row in kept_rows], rows.places)
    if problems or duplicates:
        raise DataError(format_reports(rows.places, [*problems, *duplicates]))
    if not kept_rows:
        raise build_no_rows_error(source, len(rows.places))
    # Encode the first row of each shape: together they have all columns of metadata, so that all
    # batches get the same columns.
    first_rows = {rows.shapes[row]: row for row in reversed(kept_rows)}.values()
    encode(sorted(row for row in first_rows if row not in used))
    samples = []
    for chunk, outcome in outcomes:
        for index, _, sample in outcome[0]:
            samples.append((chunk[index], sample))
    samples.sort(key=lambda entry: entry[0])
    columns = tuple(dict.fromkeys(name for _, sample in samples for name in sample.metadata))
    table = BackgroundTokenTable(
        job,
        rows.places,
        rows.pickled,
        tuple(ids),
        np.asarray(kept_rows, dtype=np.int32),
        columns,
        cache_file,
    )
    for chunk, outcome in outcomes:
        table.add_samples(chunk, pack_outcome(outcome))
    return table


def _encode_eagerly(
    job: EncodingJob, rows: _SourceRows, numbers: Sequence[int], source: RowSource
) -> list[tuple[list[int], Outcome]]:
    """Encode rows before training, in several processes if there are many.

    `numbers` are the row numbers. Returns (row numbers, outcome) for each chunk of rows.
    """
    chunks = [list(numbers[start : start + CHUNK]) for start in range(0, len(numbers), CHUNK)]
    if len(numbers) <= MAX_SHAPES:
        return [(chunk, encode_rows(job, rows.build_chunk(chunk))) for chunk in chunks]
    workers = min(source.num_workers or cpu_count() or 1, len(chunks))
    label = f"tokenizing {source.name or Path(source.path).name}, rows that may be too long"
    with source.progress(label, len(numbers)) as advance:
        outcomes = encode_in_processes(
            job, [rows.build_chunk(chunk) for chunk in chunks], workers, advance
        )
    return list(zip(chunks, outcomes, strict=True))
