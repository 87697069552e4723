"""Storage of samples by id and key, and the record of which devices have which tensors.

Workers store tensors, and the master only metadata. The driver keeps a `TensorLocations`, from which
it finds the transfers that a device needs before a call.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from weft.data.sample import SequenceSample
from weft.errors import DataError, find_nearest
from weft.graph.ready import StateBlocks


class TensorStore:
    """Thread-safe store of batches, from which samples are read by id and key.

    Batches are stored without copying their tensors. A batch is kept until none of its ids is
    needed any more.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._ids = StateBlocks(_StoredBlock, self._copy_block)
        self._batches: dict[int, _StoredBatch] = {}
        # for tensors and metadata: batch -> number of blocks that need it
        self._readers: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
        self._next_number = 0

    def __contains__(self, id: str) -> bool:
        return id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def put(self, sample: SequenceSample) -> SequenceSample:
        """Add a batch and return its metadata.

        Values of keys that an id already has are replaced.
        """
        with self._lock:
            number = self._next_number
            self._next_number = self._next_number + 1
            self._batches[number] = _StoredBatch(sample)
            for block in self._ids.separate_states(sample.ids):
                before = block.read()
                block.keys.update(dict.fromkeys(sample.keys, number))
                block.columns.update(dict.fromkeys(sample.metadata, number))
                self._update_counts(block, before)
            self._free_batches([number])
        return sample.meta()

    def fetch(
        self, ids: Sequence[str], keys: Iterable[str], optional: Iterable[str] = ()
    ) -> SequenceSample:
        """Return the tensors of the given ids and keys, with all metadata of these ids.

        The samples are in the order of `ids`. A key in `optional` is included only if every id has
        it. Raises `DataError` if an id or a key is missing.
        """
        with self._lock:
            ids = tuple(ids)
            parts = self._find_blocks(ids)
            all_keys = list(keys)
            for key in optional:
                if all(key in block.keys for block in parts):
                    all_keys.append(key)
            by_origin: dict[tuple[int, ...], list[str]] = {}
            for key in all_keys:
                missing = next((block for block in parts if key not in block.keys), None)
                if missing is not None:
                    close = find_nearest(key, missing.keys) or list(missing.keys)
                    raise DataError(
                        f"id {parts[missing][0]!r} has no key {key!r}; it has {', '.join(close)}"
                    )
                by_origin.setdefault(tuple(block.keys[key] for block in parts), []).append(key)
            samples = []
            for origin, names in by_origin.items():
                samples.append(self._collect(ids, parts, origin, names))
            return SequenceSample(
                ids,
                {key: sample.lengths[key] for sample in samples for key in sample.keys},
                {key: sample.offsets[key] for sample in samples for key in sample.keys},
                {key: value for sample in samples for key, value in sample.data.items()},
                self._collect_metadata(ids, parts),
            )

    def iterate_batches(self) -> Iterator[SequenceSample]:
        """Yield all stored samples in batches.

        Ids with the same keys and metadata columns are in one batch.
        """
        ids_of_columns: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for id, block in self._ids.items():
            ids_of_columns.setdefault((tuple(block.keys), tuple(block.columns)), []).append(id)
        for (keys, _), ids in ids_of_columns.items():
            yield self.fetch(ids, keys)

    def discard(self, ids: Iterable[str]) -> None:
        """Remove these ids, and free the batches that no other id needs."""
        with self._lock:
            for block, _, empty in self._ids.discard(ids):
                if empty:
                    before = block.read()
                    block.keys = {}
                    block.columns = {}
                    self._update_counts(block, before)

    def _copy_block(self, block: _StoredBlock) -> _StoredBlock:
        new = _StoredBlock(dict(block.keys), dict(block.columns))
        self._update_counts(new, (set(), set()))
        return new

    def _update_counts(self, block: _StoredBlock, before: tuple[set[int], set[int]]) -> None:
        """Update how many blocks refer to each batch, after a block has changed.

        A block is a group of ids whose data are in the same batches. `block` is the changed block,
        and `before` is the result of `block.read()` before the change. Batches that no block needs
        any more are freed.
        """
        for readers, old, new in zip(self._readers, before, block.read(), strict=True):
            readers.update(new - old)
            readers.subtract(old - new)
        self._free_batches(set().union(*before))

    def _free_batches(self, numbers: Iterable[int]) -> None:
        """Free batches that no remaining sample uses.

        `numbers` identifies the batches to check. If only the metadata of a batch is needed, only
        its tensors are freed.
        """
        for number in numbers:
            tensors, metadata = (readers[number] > 0 for readers in self._readers)
            if not tensors and not metadata:
                del self._batches[number], self._readers[0][number], self._readers[1][number]
            elif not tensors and self._batches[number].sample.keys:
                sample = self._batches[number].sample
                self._batches[number].sample = SequenceSample(
                    sample.ids, {}, {}, {}, sample.metadata
                )

    def _find_blocks(self, ids: Sequence[str]) -> dict[_StoredBlock, list[str]]:
        """Return a mapping from each stored block to the given ids that are in it.

        Ids belong to the same block if their data are in the same batches. Raises `DataError` if an
        id is missing.
        """
        parts = {}
        for block, chosen in self._ids.group_by_block(ids).items():
            if block is None:
                raise DataError(f"id {chosen[0]!r} is not in the store of {len(self._ids)} ids")
            parts[block.state] = chosen
        return parts

    def _collect_metadata(
        self, ids: tuple[str, ...], parts: Mapping[_StoredBlock, list[str]]
    ) -> dict[str, tuple[Any, ...]]:
        """Return all metadata columns of these ids, in the order of `ids`.

        `parts` maps each block (`_StoredBlock`) to the ids that it contains. If an id has no value
        in a column, its value is None.
        """
        columns: dict[str, tuple[Any, ...]] = {}
        for name in dict.fromkeys(name for block in parts for name in block.columns):
            if len(parts) == 1:
                (block,) = parts
                columns[name] = tuple(self._batches[block.columns[name]].read_column(name, ids))
                continue
            value: dict[str, Any] = {}
            for block, chosen in parts.items():
                if name in block.columns:
                    value.update(
                        zip(
                            chosen,
                            self._batches[block.columns[name]].read_column(name, chosen),
                            strict=True,
                        )
                    )
            columns[name] = tuple([value.get(id) for id in ids])
        return columns

    def _collect(
        self,
        ids: tuple[str, ...],
        parts: Mapping[_StoredBlock, list[str]],
        origin: Sequence[int],
        keys: list[str],
    ) -> SequenceSample:
        """Return a sample with the tensors of the given ids and keys, in the order of `ids`.

        `parts` maps each block (`_StoredBlock`) to the given ids that belong to it. For each block
        in `parts`, `origin` has the number of the batch that contains the tensors.
        """
        by_batch: dict[int, list[str]] = {}
        for number, chosen in zip(origin, parts.values(), strict=True):
            by_batch.setdefault(number, []).extend(chosen)
        if len(by_batch) == 1:
            return self._batches[origin[0]].sample.select(ids=ids, keys=keys)
        samples = []
        for number, chosen in by_batch.items():
            samples.append(self._batches[number].sample.select(ids=chosen, keys=keys))
        return SequenceSample.gather(samples, keys).select(ids=ids)


