"""Which form keys and values take on a device: the scheduler's accounting, the memory, and how a
decode step runs over it.

Slots everywhere (`models/kv/slots.py`), but pages (`models/kv/pages.py`) on a GPU whose kernels
read them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft import kernels
from weft.engine.device import wait
from weft.engine.generation import sampling
from weft.engine.generation.blocks import Blocks, Slots
from weft.engine.generation.decode_batch import DecodeBatch
from weft.engine.generation.decoder import Decoder
from weft.engine.generation.graphs import COARSE, SIZES, DecodeGraphs, Run, cuda_capture
from weft.engine.generation.multi_step import MultiStepDecoder
from weft.engine.generation.page_blocks import PageBlocks
from weft.engine.generation.passes import Passes, reads_only_written
from weft.engine.generation.scheduler import Budget
from weft.engine.generation.settings import Drawn, SettingsTable
from weft.kernels import LEAST_ROWS, LEAST_SPARED_KEYS, flash, flex, in_vectors
from weft.models.kv.page_tables import FIRST_WIDTH
from weft.models.kv.pages import PAGE, PagedCache, PagePool
from weft.models.kv.slots import KVCache
from weft.models.network.config import TransformerConfig
from weft.models.network.linear import Adapter
from weft.models.network.packed import Packed
from weft.models.network.prefix import Prefix
from weft.models.network.rope import CHANGING

DRAWING = 4  # columns for sampling, before those of `PagedCache.step`


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
    """The KV cache of one generator, and the passes of the network over it.

    A pass needs at least `least_rows` tokens.
    """

    least_rows: int
    passes: Passes

    @property
    def blocks(self) -> Blocks: ...

    def new(self, room: int | None = None) -> Cache:
        """Create an empty cache.

        With `room`, the cache has one row of so many tokens; without, it is the cache of the
        running sequences.
        """
        ...

    def fit(self, cache: Any) -> None:
        """Resize the cache of the running sequences to the size that `blocks` has reserved."""
        ...

    def decode(self, cache: Any, tokens: npt.NDArray[np.int64]) -> Tensor:
        """Return hidden states [R, hidden] of one new token in each of the first R rows of `cache`.

        The result is valid until the next call.
        """
        ...

    def draw(
        self, cache: Any, rows: DecodeBatch, settings: SettingsTable
    ) -> Callable[[], Drawn] | None:
        """Run a decode step as `decode` does and sample its tokens in the same call.

        Returns a function that waits for them, or None, computing nothing, if these rows can't be
        sampled in this way.
        """
        ...

    def multi_step(self, rows: DecodeBatch, settings: SettingsTable) -> MultiStepDecoder | None:
        """Return the decoder of several steps per call; None if steps are computed one at a time."""
        ...

    def weights_changed(self) -> None:
        """Discard everything that depends on the values or the addresses of the weights."""
        ...

    def close(self) -> None:
        """Free all memory; caches created here are unusable afterwards."""
        ...


def caches_for(network: Decoder, device: torch.device, budget: Budget) -> Caches:
    config, rope = network.config, network.config.rope
    fixed = rope is None or rope.scaling not in CHANGING  # whether cached keys never change
    reads = _flashes(config, device, next(network.parameters()).dtype) or flex.serves(
        device, config.head_dim
    )
    if network.reads_pages and fixed and reads:
        return PageCaches(network, device, budget)
    return SlotCaches(network, device, budget)


def _flashes(config: TransformerConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether flash attention reads pages on this device; otherwise FlexAttention may."""
    plain = config.attention_softcap is None and flash.serves(device, dtype, config.head_dim)
    return plain and flash.abilities().block_table


