"""Samples that differ by epoch.

Rows are encoded again with random draws that depend only on seed, epoch and id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from weft.data.columns import rows_of
from weft.data.lengths import Encoded, fit
from weft.data.mixture import generator
from weft.data.rows import Row
from weft.data.sample import SequenceSample
from weft.data.sources import Unreadable
from weft.data.table import Report, TokenTable
from weft.data.tokenizer import Tokenizer
from weft.data.tokenizing import Job, Source
from weft.data.window import Window


@runtime_checkable
class InParts(Protocol):
    """Form whose rows can make several samples, each of which can be encoded alone."""

    def encode_part(self, row: Row, tokenizer: Tokenizer, id: str) -> Encoded: ...


@dataclass(frozen=True)
class Redrawn:
    """Samples of `table`, encoded again for each epoch with its random draws.

    The table has the samples without draws: with every tag, and truncated at the end. No sample has
    more tokens than that in any epoch.
    """

    job: Job
    source: Source
    table: TokenTable
    seed: int
    window: Window | None

    def at(self, indices: Sequence[int], epoch: int, name: str) -> SequenceSample:
        """Return these samples as one `SequenceSample`; `name` is the name of their source."""
        encoded = [self._encode(index, epoch, name) for index in indices]
        ids = [self.table.sample.ids[index] for index in indices]
        return TokenTable.build(ids, encoded, [0] * len(ids), Report()).at(range(len(ids)))

    def _encode(self, index: int, epoch: int, name: str) -> Encoded:
        id = self.table.sample.ids[index]
        row = self._rows[int(self.table.rows[index])]
        draw = generator(self.seed, f"sample|{name}|{id}", epoch)
        encoded = self._sample(row, id, self.job.tokenizer.drawing(draw))
        if self.window is not None:
            encoded = self.window.of(encoded, draw)
        kept, _ = fit(encoded, self.job.lengths, self.job.tokenizer.bos_id)
        return self.table.encoded(index) if kept is None else kept

    def _sample(self, row: Row, id: str, tokenizer: Tokenizer) -> Encoded:
        form = self.job.form
        if isinstance(form, InParts):
            return form.encode_part(row, tokenizer, id)
        found: list[Encoded] = form.encode(row, tokenizer)
        return next(one for one in found if not one.part or id.endswith(f"/{one.part}"))

    @cached_property
    def _rows(self) -> list[Row]:
        source = self.source
        rows: list[Any] = [row for _, row in rows_of(source.path, source.split, source.columns)]
        return [{} if isinstance(row, Unreadable) else row for row in rows]
