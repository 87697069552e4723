"""Samples that differ between epochs.

The rows are encoded again in each epoch, with random draws that depend only on the seed, the epoch
and the sample id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from weft.data.columns import read_renamed_rows
from weft.data.lengths import EncodedSample, RandomWindow, fit_to_limits
from weft.data.mixture import make_generator
from weft.data.rows import Row
from weft.data.sample import SequenceSample
from weft.data.sources import UnreadableRow
from weft.data.table import TokenizationReport, TokenTable
from weft.data.tokenizer import Tokenizer
from weft.data.tokenizing import EncodingJob, RowSource


@runtime_checkable
class PartEncoder(Protocol):
    """Row encoder that can make several samples from a row and encode each of them separately."""

    def encode_part(self, row: Row, tokenizer: Tokenizer, id: str) -> EncodedSample: ...


@dataclass(frozen=True)
class EpochSamples:
    """Samples that are encoded again in each epoch, because their encoding is partly random.

    For example, a long row can be cropped to a different window in each epoch.

    Attributes:
        job: encoder, length limits and tokenizer for the rows
        source: source of the rows
        table: the same samples, encoded without random choices; their token counts are upper bounds
            of the counts in all epochs
        seed: seed of the random choices
        window: random cropper for rows that are too long, or None
    """

    job: EncodingJob
    source: RowSource
    table: TokenTable
    seed: int
    window: RandomWindow | None

    def take(self, indices: Sequence[int], epoch: int, name: str) -> SequenceSample:
        """Return the samples at `indices`, encoded for `epoch`, as one `SequenceSample`.

        The random draws for a sample depend on the seed, the epoch, the sample id and `name`, the
        name of the source.
        """
        encoded = [self._encode(index, epoch, name) for index in indices]
        ids = [self.table.sample.ids[index] for index in indices]
        return TokenTable.from_rows(ids, encoded, [0] * len(ids), TokenizationReport()).take(
            range(len(ids))
        )

    def _encode(self, index: int, epoch: int, name: str) -> EncodedSample:
        id = self.table.sample.ids[index]
        row = self._source_rows[int(self.table.rows[index])]
        draw = make_generator(self.seed, f"sample|{name}|{id}", epoch)
        encoded = self._encode_sample(row, id, self.job.tokenizer.with_draw(draw))
        if self.window is not None:
            encoded = self.window.apply(encoded, draw)
        sample, _ = fit_to_limits(encoded, self.job.lengths, self.job.tokenizer.bos_id)
        return self.table.get_encoded(index) if sample is None else sample

    def _encode_sample(self, row: Row, id: str, tokenizer: Tokenizer) -> EncodedSample:
        form = self.job.form
        if isinstance(form, PartEncoder):
            return form.encode_part(row, tokenizer, id)
        samples: list[EncodedSample] = form.encode(row, tokenizer)
        return next(one for one in samples if not one.part or id.endswith(f"/{one.part}"))

    @cached_property
    def _source_rows(self) -> list[Row]:
        source = self.source
        rows: list[Any] = []
        for _, row in read_renamed_rows(source.path, source.split, source.columns):
            rows.append(row)
        return [{} if isinstance(row, UnreadableRow) else row for row in rows]
