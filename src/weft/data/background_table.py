"""Table of samples that worker processes tokenize during training, or `take` on demand."""

from __future__ import annotations

import pickle
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.data.mixture import Index
from weft.data.sample import SequenceSample
from weft.data.table import TokenizationReport, TokenTable, cast_to_edge_dtypes
from weft.data.tokenizing import (
    CHUNK,
    EncodingJob,
    Outcome,
    Problem,
    ask_process,
    encode_rows,
    end_process,
    format_reports,
    send_bytes,
    start_process,
    write_cache,
)
from weft.data.turns import merge_omissions
from weft.errors import DataError

# Maximum seconds that the end of a run waits for a table to be written to the cache.
FINISH_SECONDS = 20.0
# States of a sample.
WAITING = 0
UNDER_WAY = 1
DONE = 2
# (samples with the numbers of their rows in the chunk, problems of other rows)
Packed = tuple[TokenTable, list[Problem]]


def pack_outcome(outcome: Outcome) -> Packed:
    """Pack the samples in an outcome of `encode_rows` into a table, and return (table, problems).

    The table needs a tenth of the memory of the encoded samples.
    """
    samples, report, problems = outcome
    numbers = [index for index, _, _ in samples]
    return TokenTable.from_rows(
        [str(index) for index in numbers], [sample for _, _, sample in samples], numbers, report
    ), problems


