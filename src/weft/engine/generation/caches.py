"""Which form keys and values take on a device: the scheduler's accounting, the memory, and how a decode step runs over it.

Slots everywhere (`models/kv_cache.py`), but pages (`models/paged_cache.py`) on a GPU whose kernels read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.engine.generation.ahead import Ahead
from weft.engine.generation.blocks import Blocks, Slots
from weft.engine.generation.graphs import COARSE, SIZES, DecodeGraphs, cuda_capture
from weft.engine.generation.page_blocks import PageBlocks
from weft.engine.generation.rows import Rows
from weft.engine.generation.scheduler import Budget
from weft.engine.generation.settings import SettingsTable
from weft.models import flash, flex
from weft.models.config import TransformerConfig
from weft.models.kv_cache import KVCache
from weft.models.packed import Packed, in_vectors
from weft.models.paged_cache import PAGE, PagedCache, PagePool
from weft.models.rope import CHANGING
from weft.models.transformer import Transformer

if TYPE_CHECKING:
    from weft.engine.generation.generate import Decoder

LEAST_SPARED = 256  # keys that a joined prefix must spare a CPU in a step to pay for its join; others are copied
LEAST_ROWS = {"cpu": 4}  # torch adds fewer rows up by other kernels on a CPU, whose sums differ in the last digit


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
    """One generator's key-value memory. `least_rows` is the fewest tokens of a pass."""

    least_rows: int

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

    def ahead(self, rows: Rows, settings: SettingsTable) -> Ahead | None:
        """What computes steps ahead; None where they are computed one at a time."""
        ...

    def moved(self, caches: Iterable[Any]) -> None:
        """Weights may be others from now on, or lie elsewhere; `caches` are in use."""
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
        least_spared, unit = LEAST_SPARED if joins else None, in_vectors(1, device)
        self._kernels = isinstance(network, Transformer) and network.reads_only_written
        self.blocks = Slots(budget.max_sequences, budget.max_tokens, least_spared, unit, ahead=self._kernels)
        alone = self._kernels and network.config.experts is None  # experts' activations are torch's
        self.least_rows = 1 if alone else LEAST_ROWS.get(device.type, 1)

    def new(self, room: int | None = None) -> KVCache:
        slots, room = self._size() if room is None else (1, in_vectors(room, self._device))
        dtype = next(self._network.parameters()).dtype
        return KVCache(self._network.config, self._device, dtype, slots=slots, room=room, rectangle=not self._kernels)

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
        states = self._network.hidden(packed)
        for slot in reversed(fillers):
            cache.release(slot)
        return states[:count] if fillers else states

    def ahead(self, rows: Rows, settings: SettingsTable) -> Ahead | None:
        return Ahead.over(self._network, rows, settings)

    def moved(self, caches: Iterable[KVCache]) -> None:
        for cache in caches:
            cache.moved()

    def close(self) -> None:
        """Each cache holds its own memory."""


class PageCaches:
    def __init__(self, network: Decoder, device: torch.device, budget: Budget, page: int = PAGE) -> None:
        self._network, config, dtype = network, network.config, next(network.parameters()).dtype
        self.least_rows = 1
        self.blocks = PageBlocks(budget.max_sequences, budget.max_tokens, page, least_spared=page)
        self._pool = PagePool(config, device, dtype, page=page)
        sizes = SIZES if _flashes(config, device, dtype) else COARSE
        # Experts ask the host how many tokens each has, which no graph can.
        capture = cuda_capture() if device.type == "cuda" and config.experts is None else None
        self.graphs = DecodeGraphs(self._run, device, capture, sizes=sizes)

    def new(self, room: int | None = None) -> PagedCache:
        return PagedCache(self._pool)

    def fit(self, cache: PagedCache) -> None:
        """The pool grows by what is written."""

    def decode(self, cache: PagedCache, tokens: npt.NDArray[np.int64]) -> Tensor:
        step = cache.step(range(len(tokens)), tokens)
        return self.graphs(step, form=(step.shape[1], len(self._pool.pages)))

    def ahead(self, rows: Rows, settings: SettingsTable) -> None:
        """A GPU's steps are captured as graphs; the host waits for each one's tokens."""

    def moved(self, caches: Iterable[PagedCache]) -> None:
        self.graphs.drop()

    def close(self) -> None:
        self.graphs.drop()
        self._pool.keys, self._pool.values = [], []

    def _run(self, step: Tensor) -> Tensor:
        return self._network.hidden(self._pool.packed(step))
