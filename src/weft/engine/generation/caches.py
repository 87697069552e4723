"""Which form keys and values take on a device: the scheduler's accounting, the memory, and how a decode step runs over it.

Slots everywhere (`models/kv/slots.py`), but pages (`models/kv/pages.py`) on a GPU whose kernels read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.engine.generation.blocks import Blocks, Slots
from weft.engine.generation.decode_batch import DecodeBatch
from weft.engine.generation.decoder import Decoder
from weft.engine.generation.graphs import COARSE, SIZES, DecodeGraphs, cuda_capture
from weft.engine.generation.multi_step import MultiStepDecoder
from weft.engine.generation.page_blocks import PageBlocks
from weft.engine.generation.passes import Passes, reads_only_written
from weft.engine.generation.scheduler import Budget
from weft.engine.generation.settings import SettingsTable
from weft.kernels import LEAST_ROWS, LEAST_SPARED_KEYS, flash, flex, in_vectors
from weft.models.kv.pages import PAGE, PagedCache, PagePool
from weft.models.kv.slots import KVCache
from weft.models.network.config import TransformerConfig
from weft.models.network.packed import Packed
from weft.models.network.rope import CHANGING


class Cache(Protocol):
    """Rows of keys and values: `KVCache` or `PagedCache`, where the methods are described."""

    def allocate(self, count: int = 1) -> list[int]: ...
    def link(self, slots: Iterable[int], prefix: Any) -> None: ...
    def take(self, other: Any) -> int: ...
    def fork(self, slot: int, count: int) -> list[int]: ...
    def extend(self, slots: Sequence[int], tokens: Sequence[Tensor] | Tensor) -> Packed: ...
    def truncate(self, slot: int, length: int) -> None: ...
    def release(self, slot: int) -> int: ...
    def close(self) -> None: ...


class Caches(Protocol):
    """One generator's key-value memory, and the network's passes over it. `least_rows` is the fewest tokens of a pass."""

    least_rows: int
    passes: Passes

    @property
    def blocks(self) -> Blocks: ...

    def new(self, room: int | None = None) -> Cache:
        """An empty cache: of one row with room for `room` tokens, or of the sequences that run."""
        ...

    def fit(self, cache: Any) -> None:
        """Give the cache of the sequences that run the memory that `blocks` counts for it now."""
        ...

    def decode(self, cache: Any, tokens: npt.NDArray[np.int64]) -> Tensor:
        """Hidden states [R, hidden] of one more token each in the rows 0 .. R - 1 of `cache`; read before the next call."""
        ...

    def multi_step(self, rows: DecodeBatch, settings: SettingsTable) -> MultiStepDecoder | None:
        """What computes several decode steps in a call; None where they are computed one at a time."""
        ...

    def weights_changed(self) -> None:
        """Weights may be others from now on, or lie elsewhere."""
        ...

    def close(self) -> None:
        """Give all memory back; no cache of it is of use afterwards."""
        ...


def caches_for(network: Decoder, device: torch.device, budget: Budget) -> Caches:
    config, rope = network.config, network.config.rope
    fixed = rope is None or rope.scaling not in CHANGING  # whether cached keys never change
    reads = _flashes(config, device, next(network.parameters()).dtype) or flex.serves(device, config.head_dim)
    if network.reads_pages and fixed and reads:
        return PageCaches(network, device, budget)
    return SlotCaches(network, device, budget)


def _flashes(config: TransformerConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether flash attention reads pages here; else FlexAttention may."""
    plain = config.attention_softcap is None and flash.serves(device, dtype, config.head_dim)
    return plain and flash.abilities().block_table


class SlotCaches:
    """Holds what `Slots` counts, and rows that fill a small pass up."""

    def __init__(self, network: Decoder, device: torch.device, budget: Budget) -> None:
        self._network, self._device = network, device
        joins = device.type == "cpu" and network.shares_prefixes(budget.max_tokens)
        least_spared, unit = LEAST_SPARED_KEYS if joins else None, in_vectors(1, device)
        self._kernels = reads_only_written(network)
        self.passes = Passes(network)
        self.blocks = Slots(budget.max_sequences, budget.max_tokens, least_spared, unit, ahead=self._kernels)
        alone = self._kernels and network.config.experts is None  # experts' activations are torch's
        self.least_rows = LEAST_ROWS if device.type == "cpu" and not alone else 1

    def new(self, room: int | None = None) -> KVCache:
        slots, room = self._size() if room is None else (1, in_vectors(room, self._device))
        dtype = next(self._network.parameters()).dtype
        first = self._network.first_layer
        return KVCache(
            self._network.config, self._device, dtype,
            slots=slots, room=room, rectangle=not self._kernels, first_layer=first,
        )  # fmt: skip

    def fit(self, cache: KVCache) -> None:
        cache.resize(*self._size())

    def _size(self) -> tuple[int, int]:
        """Slots of the sequences that run, and tokens of each."""
        return max(self.blocks.num_held, self.least_rows), self.blocks.capacity

    def decode(self, cache: KVCache, tokens: npt.NDArray[np.int64]) -> Tensor:
        count, fillers = len(tokens), list[int]()
        if count < self.least_rows:
            fillers = cache.allocate(self.least_rows - count)
            tokens = np.concatenate([tokens, np.zeros(len(fillers), np.int64)])
        packed = cache.extend(np.arange(len(tokens)), torch.from_numpy(tokens).to(self._device))
        states = self.passes.hidden(packed)
        for slot in reversed(fillers):
            cache.release(slot)
        return states[:count] if fillers else states

    def multi_step(self, rows: DecodeBatch, settings: SettingsTable) -> MultiStepDecoder | None:
        return MultiStepDecoder(self.passes, rows, settings) if self.passes.multi_step else None

    def weights_changed(self) -> None:
        self.passes.forget()

    def close(self) -> None:
        """Each cache holds its own memory."""


class PageCaches:
    def __init__(self, network: Decoder, device: torch.device, budget: Budget, page: int = PAGE) -> None:
        self._network, config, dtype = network, network.config, next(network.parameters()).dtype
        self.least_rows, self.passes = 1, Passes(network)
        self.blocks = PageBlocks(budget.max_sequences, budget.max_tokens, page, least_spared=page)
        self._pool = PagePool(config, device, dtype, page=page)
        sizes = SIZES if _flashes(config, device, dtype) else COARSE
        # Experts ask the host how many tokens each has, which no graph can.
        capture = cuda_capture(device) if device.type == "cuda" and config.experts is None else None
        self.graphs = DecodeGraphs(self._run, device, capture, sizes=sizes)

    def new(self, room: int | None = None) -> PagedCache:
        return PagedCache(self._pool)

    def fit(self, cache: PagedCache) -> None:
        """The pool grows by what is written."""

    def decode(self, cache: PagedCache, tokens: npt.NDArray[np.int64]) -> Tensor:
        step = cache.step(range(len(tokens)), tokens)
        return self.graphs(step, form=(step.shape[1], len(self._pool.pages)))

    def multi_step(self, rows: DecodeBatch, settings: SettingsTable) -> None:
        """A GPU's steps are captured as graphs; the host waits for each one's tokens."""

    def weights_changed(self) -> None:
        self.graphs.drop()

    def close(self) -> None:
        self.graphs.drop()
        self._pool.keys, self._pool.values = [], []

    def _run(self, step: Tensor) -> Tensor:
        return self._network.hidden(self._pool.packed(step))
