"""Batches of samples, in an order that depends only on the data, the seed and the epoch.

The position of a loader is (epoch, batch index).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from weft.data import splits
from weft.data.background_table import BackgroundTokenTable
from weft.data.datasets.base import (
    MapDataset,
    ResumableStream,
    StreamDataset,
    TableDataset,
    TokenizedDataset,
)
from weft.data.mixture import (
    Index,
    SourceShare,
    compute_epoch_order,
    count_per_epoch,
    make_generator,
    pair_short,
)
from weft.data.sample import SequenceSample
from weft.errors import DataError, UserError

# Fields of `BatchingOptions` that are always part of the fingerprint. Other fields are part of it
# only if they differ from their defaults.
SIZE_FIELDS = ("num_ids", "num_tokens", "option")
# Samples used for the memory forecast while some rows are not tokenized yet.
MAX_FORECAST_SAMPLES = 512
NUM_LARGE_BATCHES = 8  # number of largest batches in the memory forecast, and of evenly spread ones


@dataclass(frozen=True)
class BatchingOptions:
    """Options for dividing samples into batches. Exactly one of `num_ids` and `num_tokens` is set.

    If `mixing` is above 0, random pairs of short samples are formed (see `pair_short`). The two
    samples of a pair are in the same batch and together count as one id.

    Attributes:
        num_ids: number of sample ids per batch
        num_tokens: maximum number of tokens per batch
        option: name of the option that sets the token limit, for error messages
        by_length: sort the samples by length, shortest first
        mixing: probability that a short sample is selected for pairing
        mixing_below: number of tokens below which a sample counts as short
    """

    num_ids: int | None = None
    num_tokens: int | None = None
    option: str = "dataset.train_tokens_per_batch"
    by_length: bool = False
    mixing: float = 0.0
    mixing_below: int = 256

    @property
    def needs_costs(self) -> bool:
        """Return whether the division into batches depends on the token counts of the samples."""
        return self.num_tokens is not None or self.by_length or self.mixing > 0

    def compute_bounds(self, costs: npt.NDArray[np.int64]) -> list[int]:
        """Return the boundaries of the batches, given the token count of each sample.

        Batch i consists of the samples from `bounds[i]` up to, but not including, `bounds[i + 1]`.
        Raises `ConfigError` if a single sample exceeds the token limit of a batch.
        """
        if self.num_tokens is not None:
            return splits.split_by_budget(costs, self.num_tokens, self.option)
        assert self.num_ids is not None
        return [*range(0, len(costs), self.num_ids), len(costs)]


@dataclass(frozen=True)
class SourceSubset:
    """Subset of a source's samples, such as its training or validation samples.

    Attributes:
        name: name of the source
        dataset: dataset with all samples of the source
        indices: indices of the subset's samples in `dataset`; int64
        prefix: prepend the source name to sample ids, so that ids of different sources do not
            collide
    """

    name: str
    dataset: MapDataset
    indices: Index
    prefix: bool = False

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> SequenceSample:
        """Return one sample. Its metadata contains the name of the source as `source`.

        Raises `DataError` if the dataset does not return a `SequenceSample` with exactly one id.
        """
        if not 0 <= index < len(self.indices):
            raise IndexError(index)
        sample = self.dataset[int(self.indices[index])]
        if not isinstance(sample, SequenceSample) or sample.num_ids != 1:
            if isinstance(sample, SequenceSample):
                description = f"{sample.num_ids} ids"
            else:
                description = type(sample).__name__
            raise DataError(
                f"{self.name}[{index}]: a map-style dataset returns a SequenceSample of one id, "
                f"not {description}"
            )
        ids = (f"{self.name}/{sample.ids[0]}",) if self.prefix else sample.ids
        return replace(sample, ids=ids, metadata={"source": (self.name,), **sample.metadata})

    def take(self, indices: Sequence[int], epoch: int | None = None) -> SequenceSample:
        """Return the samples at `indices` of this subset as one `SequenceSample`.

        If the samples differ between epochs, returns the samples of `epoch`.
        """
        # A subclass of `TableDataset` may make other samples than the table has.
        if (
            not isinstance(self.dataset, TableDataset)
            or type(self.dataset).__getitem__ is not TableDataset.__getitem__
        ):
            return SequenceSample.gather([self[index] for index in indices])
        rows = self.indices[np.asarray(indices, dtype=np.int64)].tolist()
        if epoch is not None and self.dataset.epoch_samples is not None:
            chosen = self.dataset.epoch_samples.take(rows, epoch, self.name)
        else:
            chosen = self.dataset.table.take(rows)
        if self.prefix:
            ids = tuple(f"{self.name}/{id}" for id in chosen.ids)
        else:
            ids = chosen.ids
        return replace(
            chosen, ids=ids, metadata={"source": (self.name,) * len(ids), **chosen.metadata}
        )

    @property
    def background_table(self) -> BackgroundTokenTable | None:
        """Table of the dataset if its rows are tokenized during training, else None."""
        table = self.dataset.table if isinstance(self.dataset, TokenizedDataset) else None
        return table if isinstance(table, BackgroundTokenTable) else None

    def estimate_tokens(self) -> npt.NDArray[Any]:
        """Return the token count of each sample, or an estimate if its row is not tokenized yet."""
        if self.background_table is None:
            return self.count_tokens()
        return self.background_table.estimate_tokens()[self.indices]

    def count_tokens(self) -> npt.NDArray[np.int64]:
        """Return the token count of each sample."""
        if isinstance(self.dataset, TokenizedDataset):
            return self.dataset.table.count_tokens()[self.indices]
        return np.asarray(
            [int(self[i].token_costs().sum()) for i in range(len(self))], dtype=np.int64
        )


class BatchLoader(Protocol):
    """Endless source of training batches that can save and restore its position.

    A batch never spans two epochs. `state_dict` returns the exact position as JSON values.
    """

    @property
    def epoch(self) -> int:
        """Index of the epoch that the next batch belongs to, counted from 0."""
        ...

    @property
    def epoch_done(self) -> bool:
        """Return whether the most recently returned batch was the last one of its epoch."""
        ...

    @property
    def num_ids(self) -> int:
        """Number of sample ids per epoch (of the current epoch, if epochs differ in size)."""
        ...

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches per epoch (of the current epoch, if epochs differ in size)."""
        ...

    def next_batch(self) -> SequenceSample: ...
    def count_batches(self, epochs: int) -> int:
        """Return the total number of batches of the first `epochs` epochs."""
        ...

    def build_large_batches(self) -> list[SequenceSample]:
        """Return batches of the first epoch for the memory forecast, the largest one first.

        The list can include smaller batches that may need as much memory as the largest one. If
        some rows are not tokenized yet, the largest batch is chosen by estimated token counts. Must
        be called before `next_batch`, and does not change the loader's position.
        """
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class MapLoader:
    """Loader that builds batches from datasets with random access to their samples.

    Every epoch draws the configured share of each source and, with `shuffle`, shuffles the samples.
    """

    def __init__(
        self,
        parts: Sequence[SourceSubset],
        shares: Sequence[SourceShare],
        batching: BatchingOptions,
        *,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        self._parts = list(parts)
        self._shares = list(shares)
        self._batching = batching
        self._seed = seed
        self._shuffle = shuffle
        if batching.needs_costs:
            self._costs: list[npt.NDArray[np.int64]] | None = [
                part.count_tokens() for part in parts
            ]
        else:
            self._costs = None
        self._position = (0, 0)  # epoch, batch
        self._cached_plan: tuple[int, tuple[Index, Index], list[int]] | None = None
        self.epoch_done = False
        self._announce_order()

    @property
    def epoch(self) -> int:
        return self._position[0]

    @cached_property
    def num_ids(self) -> int:
        return sum(count_per_epoch(self._shares))

    @property
    def batches_per_epoch(self) -> int:
        return len(self._plan_epoch(self.epoch)[1]) - 1

    def count_batches(self, epochs: int) -> int:
        if self._costs is None:
            return epochs * self.batches_per_epoch
        return sum(len(self._plan_epoch(epoch)[1]) - 1 for epoch in range(epochs))

    def build_large_batches(self) -> list[SequenceSample]:
        """Return the largest batches, followed by batches spread evenly over the first epoch.

        The largest batches are those with the most tokens. Up to `NUM_LARGE_BATCHES` of each kind
        are returned. The evenly spread batches are included because the largest batch does not
        always need the most memory. For example, the completions of a row share the memory of their
        prompt, so a smaller batch with shorter prompts can need more.

        If some rows are not tokenized yet, fewer batches are returned, and their token counts are
        estimated from bytes. If a source is not tokenized by weft, its lengths are unknown, and
        only the first batch is returned.
        """
        (source, index), bounds = self._plan_epoch(0)
        if not all(isinstance(part.dataset, TokenizedDataset) for part in self._parts):
            return [self._build_batch(0, 0)]
        # Limit the number of samples to tokenize before training.
        number = NUM_LARGE_BATCHES
        if any(part.background_table is not None for part in self._parts):
            number = min(NUM_LARGE_BATCHES, max(1, MAX_FORECAST_SAMPLES // max(1, bounds[1])))
        # Find the largest batches by their total number of tokens.
        costs = [part.estimate_tokens() for part in self._parts]
        tokens = np.asarray([costs[s][i] for s, i in zip(source, index, strict=True)])
        largest = np.argsort(-np.add.reduceat(tokens, bounds[:-1]), kind="stable")[:number]
        spread = np.linspace(0, len(bounds) - 2, number).astype(int)
        large_batches: list[SequenceSample] = []
        for batch in dict.fromkeys([*largest.tolist(), *spread.tolist()]):
            large_batches.append(self._build_batch(0, batch))
        return large_batches

    def _build_batch(self, epoch: int, batch: int) -> SequenceSample:
        (source, index), bounds = self._plan_epoch(epoch)
        rows = slice(bounds[batch], bounds[batch + 1])
        sources = source[rows]
        indices = index[rows]
        # Take the samples of each source, then restore the order of the batch.
        places = [np.flatnonzero(sources == number) for number in range(len(self._parts))]
        picked = []
        for part, positions in zip(self._parts, places, strict=True):
            if len(positions):
                picked.append(part.take(indices[positions].tolist(), epoch))
        if len(picked) == 1:
            return picked[0]
        return SequenceSample.gather(picked).at(np.argsort(np.concatenate(places)).tolist())

    def next_batch(self) -> SequenceSample:
        epoch, batch = self._position
        bounds = self._plan_epoch(epoch)[1]
        sample = self._build_batch(epoch, batch)
        self.epoch_done = batch + 1 == len(bounds) - 1
        self._position = (epoch + 1, 0) if self.epoch_done else (epoch, batch + 1)
        if self.epoch_done:
            self._announce_order()
        return sample

    def _announce_order(self) -> None:
        """Make background workers tokenize the samples of the next batches first.

        Does nothing if no dataset is tokenized during training.
        """
        unfinished = []
        for number, part in enumerate(self._parts):
            if part.background_table is not None:
                unfinished.append((number, part))
        if not unfinished:
            return
        epoch, batch = self._position
        (source, index), bounds = self._plan_epoch(epoch)
        source = source[bounds[batch] :]
        index = index[bounds[batch] :]
        for number, part in unfinished:
            assert part.background_table is not None, "only unfinished parts are listed"
            part.background_table.prioritize(part.indices[index[source == number]])

    def state_dict(self) -> dict[str, Any]:
        epoch, batch = self._position
        return {
            "epoch": epoch,
            "batch": batch,
            "epoch_done": self.epoch_done,
            "data": self._compute_fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position that `state_dict` returned.

        Raises `UserError` if the data, the batch size or the seed have changed since the position
        was saved.
        """
        if state["data"] != self._compute_fingerprint():
            raise UserError(
                "the saved position belongs to other data: the rows, the mixture, the batch size "
                "or the seed have changed; "
                "start a new trial, or restore the data"
            )
        self._position = (int(state["epoch"]), int(state["batch"]))
        self.epoch_done = bool(state["epoch_done"])
        self._announce_order()

    def _plan_epoch(self, epoch: int) -> tuple[tuple[Index, Index], list[int]]:
        """Return ((source indices, sample indices), batch boundaries) of an epoch.

        The indices are in training order. The plan of the last requested epoch is cached.
        """
        if self._cached_plan is None or self._cached_plan[0] != epoch:
            source, sample = compute_epoch_order(self._shares, self._seed, epoch, self._shuffle)
            costs = np.ones(len(source), dtype=np.int64)
            if self._costs is not None:
                costs = np.asarray(
                    [self._costs[s][i] for s, i in zip(source, sample, strict=True)], dtype=np.int64
                )
            order, bounds = self._arrange_samples(costs, epoch)
            self._cached_plan = (epoch, (source[order], sample[order]), bounds)
        return self._cached_plan[1], self._cached_plan[2]

    def _arrange_samples(self, costs: Index, epoch: int) -> tuple[Index, list[int]]:
        """Return (order of the samples, batch boundaries), given the token count of each sample."""
        batching = self._batching
        order = np.arange(len(costs), dtype=np.int64)
        if batching.by_length:  # stable sort: samples of equal length stay in random order
            order = np.argsort(costs, kind="stable")
        if not batching.mixing:
            return order, batching.compute_bounds(costs[order])
        mixed, starts = pair_short(
            costs[order],
            batching.mixing_below,
            batching.mixing,
            make_generator(self._seed, "mixing", epoch),
        )
        units = np.ones(len(starts) - 1, dtype=np.int64)
        return order[mixed], [int(starts[index]) for index in batching.compute_bounds(units)]

    def _compute_fingerprint(self) -> str:
        """Return a hash of all settings that determine the order of the sample ids."""
        shares = [asdict(share) for share in self._shares]
        defaults = asdict(BatchingOptions())
        sizes = {}
        for name, value in asdict(self._batching).items():
            if name in SIZE_FIELDS or value != defaults[name]:
                sizes[name] = value
        text = json.dumps([shares, sizes, self._seed, self._shuffle], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@runtime_checkable
class EpochAwareDataset(Protocol):
    """Iterable dataset whose epochs differ. `set_epoch` is called before each `iter()`."""

    def set_epoch(self, epoch: int) -> None: ...


class StreamLoader:
    """Loader over an iterable dataset that yields whole batches.

    An epoch ends when the iterator is exhausted, or after `len(dataset)` batches if the dataset has
    a length (required for endless datasets). To restore a position, the loader skips the earlier
    batches of the epoch; a `ResumableStream` restores its own position instead.
    """

    def __init__(self, dataset: StreamDataset, name: str) -> None:
        self._dataset = dataset
        self._name = name
        self._limit = len(dataset) if isinstance(dataset, Sized) else None
        self._position = (0, 0)
        self._iterator: Iterator[SequenceSample] | None = None
        self._next_sample: SequenceSample | None = None
        self._first_epoch_counts: tuple[int, int] | None = None
        self._largest: SequenceSample | None = None
        self._stream = dataset if isinstance(dataset, ResumableStream) else None
        self._stream_state = None if self._stream is None else self._stream.state_dict()
        self.epoch_done = False

    @property
    def epoch(self) -> int:
        return self._position[0]

    @property
    def num_ids(self) -> int:
        if self._stream is not None:
            return self._stream.num_ids
        return self._count_first_epoch()[0]

    @property
    def batches_per_epoch(self) -> int:
        return self._limit if self._limit is not None else self._count_first_epoch()[1]

    def count_batches(self, epochs: int) -> int:
        return epochs * self.batches_per_epoch

    def build_large_batches(self) -> list[SequenceSample]:
        """Return a list that contains only the largest batch of the first epoch.

        A `ResumableStream` is not read in advance; the list then contains its next batch. Raises
        `DataError` if the first epoch has no batch.
        """
        if self._stream is not None:
            batch = next(iter(self._stream))
            self._stream.load_state_dict(self._stream_state or {})
            self._iterator = self._next_sample = None
            return [batch]
        self._count_first_epoch()
        if self._largest is None:
            raise DataError(
                f"{self._name}: an iterable dataset yields SequenceSamples, the first epoch gave "
                f"nothing"
            )
        return [self._largest]

    def next_batch(self) -> SequenceSample:
        epoch, batch = self._position
        if self._iterator is None:
            self._iterator = self._open_epoch(epoch)
            for _ in range(batch if self._stream is None else 0):
                next(self._iterator)
            self._next_sample = next(self._iterator, None)
        sample = self._next_sample
        if not isinstance(sample, SequenceSample):
            description = "nothing" if sample is None else type(sample).__name__
            raise DataError(
                f"{self._name}: an iterable dataset yields SequenceSamples, epoch {epoch} gave "
                f"{description}"
            )
        at_limit = self._limit is not None and batch + 1 >= self._limit
        if self._stream is not None:
            self._stream_state = self._stream.state_dict()
        self._next_sample = None if at_limit else next(self._iterator, None)
        self.epoch_done = self._next_sample is None
        if self.epoch_done:
            self._iterator = None
        self._position = (epoch + 1, 0) if self.epoch_done else (epoch, batch + 1)
        return replace(
            sample, metadata={"source": (self._name,) * sample.num_ids, **sample.metadata}
        )

    def state_dict(self) -> dict[str, Any]:
        state = {
            "epoch": self._position[0],
            "batch": self._position[1],
            "epoch_done": self.epoch_done,
        }
        return state if self._stream is None else state | {"stream": self._stream_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position that `state_dict` returned."""
        self._position = (int(state["epoch"]), int(state["batch"]))
        self.epoch_done = bool(state["epoch_done"])
        self._iterator = self._next_sample = None
        if self._stream is not None:
            self._stream_state = state["stream"]
            self._stream.load_state_dict(state["stream"])

    def _open_epoch(self, epoch: int) -> Iterator[SequenceSample]:
        if isinstance(self._dataset, EpochAwareDataset):
            self._dataset.set_epoch(epoch)
        return iter(self._dataset)

    def _count_first_epoch(self) -> tuple[int, int]:
        """Return (number of ids, number of batches) of the first epoch.

        The first call iterates over the dataset to count them; later calls return the same result.
        """
        if self._first_epoch_counts is None:
            ids = batches = max_tokens = 0
            for batch in self._open_epoch(0):
                ids += batch.num_ids
                batches += 1
                tokens = int(batch.token_costs().sum())
                if tokens > max_tokens:
                    self._largest = batch
                    max_tokens = tokens
                if batches == self._limit:
                    break
            self._first_epoch_counts = (ids, batches)
            # If the dataset is its own iterator, counting has advanced it: start again.
            self._iterator = self._next_sample = None
        return self._first_epoch_counts
