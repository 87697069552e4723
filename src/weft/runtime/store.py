"""Batches by id and key: a worker's tensors, or the Master's descriptions of them. Reading joins what is asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.data.sample import SequenceSample
from weft.errors import DataError, nearest


@dataclass
class _Row:
    """Of one id: which batch holds each key, the batches it needs, and the values that are no tensors."""

    batches: dict[str, int] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    metadata: dict[str, Any] = field(default_factory=dict)


class TensorStore:
    """Holds every batch that some id still needs. Nothing is copied on the way in. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._rows: dict[str, _Row] = {}
        self._batches: dict[int, SequenceSample] = {}
        self._users: dict[int, set[str]] = {}
        self._next = 0

    def __contains__(self, id: str) -> bool:
        return id in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def keys(self, id: str) -> list[str]:
        return list(self._rows[id].batches)

    def put(self, sample: SequenceSample) -> SequenceSample:
        """Take in a batch; a key that an id has already is replaced. Returns the description."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._batches[number], self._users[number] = sample, set(sample.ids)
            for index, id in enumerate(sample.ids):
                row = self._rows.setdefault(id, _Row())
                row.batches.update(dict.fromkeys(sample.keys, number))
                row.held.add(number)
                for old in row.held - {number, *row.batches.values()}:
                    row.held.remove(old)
                    self._release(old, id)
                row.metadata.update({name: values[index] for name, values in sample.metadata.items()})
        return sample.meta()

    def fetch(self, ids: Sequence[str], keys: Iterable[str], optional: Iterable[str] = ()) -> SequenceSample:
        """These keys of these ids, in this order, with all their metadata; `optional` keys where every id has them.

        Raises `DataError` for an id or a key that is not here.
        """
        with self._lock:
            rows = [self._row(id) for id in ids]
            wanted = [*keys, *(key for key in optional if all(key in row.batches for row in rows))]
            by_origin: dict[tuple[int, ...], list[str]] = {}
            for key in wanted:
                missing = next((id for id, row in zip(ids, rows, strict=True) if key not in row.batches), None)
                if missing is not None:
                    close = nearest(key, self.keys(missing)) or self.keys(missing)
                    raise DataError(f"id {missing!r} has no key {key!r}; it has {', '.join(close)}")
                by_origin.setdefault(tuple(row.batches[key] for row in rows), []).append(key)
            columns = dict.fromkeys(name for row in rows for name in row.metadata)
            metadata = {name: [row.metadata.get(name) for row in rows] for name in columns}
            joined = SequenceSample.from_groups(ids, {}, {}, metadata)
            for origin, names in by_origin.items():
                joined = joined.update(self._collect(ids, origin, names))
            return joined

    def batches(self) -> Iterator[SequenceSample]:
        """Everything that is held: ids with the same keys and metadata in one batch each, in the order they came."""
        alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for id, row in self._rows.items():
            alike.setdefault((tuple(row.batches), tuple(row.metadata)), []).append(id)
        for (keys, _), ids in alike.items():
            yield self.fetch(ids, keys)

    def discard(self, ids: Iterable[str]) -> None:
        """Forget these ids; a batch that no id needs any more is freed."""
        with self._lock:
            for id in ids:
                row = self._rows.pop(id, None)
                for number in row.held if row else ():
                    self._release(number, id)

    def _release(self, number: int, id: str) -> None:
        self._users[number].discard(id)
        if not self._users[number]:
            del self._users[number], self._batches[number]

    def _row(self, id: str) -> _Row:
        if id not in self._rows:
            raise DataError(f"id {id!r} is not in the store of {len(self._rows)} ids")
        return self._rows[id]

    def _collect(self, ids: Sequence[str], origin: tuple[int, ...], keys: list[str]) -> SequenceSample:
        by_batch: dict[int, list[str]] = {}
        for id, number in zip(ids, origin, strict=True):
            by_batch.setdefault(number, []).append(id)
        parts = [self._batches[number].select(ids=chosen, keys=keys) for number, chosen in by_batch.items()]
        joined = parts[0] if len(parts) == 1 else SequenceSample.gather(parts, keys)
        bare = SequenceSample(joined.ids, joined.lengths, joined.offsets, joined.data)
        return bare if bare.ids == tuple(ids) else bare.select(ids=ids)