@dataclass
class _StoredBatch:
    """Batch in the store. Its tensors are removed once no id needs them."""

    sample: SequenceSample

    @cached_property
    def row_of_id(self) -> Mapping[str, int]:
        return {id: index for index, id in enumerate(self.sample.ids)}

    def read_column(self, name: str, ids: Sequence[str]) -> Sequence[Any]:
        """Return the values of a metadata column for these ids."""
        column = self.sample.metadata[name]
        if self.sample.ids == ids:
            return column
        return [column[self.row_of_id[id]] for id in ids]


@dataclass(eq=False)
class _StoredBlock:
    """Record of the stored batches that contain the data of a group of sample ids.

    All ids of the group have their data in the same batches. Each stored batch has a number that
    identifies it.

    Attributes:
        keys: For each key, the number of the batch that has its values.
        columns: For each metadata column, the number of the batch that has its values.
    """

    keys: dict[str, int] = field(default_factory=dict)  # key -> batch number
    columns: dict[str, int] = field(default_factory=dict)  # metadata column -> batch number

    def read(self) -> tuple[set[int], set[int]]:
        """Return two sets of batch numbers: batches with key values, and batches with metadata.

        Only values and metadata of this block's ids are considered.
        """
        return set(self.keys.values()), set(self.columns.values())


# -- tensors of many devices


DRIVER = -1  # the driver's store: the loader's rows and outputs of host functions