class BackgroundTokenTable:
    """Table that is used like `TokenTable`, but tokenizes most of its samples during training.

    The ids and row numbers of all samples are known from the beginning. Worker processes run from
    `start` to `close`. They first tokenize the samples that training needs next, as set by
    `prioritize`. `take` does not wait for the workers but tokenizes missing samples itself. The
    complete table is written to the cache that `tokenize` uses.

    If a worker fails, the next call of `take` raises the error: `DataError` for an invalid row,
    `RunError` if the worker process died.

    Attributes:
        ids: id of each sample
        rows: row number of each sample
        check_longest: function that is called with the new maximum sequence length, in tokens,
            whenever this maximum grows; None if no check is needed
    """

    def __init__(
        self,
        job: EncodingJob,
        places: Sequence[str],
        pickled: list[bytes],
        ids: tuple[str, ...],
        rows: npt.NDArray[np.int32],
        columns: tuple[str, ...],
        cache_file: Path,
    ) -> None:
        self.ids = ids
        self.rows = rows
        self.check_longest: Callable[[int], None] | None = None
        self._job = job
        self._places = places
        self._pickled = pickled
        self._columns = columns
        self._cache_file = cache_file
        self._bytes = np.asarray([len(pickled[row]) for row in rows.tolist()], dtype=np.int64)
        self._state = np.zeros(len(ids), dtype=np.int8)
        # Chunk of each finished sample, and its index in the chunk.
        self._chunk_of, self._place_of = np.full((2, len(ids)), -1, dtype=np.int64)
        self._samples: list[SequenceSample] = []  # by chunk
        self._reports: list[TokenizationReport] = []
        # Samples in the order in which the processes encode them.
        self._queue: Index = np.arange(len(ids), dtype=np.int64)
        self._next = 0  # index of the next sample in the queue
        self._longest = self._checked = 0
        self._complete_table: TokenTable | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition(threading.RLock())

    # -- samples

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> SequenceSample:
        return self.take([index])

    def take(self, indices: Sequence[int]) -> SequenceSample:
        """Return the samples at `indices`, tokenizing missing ones in the calling process.

        The data have the dtypes used in batches, such as int64 token ids.
        """
        with self._changed:
            missing = []
            for index in indices:
                if self._state[index] == WAITING:
                    missing.append(index)
            self._state[missing] = UNDER_WAY
        self._encode_here(missing)
        with self._changed:
            # A worker is encoding these samples. Encode them here too instead of waiting.
            others = []
            for index in indices:
                if self._state[index] == UNDER_WAY:
                    others.append(index)
        extra = self._encode(others)[0].sample if others else None
        self._raise_failure()
        with self._changed:
            if self._complete_table is not None:
                return self._complete_table.take(indices)
            sample = self._gather(indices, others, extra)
        return cast_to_edge_dtypes(replace(sample, ids=tuple(self.ids[index] for index in indices)))

    def _gather(
        self, indices: Sequence[int], others: Sequence[int], extra: SequenceSample | None
    ) -> SequenceSample:
        """Return the samples at `indices` as one `SequenceSample`, in the given order.

        Most samples come from finished chunks. `extra` contains the samples that are not in a chunk
        yet. Their indices are `others`, in the same order.
        """
        extra_places = {index: place for place, index in enumerate(others)}
        # chunk (-1: `extra`) -> [(position in the result, index in the chunk)]
        entries_by_chunk: dict[int, list[tuple[int, int]]] = {}
        for position, index in enumerate(indices):
            if index in extra_places:
                chunk, place = -1, extra_places[index]
            else:
                chunk, place = int(self._chunk_of[index]), int(self._place_of[index])
            entries_by_chunk.setdefault(chunk, []).append((position, place))
        parts = []
        order = list[int]()
        for chunk, entries in entries_by_chunk.items():
            sample = self._samples[chunk] if chunk >= 0 else extra
            assert sample is not None, "`extra` has the samples outside the chunks"
            part = sample.at([place for _, place in entries])
            parts.append(replace(part, ids=tuple(str(position) for position, _ in entries)))
            for position, _ in entries:
                order.append(position)
        return SequenceSample.gather(parts).at(np.argsort(order).tolist())

    def build_table(self) -> TokenTable:
        """Return the complete table, after all samples are tokenized.

        Samples that no worker has started on are tokenized in the calling process. For the others,
        this method waits for the workers.
        """
        while (samples := self._take_chunk()).size:
            self._encode_here(samples.tolist())
        with self._changed:
            while self._complete_table is None and self._failure is None:
                self._changed.wait()
        self._raise_failure()
        assert self._complete_table is not None, "all samples are there"
        return self._complete_table

    def build_report(self) -> TokenizationReport | None:
        """Return the report on all rows, or None if some samples are not tokenized yet."""
        if self._complete_table is None:
            return None
        report = self._complete_table.report
        return replace(
            report, cut=tuple(replace(cut, place=self._places[cut.row]) for cut in report.cut)
        )

    def compute_max_seqlen(self) -> int:
        """Return the length of the longest sequence among the samples tokenized so far."""
        return self._longest

    def count_tokens(self) -> npt.NDArray[np.int64]:
        return self.build_table().count_tokens()

    def compute_seqlens(self) -> npt.NDArray[np.int64]:
        return self.build_table().compute_seqlens()

    def estimate_tokens(self) -> npt.NDArray[Any]:
        """Return the estimated number of tokens of each sample.

        The estimate is the size of the sample's row in bytes, times the average number of tokens
        per byte in the rows tokenized so far.
        """
        with self._changed:
            tokens = sum(int(sample.token_costs().sum()) for sample in self._samples)
            of_bytes = int(self._bytes[self._state == DONE].sum())
        return self._bytes * (tokens / max(1, of_bytes))

    # -- processes

    def start(self, workers: int) -> None:
        """Start `workers` processes that together tokenize all samples."""
        job = pickle.dumps(replace(self._job, packed=True))
        for number in range(min(workers, -(-len(self) // CHUNK))):
            thread = threading.Thread(
                target=self._run_process, args=(job,), name=f"weft-tokenizing-{number}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def prioritize(self, order: Index) -> None:
        """Make the workers tokenize the samples at the indices `order` first, in this order."""
        others = np.ones(len(self), dtype=np.bool_)
        others[order] = False
        with self._changed:
            self._queue = np.concatenate([order, np.flatnonzero(others)])
            self._next = 0

    def close(self) -> None:
        """Stop the worker processes.

        If all samples are tokenized, waits until the table is written to the cache.
        """
        with self._changed:
            self._closed = not (self._state == DONE).all()
            processes = list(self._processes) if self._closed else []
        for process in processes:
            process.kill()  # its thread then ends too
        for thread in self._threads:
            thread.join(FINISH_SECONDS)

    def _run_process(self, job: bytes) -> None:
        """Run a worker process that encodes chunks of samples until none are left.

        `job` is the pickled `EncodingJob`. This method is the target of a thread.
        """
        process = None
        try:
            with self._changed:
                if self._closed:
                    return
                process = start_process()
                self._processes.append(process)
            send_bytes(process, job)
            while (samples := self._take_chunk()).size:
                rows = self.rows[samples].tolist()
                self.add_samples(
                    rows, ask_process(process, [("", self._pickled[row]) for row in rows])
                )
        except BaseException as error:  # raised by the next call of `take`
            self._fail(error)
        finally:
            if process is not None:
                end_process(process)

    def _take_chunk(self) -> Index:
        """Claim the next chunk of the queue and return the indices of its samples, in row order.

        Returns an empty array if the queue is empty, after `close`, or after an error.
        """
        samples: list[int] = []
        with self._changed:
            while (
                self._next < len(self._queue)
                and len(samples) < CHUNK
                and not self._closed
                and self._failure is None
            ):
                sample = int(self._queue[self._next])
                self._next += 1
                if self._state[sample] == WAITING:
                    self._state[sample] = UNDER_WAY
                    samples.append(sample)
        return np.asarray(sorted(samples), dtype=np.int64)

    def _encode_here(self, samples: Sequence[int]) -> None:
        """Encode samples in the calling process.

        The caller must have set their state to `UNDER_WAY`, so that no worker process takes them.
        """
        if samples:
            ordered = sorted(set(samples))
            self.add_samples(self.rows[ordered].tolist(), self._encode(ordered))

    def _encode(self, samples: Sequence[int]) -> Packed:
        rows = self.rows[list(samples)].tolist()
        table, problems = pack_outcome(
            encode_rows(self._job, [("", self._pickled[row]) for row in rows])
        )
        return replace(table, sample=self._with_columns(table.sample)), problems

    def _with_columns(self, sample: SequenceSample) -> SequenceSample:
        """Return `sample` with all metadata columns of the table.

        Columns that the sample lacks are filled with None.
        """
        nothing = (None,) * sample.num_ids
        assert set(sample.metadata) <= set(self._columns), "columns depend only on the row's shape"
        return replace(
            sample, metadata={name: sample.metadata.get(name, nothing) for name in self._columns}
        )

    def add_samples(self, rows: Sequence[int], packed: Packed) -> None:
        """Add the samples of a chunk of rows, or record an error if some of the rows are invalid.

        `rows` are the row numbers of the chunk, and `packed` is the result of encoding it.
        """
        table, problems = packed
        if problems:
            row_problems = [(rows[index], message, long) for index, message, long in problems]
            self._fail(DataError(format_reports(self._places, row_problems)))
            return
        samples = np.searchsorted(self.rows, [rows[index] for index in table.rows.tolist()])
        cut = tuple(replace(cut, row=rows[cut.row]) for cut in table.report.cut)
        with self._changed:
            if len(samples) < len(rows):
                expected = int(np.isin(self.rows, rows).sum())
            else:
                expected = len(rows)
            assert len(samples) == expected, "a row of the table has no sample"
            self._chunk_of[samples], self._place_of[samples] = (
                len(self._samples),
                np.arange(len(samples)),
            )
            self._state[samples] = DONE
            self._samples.append(self._with_columns(table.sample))
            self._reports.append(replace(table.report, cut=cut))
            self._longest = max(self._longest, table.compute_max_seqlen())
            is_complete = bool((self._state == DONE).all())
        for row in rows:
            self._pickled[row] = b""
        if is_complete:
            # Join all chunks in a thread, so that training does not wait for the join.
            thread = threading.Thread(target=self._finish, name="weft-tokenized", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _finish(self) -> None:
        try:
            table = self._join()
            with self._changed:
                self._complete_table = table
                self._samples.clear()
                self._changed.notify_all()
            write_cache(self._cache_file, table)
        except BaseException as error:
            self._fail(error)

    def _join(self) -> TokenTable:
        """Join all chunks into the table that `tokenize` would return for the same rows."""
        keys = self._samples[self._chunk_of[0]].keys
        nonempty = [number for number, sample in enumerate(self._samples) if sample.num_ids]
        starts = np.zeros(len(self._samples), dtype=np.int64)
        starts[nonempty] = np.cumsum(
            [0, *(self._samples[number].num_ids for number in nonempty[:-1])]
        )
        chunk_samples = []
        for number in nonempty:
            chunk_samples.append(
                replace(
                    self._samples[number],
                    ids=tuple(f"{number}/{id}" for id in self._samples[number].ids),
                )
            )
        order = starts[self._chunk_of] + self._place_of
        sample = SequenceSample.gather(chunk_samples, keys).at(order.tolist())
        cuts = sorted(
            (cut for report in self._reports for cut in report.cut), key=lambda cut: cut.row
        )
        report = replace(
            sum((replace(report, cut=()) for report in self._reports), TokenizationReport()),
            cut=merge_omissions(cuts),
        )
        return TokenTable(replace(sample, ids=self.ids), self.rows, report)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if not self._closed and self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self.check_longest is not None and self._longest > self._checked:
            self.check_longest(self._longest)
            self._checked = self._longest