class SlotCaches:
    """KV cache in slots.

    Passes with fewer than `least_rows` tokens are padded with extra rows.
    """

    def __init__(self, network: Decoder, device: torch.device, budget: Budget) -> None:
        self._network = network
        self._device = device
        joins = device.type == "cpu" and network.shares_prefixes(budget.max_tokens)
        least_spared = LEAST_SPARED_KEYS if joins else None
        unit = in_vectors(1, device)
        self._kernels = reads_only_written(network)
        self.passes = Passes(network)
        self.blocks = Slots(
            budget.max_sequences, budget.max_tokens, least_spared, unit, ahead=self._kernels
        )
        alone = self._kernels and network.config.experts is None  # torch computes the experts
        self.least_rows = LEAST_ROWS if device.type == "cpu" and not alone else 1

    def new(self, room: int | None = None) -> KVCache:
        slots, room = self._size() if room is None else (1, in_vectors(room, self._device))
        dtype = next(self._network.parameters()).dtype
        return KVCache(
            self._network.config,
            self._device,
            dtype,
            slots=slots,
            room=room,
            rectangle=not self._kernels,
            layers=self._network.held_layers,
        )

    def fit(self, cache: KVCache) -> None:
        cache.resize(*self._size())

    def _size(self) -> tuple[int, int]:
        """Return (number of slots of the running sequences, tokens per slot)."""
        return max(self.blocks.num_held, self.least_rows), self.blocks.capacity

    def decode(self, cache: KVCache, tokens: npt.NDArray[np.int64]) -> Tensor:
        count = len(tokens)
        fillers = list[int]()
        if count < self.least_rows:
            fillers = cache.allocate(self.least_rows - count)
            tokens = np.concatenate([tokens, np.zeros(len(fillers), np.int64)])
        packed = cache.extend(np.arange(len(tokens)), torch.from_numpy(tokens).to(self._device))
        states = self.passes.hidden(packed)
        for slot in reversed(fillers):
            cache.release(slot)
        return states[:count] if fillers else states

    def draw(self, cache: KVCache, rows: DecodeBatch, settings: SettingsTable) -> None:
        """Return None: sampling is a separate pass, or part of a call of several steps."""

    def multi_step(self, rows: DecodeBatch, settings: SettingsTable) -> MultiStepDecoder | None:
        if self.passes.multi_step:
            return MultiStepDecoder(self.passes, rows, settings)
        return None

    def weights_changed(self) -> None:
        self.passes.forget()

    def close(self) -> None:
        """Do nothing: each cache owns its memory."""