@dataclass(frozen=True)
class TensorRequest:
    """Request for tensors that a command needs.

    Attributes:
        rank: Device that has the tensors.
        ids: Ids of the samples.
        keys: Keys of the tensors.
    """

    rank: int
    ids: tuple[str, ...]
    keys: tuple[str, ...]


class TensorLocations:
    """Record of which ranks have which tensors, by sample id and key.

    It is not thread-safe: callers must hold a lock.
    """

    def __init__(self) -> None:
        self._ids = StateBlocks(_KeyLocations, _KeyLocations.copy)

    def record_computed(self, rank: int, ids: Sequence[str], keys: Sequence[str]) -> None:
        """Record that a rank has computed new values of these keys for these ids.

        Copies on other ranks become invalid. A key that the rank has already announced early is
        left unchanged, because the announced values are the final ones, so copies of them stay
        valid.
        """
        for locations in self._ids.separate_states(ids):
            for key in keys:
                if rank not in locations.holders.get(key, ()):
                    locations.holders[key] = {rank}
                    locations.incoming.pop(key, None)

    def record_transfer(self, rank: int, ids: Sequence[str], keys: Sequence[str]) -> None:
        """Record that a copy of these keys is being sent to a rank.

        The copy need not be sent again, but the rank cannot pass it on to others yet.
        """
        for locations in self._ids.separate_states(ids):
            for key in keys:
                locations.incoming.setdefault(key, set()).add(rank)

    def record_copy(self, rank: int, ids: Sequence[str], keys: Sequence[str]) -> None:
        """Record that a rank has valid values of these keys for these ids.

        Values on other ranks stay valid too.
        """
        for locations in self._ids.separate_states(ids):
            for key in keys:
                locations.holders.setdefault(key, set()).add(rank)

    def select_available(self, ids: Sequence[str], keys: Iterable[str]) -> list[str]:
        """Return those of `keys` that are available for all ids.

        A key is available for an id if at least one rank has the tensor.
        """
        parts = self._ids.group_by_block(ids)
        available: list[str] = []
        for key in keys:
            if all(block is not None and key in block.state.holders for block in parts):
                available.append(key)
        return available

    def find_missing(
        self, rank: int, ids: Sequence[str], keys: Iterable[str]
    ) -> list[TensorRequest]:
        """Return requests for the tensors of these ids and keys that the rank does not have yet.

        Tensors that are already being sent to the rank are not requested. All keys of an id that
        come from the same rank are in one request. If both a device and the driver have a tensor,
        it is requested from the device with the lowest rank. A key that no rank has is left out; an
        error is raised when the key is read.
        """
        transfers: dict[tuple[int, tuple[str, ...]], list[str]] = {}
        all_keys = list(keys)
        for block, chosen in self._ids.group_by_block(ids).items():
            locations = _KeyLocations() if block is None else block.state
            by_holder = dict[int, list[str]]()
            for key in all_keys:
                holders = locations.holders.get(key, set())
                if holders and rank not in holders and rank not in locations.incoming.get(key, ()):
                    holder = min(holders - {DRIVER}, default=DRIVER)
                    by_holder.setdefault(holder, []).append(key)
            for holder, missing in by_holder.items():
                transfers.setdefault((holder, tuple(missing)), []).extend(chosen)
        return [
            TensorRequest(holder, tuple(ids), keys) for (holder, keys), ids in transfers.items()
        ]

    def discard(self, ids: Iterable[str]) -> dict[int, list[str]]:
        """Remove `ids` from the record, and return the removed ids by rank.

        A rank's list has the ids for which the rank has tensors or is being sent tensors.
        """
        ids_by_rank: dict[int, list[str]] = {}
        for locations, chosen, _ in self._ids.discard(ids):
            for rank in set().union(*locations.holders.values(), *locations.incoming.values()):
                ids_by_rank.setdefault(rank, []).extend(chosen)
        return ids_by_rank


@dataclass(eq=False)
class _KeyLocations:
    """Ranks that have the tensors of a group of sample ids, by key.

    All ids of the group have their tensors on the same ranks.

    Attributes:
        holders: Ranks that have the tensors of each key.
        incoming: Ranks to which the tensors of each key are already being sent.
    """

    holders: dict[str, set[int]] = field(default_factory=dict)
    incoming: dict[str, set[int]] = field(default_factory=dict)

    def copy(self) -> _KeyLocations:
        holders = {key: set(ranks) for key, ranks in self.holders.items()}
        incoming = {key: set(ranks) for key, ranks in self.incoming.items()}
        return _KeyLocations(holders, incoming)
