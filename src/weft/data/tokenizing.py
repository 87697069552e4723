"""Conversion of rows to token ids, with a cache on disk and a progress bar.

Each source is tokenized once, in parallel if it is large. The result is cached under a hash of
everything that affects it. Progress is a bar on a terminal, or one plain line of text if the output
is not a terminal.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import Field, asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, Protocol

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from weft.data.columns import Columns, rename_columns
from weft.data.lengths import EncodedSample, LengthLimits, fit_to_limits
from weft.data.messages import track_unread_keys
from weft.data.rows import BadRow, Row, RowTooLong, TrackedRow, read_id
from weft.data.sources import UnreadableRow, find_files, hash_content, read_rows
from weft.data.table import TokenizationReport, TokenTable
from weft.data.tokenizer import Tokenizer
from weft.data.turns import TemplateOmission, merge_omissions
from weft.errors import DataError, RunError, UserError
from weft.writing import write

Advance = Callable[[int], None]
Reporter = Callable[[str, int], AbstractContextManager[Advance]]


@contextmanager
def show_progress(label: str, total: int) -> Iterator[Advance]:
    """Show the progress of work on `total` rows on standard error.

    `label` describes the work. The context yields a function, to be called with the number of rows
    done since its last call.
    """
    if not sys.stderr.isatty():
        begun = time.perf_counter()
        yield lambda count: None
        print(f"{label}: {total:,} rows in {time.perf_counter() - begun:.1f} s", file=sys.stderr)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=rich.console.Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def skip_progress(label: str, total: int) -> Iterator[Advance]:
    """Accept the same calls as `show_progress`, but show nothing."""
    yield lambda count: None


VERSION = 5  # part of the cache key; increased when the same rows give other ids
# Smaller files are tokenized in about the time that it takes to start a second process.
PARALLEL_BYTES = 8 << 20
CHUNK = 512  # number of rows that a process encodes at a time
LACKS = re.compile(r"lacks the key '[^']*'")
MAX_PLACES = 3  # maximum number of places listed if many rows have the same problem


class RowEncoder(Protocol):
    """Interface of encoders, which convert rows of one type to samples of token ids.

    Implementations are frozen dataclasses. Their fields are options of the dataset and part of the
    cache key.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def id_key(self) -> str:
        """Name of the column with the row's id. Rows may lack this column."""
        ...

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise `UserError` if the tokenizer lacks something that this encoder needs."""
        ...

    def encode(self, row: Row, tokenizer: Tokenizer) -> list[EncodedSample]:
        """Return the samples of one row.

        Raises `BadRow`, or `DataError` from the chat template, if the row cannot be encoded.
        """
        ...


@dataclass(frozen=True)
class EncodingJob:
    """Everything that a process needs to encode rows.

    Attributes:
        form: row encoder
        lengths: length limits
        tokenizer: tokenizer with the dataset's options
        packed: return encoded samples as a compact `TokenTable` instead of lists of token ids
    """

    form: Any
    lengths: LengthLimits
    tokenizer: Tokenizer
    packed: bool = False


@dataclass(frozen=True)
class RowSource:
    """Source of rows to tokenize, with settings for reading and caching.

    Attributes:
        path: file, directory or hub name
        split: split to read, or None for the training split
        cache_dir: folder of the cache; None means `~/.cache/weft`
        num_workers: number of tokenizing processes; None means one per core for large files
        progress: function that returns a context manager showing progress
        columns: columns to rename, as {new name: name in the file}
        name: name for messages; if empty, the path is used
        max_samples: number of samples after which reading stops, without using the cache; None
            means no limit
    """

    path: str
    split: str | None = None
    cache_dir: str | None = None
    num_workers: int | None = None
    progress: Reporter = show_progress
    columns: Columns = field(default_factory=dict)
    name: str = ""
    max_samples: int | None = None


Chunk = list[tuple[str, Row | UnreadableRow | bytes]]  # (place, row, or the pickle of one)
# (row, message, the error if the row is too long)
Problem = tuple[int, str, RowTooLong | None]
# (samples as (row, own id, ids), report, problems)
Outcome = tuple[list[tuple[int, str | None, EncodedSample]], TokenizationReport, list[Problem]]


def tokenize(
    form: RowEncoder, lengths: LengthLimits, tokenizer: Tokenizer, source: RowSource
) -> TokenTable:
    """Return a table of the tokenized rows of `source`, from the cache if possible.

    If there are invalid rows, nothing is written to the cache, and `DataError` is raised with a
    line `FILE:LINE: message` for each of them.
    """
    form.check(tokenizer)
    files = find_files(source.path, source.split)
    if source.max_samples is not None:
        return _add_places(
            _encode_first_samples(
                EncodingJob(form, lengths, tokenizer), files, source, source.max_samples
            ),
            files,
        )
    cache_file = find_cache_file(form, lengths, tokenizer, source, files)
    table = _read_cache(cache_file)
    if table is None:
        table = _tokenize_files(make_job(form, lengths, tokenizer), files, source)
        write_cache(cache_file, table)
    if not len(table):
        raise build_no_rows_error(source, table.report.rows)
    return _add_places(table, files)


def build_no_rows_error(source: RowSource, rows: int) -> DataError:
    """Return the error for a source whose rows are all too long; `rows` is their number."""
    return DataError(
        f"{source.name or source.path}: no row is left: all {rows} are longer than the limits; "
        "raise dataset.max_seqlen or dataset.max_prompt_len"
    )


def _add_places(table: TokenTable, files: Sequence[Path]) -> TokenTable:
    """Add the file and line to each `TemplateOmission` in the table's report, and return the table.

    File names and lines are not cached, since another file can contain the same rows.
    """
    cuts = table.report.cut
    if not cuts:
        return table
    read = (str(place) for file in files for place, _ in read_rows(file))
    places = list(islice(read, max(cut.row for cut in cuts) + 1))
    return replace(
        table,
        report=replace(
            table.report, cut=tuple(replace(cut, place=places[cut.row]) for cut in cuts)
        ),
    )


def make_job(form: RowEncoder, lengths: LengthLimits, tokenizer: Tokenizer) -> EncodingJob:
    """Return a job for encoding rows with the given row encoder, length limits and tokenizer.

    Unless long rows are truncated, the tokenizer of the job rejects very long texts without
    tokenizing them.
    """
    if lengths.max_seqlen is not None and lengths.overlong != "truncate":
        tokenizer = replace(tokenizer, max_tokens=lengths.max_seqlen)
    return EncodingJob(form, lengths, tokenizer)


def encode_rows(job: EncodingJob, chunk: Chunk) -> Outcome:
    """Encode a chunk of rows and return (samples, report, problems).

    Each sample is (index in the chunk, the row's own id or None, encoded sample). Each problem is
    (index in the chunk, message, `RowTooLong` error or None).
    """
    samples: list[tuple[int, str | None, EncodedSample]] = []
    problems: list[Problem] = []
    counts = Counter[str]()
    columns_read = set[str]()
    present = set[str]()
    cuts: list[TemplateOmission] = []
    for index, (_, content) in enumerate(chunk):
        if isinstance(content, bytes):
            content = pickle.loads(content)
        # Encode the row, recording columns and message keys that are read.
        try:
            if isinstance(content, UnreadableRow):
                raise BadRow(content.reason)
            row = TrackedRow(content)
            present.update(name for name, value in content.items() if value not in (None, "", []))
            own_id = read_id(row, job.form.id_key)
            with track_unread_keys() as unused:
                row_samples = job.form.encode(row, job.tokenizer)
            # Apply the length limits.
            for encoded in row_samples:
                unused |= encoded.unused
                cuts += [replace(cut, row=index) for cut in encoded.cut]
                sample, changes = fit_to_limits(encoded, job.lengths, job.tokenizer.bos_id)
                counts.update([*changes, "both"] if len(changes) > 1 else changes)
                if sample is not None:
                    samples.append((index, own_id, sample))
            present |= unused
            columns_read |= row.read - unused
        except (BadRow, DataError) as error:
            if isinstance(error, RowTooLong) and job.lengths.overlong == "drop":
                counts["dropped"] += 1
                columns_read |= row.read
                continue
            problems.append((index, str(error), error if isinstance(error, RowTooLong) else None))
    cut = counts["prompt"], counts["answer"], counts["both"], counts["dropped"]
    report = TokenizationReport(
        len(chunk), *cut, frozenset(columns_read), frozenset(present), merge_omissions(cuts)
    )
    return samples, report, problems


def _tokenize_files(job: EncodingJob, files: Sequence[Path], source: RowSource) -> TokenTable:
    read = (row for file in files for row in read_rows(file))
    collecting = gc.isenabled()
    # The garbage collector would traverse all rows repeatedly, which takes as long as reading them.
    gc.disable()
    try:
        rows: Chunk = []
        for place, row in rename_columns(read, source.columns, source.path):
            rows.append((str(place), row))
    finally:
        if collecting:
            gc.enable()
    workers = source.num_workers
    if workers is None:
        workers = (os.cpu_count() or 1) if are_large(files) else 0
    chunks = [rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)]
    with source.progress(
        f"tokenizing {source.name or Path(source.path).name}", len(rows)
    ) as advance:
        if workers > 1:
            outcomes = encode_in_processes(job, chunks, min(workers, len(chunks)), advance)
        else:
            outcomes = []
            for chunk in chunks:
                outcomes.append(encode_rows(job, chunk))
                advance(len(chunk))
    return _assemble(rows, outcomes)


def are_large(files: Sequence[Path]) -> bool:
    """Return whether the files are large enough to be tokenized by several processes."""
    return sum(file.stat().st_size for file in files) >= PARALLEL_BYTES


def _encode_first_samples(
    job: EncodingJob, files: Sequence[Path], source: RowSource, max_samples: int
) -> TokenTable:
    """Encode rows until there are `max_samples` samples, and return a table of these samples.

    Raises `DataError` at the first invalid row.
    """
    read = (row for file in files for row in read_rows(file))
    rows: Chunk = []
    outcomes: list[Outcome] = []
    num_samples = 0
    for place, row in rename_columns(read, source.columns, source.path):
        rows.append((str(place), row))
        outcomes.append(encode_rows(job, rows[-1:]))
        num_samples += len(outcomes[-1][0])
        if num_samples >= max_samples or outcomes[-1][2]:
            break
    return _assemble(rows, outcomes)


def _assemble(rows: Chunk, outcomes: Sequence[Outcome]) -> TokenTable:
    """Join the tokenized chunks of rows into one table.

    `rows` are all rows, and `outcomes` are the results of tokenizing each chunk. Raises `DataError`
    with the problems of all invalid rows.
    """
    problems: list[Problem] = []
    encoded: list[EncodedSample] = []
    own_ids: list[tuple[int, str | None]] = []
    start = 0
    total = TokenizationReport()
    for samples, report, chunk_problems in outcomes:
        for index, message, long in chunk_problems:
            problems.append((start + index, message, long))
        for index, own_id, _ in samples:
            own_ids.append((start + index, own_id))
        for _, _, sample in samples:
            encoded.append(sample)
        total += replace(report, cut=tuple(replace(cut, row=start + cut.row) for cut in report.cut))
        start += report.rows
    places = [place for place, _ in rows]
    ids, duplicates = assign_ids(own_ids, places)
    if problems := [*problems, *duplicates]:
        raise DataError(format_reports(places, problems))
    ids = [
        f"{id}/{sample.part}" if sample.part else id
        for id, sample in zip(ids, encoded, strict=True)
    ]
    return TokenTable.from_rows(ids, encoded, [row for row, _ in own_ids], total)


def assign_ids(
    own_ids: Sequence[tuple[int, str | None]], places: Sequence[str]
) -> tuple[list[str], list[Problem]]:
    """Assign an id to each row, and return (ids, problems).

    `own_ids` contains (row number, own id) for each row in file order; the own id is None if the
    row has none. Such a row gets its row number as its id, with a prefix if another row has that
    id. If two rows have the same id, the second one is reported as a problem. `places` are the
    locations of all rows, for error messages.
    """
    all_own_ids = {own_id for _, own_id in own_ids if own_id is not None}
    ids: list[str] = []
    problems: list[Problem] = []
    first_rows: dict[str, int] = {}
    for row, own_id in own_ids:
        id = own_id
        if id is None:
            id = str(row)
            while id in all_own_ids:
                id = f"row-{id}"
        first = first_rows.setdefault(id, row)
        if first != row:
            problems.append(
                (
                    row,
                    f"the id {id!r} is taken by {places[first]}; ids are unique in a source",
                    None,
                )
            )
        ids.append(id)
    return ids, problems


def format_reports(places: Sequence[str], problems: Iterable[Problem]) -> list[str]:
    """Return messages on rows with problems, as lines `FILE:LINE: message` in file order.

    All rows that are too long share one line. If every row lacks the same key, the options are
    probably wrong, so a single line reports the problem for all rows.
    """
    problems = sorted(problems, key=lambda problem: problem[0])
    lacks = {match[0] if (match := LACKS.match(message)) else None for _, message, _ in problems}
    if len(problems) == len(places) > 1 and len(lacks) == 1 and None not in lacks:
        message = problems[0][1]
        if "dataset.type=" in message:
            hint = ""
        else:
            hint = "; set dataset.type to the form of these rows"
        return [
            f"{_format_first_places(places, problems)}: each of the {len(places)} rows "
            f"{message}{hint}"
        ]
    long = [problem for problem in problems if problem[2] is not None]
    reports = [_format_too_long(places, long)] if long else []
    return reports + [
        f"{places[row]}: {message}" for row, message, too_long in problems if too_long is None
    ]


def _format_first_places(places: Sequence[str], problems: Sequence[Problem]) -> str:
    """Format the first few files and lines at which the problems occur."""
    distinct_places = list(dict.fromkeys(places[row] for row, _, _ in problems))
    return ", ".join(distinct_places[:MAX_PLACES]) + (
        ", ..." if len(distinct_places) > MAX_PLACES else ""
    )


def _format_too_long(places: Sequence[str], problems: Sequence[Problem]) -> str:
    """Format one message for all rows that are too long.

    It gives their number, the length of the longest one, and advice.
    """
    longest = max(
        (problem[2] for problem in problems if problem[2] is not None), key=lambda long: long.tokens
    )
    count = len({row for row, _, _ in problems})
    return (
        f"{_format_first_places(places, problems)}: {count:,} of {len(places):,} rows are too long "
        f"({longest}); "
        f"raise {longest.option} as far as the model's context allows, or set "
        f"dataset.overlong=drop to leave them out "
        "(truncate to cut them)"
    )


def encode_in_processes(
    job: EncodingJob, chunks: Sequence[Chunk], workers: int, advance: Any
) -> list[Outcome]:
    """Call `encode_rows` on every chunk in `workers` processes, and return the outcomes in order.

    `advance` is called with the number of rows of each finished chunk.
    """
    setup = pickle.dumps(job)
    processes = [start_process() for _ in range(workers)]
    idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
    try:
        for process in processes:
            send_bytes(process, setup)
            idle.put(process)

        def encode(chunk: Chunk) -> Outcome:
            process = idle.get()
            try:
                outcome: Outcome = ask_process(process, chunk)
            finally:
                # Return a dead process too: a thread that waits for a process must fail, not hang.
                idle.put(process)
            advance(len(chunk))
            return outcome

        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(encode, chunks))
    finally:
        for process in processes:
            end_process(process)


def start_process() -> subprocess.Popen[bytes]:
    """Start a worker process that receives a pickled job and then serves calls of `ask_process`.

    The process runs `weft.data.encode_worker`. `multiprocessing` is not used because it would
    import the user's script again. The process has its own session, so that Ctrl-C reaches only the
    parent.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "weft.data.encode_worker"]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )


def ask_process(process: subprocess.Popen[bytes], chunk: Chunk) -> Any:
    """Send a chunk of rows to a worker process and return the outcome of encoding it.

    Raises `UserError` if the process reports an error that does not concern a single row, and
    `RunError` if the process died.
    """
    send_bytes(process, pickle.dumps(chunk))
    answer = _receive(process)
    if isinstance(answer, UserError):
        raise answer
    return answer


def end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def send_bytes(process: subprocess.Popen[bytes], raw: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(len(raw).to_bytes(8, "little") + raw)
        process.stdin.flush()
    except BrokenPipeError as error:
        raise RunError(
            "a tokenizing process ended early (out of memory?); set dataset.num_workers=0"
        ) from error


def _receive(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    size = process.stdout.read(8)
    if len(size) < 8:
        raise RunError(
            "a tokenizing process ended early (out of memory?); set dataset.num_workers=0"
        )
    return pickle.loads(process.stdout.read(int.from_bytes(size, "little")))


# -- the cache


def find_cache_file(
    form: RowEncoder,
    lengths: LengthLimits,
    tokenizer: Tokenizer,
    source: RowSource,
    files: Sequence[Path],
) -> Path:
    options = [VERSION, type(form).__name__.removesuffix("Encoder"), asdict(form), asdict(lengths)]
    options += [dict(source.columns)] if source.columns else []
    text = json.dumps([options, tokenizer.fingerprint, hash_content(list(files))], sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:40]
    if source.cache_dir:
        root = Path(source.cache_dir).expanduser()
    else:
        root = Path.home() / ".cache" / "weft"
    return root / "tokens" / f"{name}.bin"


def _read_cache(file: Path) -> TokenTable | None:
    """Return the table in `file`, or None if the file does not exist or cannot be read."""
    if not file.is_file():
        return None
    try:
        return TokenTable.from_bytes(file.read_bytes())
    except (OSError, DataError, KeyError, json.JSONDecodeError):
        return None


def write_cache(file: Path, table: TokenTable) -> None:
    """Write a table to the cache file atomically.

    If the file cannot be written, prints a note and continues.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, table.to_bytes())
    except OSError as error:
        print(
            f"note: tokenized rows are not cached in {file.parent} ({error.strerror})",
            file=sys.stderr,
        )