class PageCaches:
    """KV cache in pages, with the CUDA graphs captured over them.

    `KeptPages` passes both on from one generator to the next.
    """

    def __init__(
        self, network: Decoder, device: torch.device, budget: Budget, page: int = PAGE
    ) -> None:
        self._network = network
        config = network.config
        dtype = next(network.parameters()).dtype
        self.least_rows = 1
        self.passes = Passes(network)
        self._page = page
        self.blocks = self._blocks(budget)
        self._pool = PagePool(config, device, dtype, page=page, most=self.blocks.num_pages + 1)
        sizes = SIZES if _flashes(config, device, dtype) else COARSE
        # Experts read their token counts on the host, which a graph cannot do.
        if device.type == "cuda" and config.experts is None:
            capture = cuda_capture(device)
        else:
            capture = None
        self._device = device
        self._width = FIRST_WIDTH
        self._results = dict[int, Tensor]()
        self._weights = storage_of(network)
        runs: dict[str, Run] = {
            "states": self._states,
            "sampled": self._drawn,
            "greedy": partial(self._drawn, greedy=True),
        }
        self.graphs = DecodeGraphs(runs, device, capture, sizes=sizes)

    @property
    def num_bytes(self) -> int:
        return self._pool.num_bytes

    @property
    def is_unused(self) -> bool:
        """Return whether every page has been returned."""
        return not self._pool.pages.num_used

    def renew(self, network: Decoder, budget: Budget) -> bool:
        """Prepare the pages and graphs for another generator.

        Returns False if they do not suit it: for another network, or a budget smaller than the
        allocated pages.
        """
        blocks = self._blocks(budget)
        dtype = next(network.parameters()).dtype
        if (
            network is not self._network
            or dtype != self._pool.dtype
            or blocks.num_pages + 1 < len(self._pool.pages)
        ):
            return False
        self.blocks, self._pool.pages.most = blocks, blocks.num_pages + 1
        self.weights_changed()
        return True

    def _blocks(self, budget: Budget) -> PageBlocks:
        return PageBlocks(
            budget.max_sequences, budget.max_tokens, self._page, least_spared=self._page
        )

    def new(self, room: int | None = None) -> PagedCache:
        self._reserve()
        return PagedCache(self._pool, self._width)

    def fit(self, cache: PagedCache) -> None:
        self._reserve()

    def _reserve(self) -> None:
        """Allocate all pages that are expected to be needed, and widen the block table for them.

        Graphs and compiled kernels are specific to one number of pages and one width, so both
        change seldom.
        """
        self._pool.reserve(self.blocks.num_wanted)
        while self._width * self._page < self.blocks.longest:
            self._width *= 2

    def decode(self, cache: PagedCache, tokens: npt.NDArray[np.int64]) -> Tensor:
        return self._run("states", cache.step(range(len(tokens)), tokens))

    def draw(
        self, cache: PagedCache, rows: DecodeBatch, settings: SettingsTable
    ) -> Callable[[], Drawn] | None:
        count = len(rows)
        how = settings.in_graph(rows.settings[:count], rows.count[:count])
        if how is None:
            return None
        numbers = np.stack([rows.uniforms(1)[0], how.temperatures], axis=1)
        step = np.concatenate(
            [numbers.view(np.int32), cache.step(range(count), rows.last[:count])], axis=1
        )
        made = self._run("greedy" if how.greedy else "sampled", step)

        def drawn() -> Drawn:
            wait(self._device)
            tokens, logprobs = made.numpy().T.copy()
            return tokens.astype(np.int64), logprobs, None

        return drawn

    def multi_step(self, rows: DecodeBatch, settings: SettingsTable) -> None:
        """Return None: steps run as CUDA graphs, one at a time."""

    def weights_changed(self) -> None:
        self.passes.forget()
        self._weights = storage_of(self._network)

    def close(self) -> None:
        self.graphs.drop()
        self._pool.keys, self._pool.values = [], []
        self._results.clear()

    def _run(self, kind: str, step: npt.NDArray[np.int32]) -> Tensor:
        form = (
            step.shape[1] - (DRAWING if kind != "states" else 0),
            len(self._pool.pages),
            self._weights,
        )
        return self.graphs(kind, step, form=form, expected=self.blocks.rows)

    def _states(self, step: Tensor) -> Tensor:
        """Return hidden states [B, hidden] of a step."""
        return self._network.hidden(self._pool.packed(step))

    def _drawn(self, step: Tensor, *, greedy: bool = False) -> Tensor:
        """Return the token and the log-prob of each row, float64 [B, 2] on the host.

        The values are valid after the device has been waited for. A row of `step` begins with its
        random number and its temperature, two int32 columns each.
        """
        uniforms, temperatures = (
            step[:, :DRAWING]
            .clone(memory_format=torch.contiguous_format)
            .view(torch.float64)
            .unbind(1)
        )
        logits = self._network.next_token_logits(self._states(step[:, DRAWING:]))
        drawn = sampling.draw_rows(logits, uniforms, None if greedy else temperatures)
        if len(step) not in self._results:
            self._results[len(step)] = torch.zeros(
                len(step), 2, dtype=torch.float64, pin_memory=self._device.type == "cuda"
            )
        return self._results[len(step)].copy_(drawn.packed, non_blocking=True)


class KeptPages:
    """Pages and captured graphs that an engine's generators pass on to the next one.

    Capturing the graphs costs as much as many steps. While no generator is open, pages and graphs
    stay allocated until `drop`.
    """

    def __init__(self) -> None:
        self._kept: PageCaches | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._kept is None else self._kept.num_bytes

    def take(self, network: Decoder, device: torch.device, budget: Budget) -> Caches:
        """Return the caches of the last generator if they suit this one, or new ones."""
        kept = self._kept
        self._kept = None
        if kept is not None:
            if kept.renew(network, budget):
                return kept
            kept.close()
        return caches_for(network, device, budget)

    def give_back(self, caches: Caches) -> None:
        if isinstance(caches, PageCaches) and caches.is_unused:
            self.drop()  # pages of another generator that was open at the same time
            self._kept = caches
        else:
            caches.close()

    def drop(self) -> None:
        """Free the pages and graphs."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None


def storage_of(network: Decoder) -> Hashable:
    """Return a value that changes if a captured pass would be wrong for the network.

    That is, if it would read other memory or compute something else: the addresses of the tensors,
    and the active adapters.
    """
    tensors = [kernels.address(x) for x in network.parameters()]
    if isinstance(network, torch.nn.Module):
        tensors += [kernels.address(x) for x in network.buffers()]
        tensors += [
            module.active for module in network.modules() if isinstance(module, Adapter | Prefix)
        ]
    return tuple(tensors)
