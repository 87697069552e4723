"""Key-value caches of a generator, which store keys and values in pages or in slots.

Pages (`models/kv/pages.py`) are used if the device's attention kernels can read them, otherwise
slots (`models/kv/slots.py`). Pages and slots differ in the scheduler's accounting, in memory use,
and in how a decode step runs. `choose_default_budget` limits the memory of the caches.
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
from weft.engine.device import GIGABYTE, free_bytes, read_memory_bytes
from weft.engine.generation import sampling
from weft.engine.generation.ahead import SAMPLING_COLUMNS, SampledSteps
from weft.engine.generation.blocks import BlockManager, PageManager, SlotManager
from weft.engine.generation.decode_batch import DecodeBatch
from weft.engine.generation.graphs import (
    COARSE_GRAPH_SIZES,
    GRAPH_SIZES,
    DecodeGraphs,
    StepFunction,
    build_cuda_capture,
    find_graph_size,
)
from weft.engine.generation.passes import Decoder, DecoderPasses, MultiStepDecoder, has_slot_kernel
from weft.engine.generation.sampling import SampledRows, SettingsTable
from weft.engine.generation.scheduler import GenerationBudget
from weft.errors import ConfigError
from weft.kernels import MIN_ROWS, MIN_SPARED_KEYS, flash, flex, in_vectors, put
from weft.models.kv.pages import FIRST_WIDTH, PAGE, PagedCache, PagePool
from weft.models.kv.slots import KVCache
from weft.models.network.config import TransformerConfig
from weft.models.network.linear import Adapter
from weft.models.network.prefix import PrefixKeysValues
from weft.models.network.rope import LENGTH_DEPENDENT_SCALINGS

KV_SHARE = 0.25  # maximum share of the device's memory for the KV cache
FREE_SHARE = 0.9  # maximum share of a GPU's free memory; logits and graphs take the rest
MAX_SEQUENCES = {"cpu": 128}  # rows of a decode step; more gain little on a CPU
DEFAULT_MAX_SEQUENCES = 512  # a GPU's step reads the weights once for all rows
# prompt tokens of a step; more gain nothing on a CPU, and running sequences wait for them
PREFILL_TOKENS = {"cpu": 2048}
DEFAULT_PREFILL_TOKENS = 8192


class SequenceCache(Protocol):
    """Interface of a key-value cache, implemented and documented by `KVCache` and `PagedCache`."""

    def allocate(self, count: int = 1) -> list[int]: ...
    def link(self, slots: Iterable[int], prefix: Any) -> None: ...
    def take(self, other: Any) -> int: ...
    def fork(self, slot: int, count: int) -> list[int]: ...
    def release(self, slot: int) -> int: ...
    def close(self) -> None: ...


class GenerationCaches(Protocol):
    """Interface of a generator's key-value caches and of the network passes that use them.

    A pass must have at least `min_rows` tokens. With fewer tokens, torch may use other kernels,
    whose results are rounded differently.
    """

    min_rows: int

    @property
    def blocks(self) -> BlockManager: ...

    def create_cache(self, room: int | None = None) -> SequenceCache:
        """Create an empty cache.

        With `room`, it is a cache for one sequence of up to `room` tokens. Otherwise it is the
        cache of the running sequences.
        """
        ...

    def resize(self, cache: Any) -> None:
        """Resize the cache of the running sequences to the size that `self.blocks` has reserved."""
        ...

    def prefill(
        self, cache: Any, slots: list[int], tokens: Sequence[Tensor], start: int = 0
    ) -> Tensor:
        """Append the `tokens` of prompts, one int64 [n] per slot, to slots of `cache`.

        `start` is the number of tokens that the last of the slots has already. Returns the hidden
        states [R, hidden] of the last tokens.
        """
        ...

    def decode(self, cache: Any, tokens: npt.NDArray[np.int64]) -> Tensor:
        """Append `tokens` [R] to the first R rows of `cache`, and compute a decode step.

        Returns the hidden states [R, hidden], which are valid until the next call.
        """
        ...

    def decode_and_sample(
        self, cache: Any, rows: DecodeBatch, settings: SettingsTable
    ) -> Callable[[], SampledRows] | None:
        """Run a decode step as `decode` does, and sample the next tokens in the same call.

        Returns a function that waits for the sampled tokens. Returns None and computes nothing if
        these rows cannot be sampled in the same call.
        """
        ...

    def build_multi_step_decoder(
        self, rows: DecodeBatch, settings: SettingsTable
    ) -> MultiStepDecoder | None:
        """Return a decoder that computes several steps per call, or None if not supported."""
        ...

    def on_weights_changed(self) -> None:
        """Discard everything that depends on the values or addresses of the weights."""
        ...

    def close(self) -> None:
        """Free all memory of this object.

        Caches that it created cannot be used afterwards.
        """
        ...


class CacheProvider(Protocol):
    """Interface of an object that provides caches for the generators of an engine."""

    @property
    def num_bytes(self) -> int:
        """Memory that stays allocated between generators."""
        ...

    def take(self, network: Any, device: torch.device, budget: GenerationBudget) -> Any:
        """Return `GenerationCaches` for a new generator."""
        ...

    def give_back(self, caches: Any) -> None: ...
    def drop(self) -> None: ...


def _run_prefill(
    caches: SlotCaches | PageCaches,
    cache: KVCache | PagedCache,
    slots: list[int],
    tokens: Sequence[Tensor],
    start: int,
) -> Tensor:
    """Compute prompts in one pass, as `GenerationCaches.prefill` describes.

    If the pass has fewer than `min_rows` tokens, padding is added after the last prompt.
    """
    lengths = [len(prompt) for prompt in tokens]
    missing = max(0, caches.min_rows - sum(lengths))
    padded = [*tokens[:-1], torch.nn.functional.pad(tokens[-1], (0, missing))]
    packed = cache.extend(slots, padded)
    last = put(np.cumsum(lengths) - 1, caches.device)
    states = caches.passes.compute_hidden(packed, last)
    if missing:
        cache.truncate(slots[-1], start + lengths[-1])
    return states


def build_caches(
    network: Decoder, device: torch.device, budget: GenerationBudget
) -> GenerationCaches:
    config, rope = network.config, network.config.rope
    # With a rotation that depends on the sequence's length, cached keys change.
    keys_are_fixed = rope is None or rope.scaling not in LENGTH_DEPENDENT_SCALINGS
    if device.type != "cpu" and network.can_read_pages and keys_are_fixed:
        dtype = next(network.parameters()).dtype
        if _can_flash_read_pages(config, device, dtype) or flex.serves(device, config.head_dim):
            return PageCaches(network, device, budget)
    return SlotCaches(network, device, budget)


def _can_flash_read_pages(
    config: TransformerConfig, device: torch.device, dtype: torch.dtype
) -> bool:
    """Return whether flash attention can read pages on this device.

    If not, FlexAttention may be able to read them.
    """
    plain = config.attention_softcap is None and flash.serves(device, dtype, config.head_dim)
    return plain and flash.find_features().block_table


class SlotCaches:
    """Key-value caches in which each sequence has its own slot.

    A decode step of fewer than `min_rows` sequences is padded with extra sequences.
    """

    def __init__(self, network: Decoder, device: torch.device, budget: GenerationBudget) -> None:
        self._network = network
        self.device = device
        joins = device.type == "cpu" and network.can_share_prefixes(budget.max_tokens)
        least_spared = MIN_SPARED_KEYS if joins else None
        unit = in_vectors(1, device)
        self._uses_kernels = has_slot_kernel(network)
        self.passes = DecoderPasses(network)
        self.blocks = SlotManager(
            budget.max_sequences, budget.max_tokens, least_spared, unit, ahead=self._uses_kernels
        )
        # torch computes experts
        runs_in_kernel = self._uses_kernels and network.config.experts is None
        self.min_rows = MIN_ROWS if device.type == "cpu" and not runs_in_kernel else 1

    def create_cache(self, room: int | None = None) -> KVCache:
        slots, room = self._compute_size() if room is None else (1, in_vectors(room, self.device))
        dtype = next(self._network.parameters()).dtype
        return KVCache(
            self._network.config,
            self.device,
            dtype,
            slots=slots,
            room=room,
            rectangle=not self._uses_kernels,
            layers=self._network.held_layers,
        )

    def resize(self, cache: KVCache) -> None:
        cache.resize(*self._compute_size())

    def _compute_size(self) -> tuple[int, int]:
        """Return the number of slots for the running sequences, and the number of tokens per slot."""
        return max(self.blocks.num_slots, self.min_rows), self.blocks.capacity

    def prefill(
        self, cache: KVCache, slots: list[int], tokens: Sequence[Tensor], start: int = 0
    ) -> Tensor:
        return _run_prefill(self, cache, slots, tokens, start)

    def decode(self, cache: KVCache, tokens: npt.NDArray[np.int64]) -> Tensor:
        count = len(tokens)
        fillers = list[int]()
        if count < self.min_rows:
            fillers = cache.allocate(self.min_rows - count)
            tokens = np.concatenate([tokens, np.zeros(len(fillers), np.int64)])
        packed = cache.extend(np.arange(len(tokens)), torch.from_numpy(tokens).to(self.device))
        states = self.passes.compute_hidden(packed)
        for slot in reversed(fillers):
            cache.release(slot)
        return states[:count] if fillers else states

    def decode_and_sample(self, cache: KVCache, rows: DecodeBatch, settings: SettingsTable) -> None:
        """Return None: tokens are sampled in a separate call, or by a multi-step decoder."""

    def build_multi_step_decoder(
        self, rows: DecodeBatch, settings: SettingsTable
    ) -> MultiStepDecoder | None:
        if self.passes.supports_multi_step:
            return MultiStepDecoder(self.passes, rows, settings)
        return None

    def on_weights_changed(self) -> None:
        self.passes.forget()

    def close(self) -> None:
        """Do nothing, since each `KVCache` frees its memory in its own `close`."""


class PageCaches:
    """Key-value caches that store sequences in pages, and the CUDA graphs that read these pages.

    The next generator can reuse the pages and the graphs (`ReusablePageCaches`).
    """

    def __init__(
        self, network: Decoder, device: torch.device, budget: GenerationBudget, page: int = PAGE
    ) -> None:
        self._network = network
        config = network.config
        dtype = next(network.parameters()).dtype
        self.min_rows = 1
        self.passes = DecoderPasses(network)
        self._page = page
        self.blocks = self._build_blocks(budget)
        self._pool = PagePool(config, device, dtype, page=page, max_pages=self.blocks.num_pages + 1)
        sizes = GRAPH_SIZES if _can_flash_read_pages(config, device, dtype) else COARSE_GRAPH_SIZES
        # Experts wait for their token counts on the host, which a graph cannot do.
        has_experts = config.experts is not None
        if device.type == "cuda" and not has_experts:
            capture = build_cuda_capture(device)
        else:
            capture = None
        self.device = device
        self._width = FIRST_WIDTH
        self._weight_storage = identify_storage(network)
        runs: dict[str, StepFunction] = {
            "states": self._compute_states,
            "sampled": self._sample_tokens,
            "greedy": partial(self._sample_tokens, greedy=True),
        }
        max_rows = find_graph_size(budget.max_sequences, sizes)
        self._sampled_steps = SampledSteps(
            device, max_rows, self._run_step, can_go_ahead=not has_experts
        )
        self.graphs = DecodeGraphs(
            runs, device, capture, sizes=sizes, state=self._sampled_steps.last_tokens
        )

    @property
    def num_bytes(self) -> int:
        return self._pool.num_bytes

    @property
    def is_unused(self) -> bool:
        """True if no page is in use."""
        return not self._pool.pages.num_used

    def reuse(self, network: Decoder, budget: GenerationBudget) -> bool:
        """Prepare the pages and graphs for another generator.

        Returns False if they cannot be reused. This is the case if the network or dtype is
        different, if more pages are allocated than the budget allows, or if the budget allows more
        sequences than a step can have.
        """
        blocks = self._build_blocks(budget)
        dtype = next(network.parameters()).dtype
        if (
            network is not self._network
            or dtype != self._pool.dtype
            or blocks.num_pages + 1 < len(self._pool.pages)
            or blocks.max_sequences > len(self._sampled_steps.last_tokens)
        ):
            return False
        self.blocks, self._pool.pages.max_pages = blocks, blocks.num_pages + 1
        self.on_weights_changed()
        return True

    def _build_blocks(self, budget: GenerationBudget) -> PageManager:
        return PageManager(
            budget.max_sequences, budget.max_tokens, self._page, least_spared=self._page
        )

    def create_cache(self, room: int | None = None) -> PagedCache:
        self._reserve()
        return PagedCache(self._pool, self._width)

    def resize(self, cache: PagedCache) -> None:
        self._reserve()

    def _reserve(self) -> None:
        """Allocate all pages that are expected to be needed, and widen the block table accordingly.

        Changing the number of pages or the table's width invalidates graphs and compiled kernels,
        so both are changed rarely.
        """
        self._pool.reserve(self.blocks.num_expected)
        while self._width * self._page < self.blocks.longest:
            self._width *= 2

    def prefill(
        self, cache: PagedCache, slots: list[int], tokens: Sequence[Tensor], start: int = 0
    ) -> Tensor:
        return _run_prefill(self, cache, slots, tokens, start)

    def decode(self, cache: PagedCache, tokens: npt.NDArray[np.int64]) -> Tensor:
        return self._run_step("states", cache.step(range(len(tokens)), tokens))

    def decode_and_sample(
        self, cache: PagedCache, rows: DecodeBatch, settings: SettingsTable
    ) -> Callable[[], SampledRows] | None:
        return self._sampled_steps.sample(cache, self.blocks, rows, settings)

    def build_multi_step_decoder(self, rows: DecodeBatch, settings: SettingsTable) -> None:
        """Return None: steps run as CUDA graphs, one at a time."""

    def on_weights_changed(self) -> None:
        self._sampled_steps.drop()
        self.passes.forget()
        self._weight_storage = identify_storage(self._network)

    def close(self) -> None:
        self._sampled_steps.drop()
        self.graphs.drop()
        self._pool.keys, self._pool.values = [], []

    def _run_step(self, kind: str, step: npt.NDArray[np.int32]) -> Tensor:
        form = (
            step.shape[1] - (SAMPLING_COLUMNS if kind != "states" else 0),
            len(self._pool.pages),
            self._weight_storage,
        )
        return self.graphs(kind, step, form=form, expected=self.blocks.rows)

    def _compute_states(self, step: Tensor) -> Tensor:
        """Return the hidden states [B, hidden] of a decode step.

        `step` is the result of `PagedCache.step`, int32 [B, C], with one row for each token to
        decode.
        """
        return self._network.compute_hidden(self._pool.build_packed(step))

    def _sample_tokens(self, step: Tensor, *, greedy: bool = False) -> Tensor:
        """Return the sampled token and its log-prob for each row, float64 [B, 2].

        `step` is the input that `SampledSteps` builds, int32 [B, C].
        """
        packed, uniforms, temperatures = self._sampled_steps.build_packed(self._pool, step)
        logits = self._network.next_token_logits(self._network.compute_hidden(packed))
        drawn = sampling.sample_rows(logits, uniforms, None if greedy else temperatures)
        self._sampled_steps.last_tokens[: len(step)] = drawn.tokens
        return drawn.stacked


class ReusablePageCaches:
    """Pages and captured graphs that successive generators of one engine reuse.

    Capturing the graphs is slow: it takes as much time as many decode steps. Therefore, pages and
    graphs stay allocated between generators, until `drop` is called.
    """

    def __init__(self) -> None:
        self._page_caches: PageCaches | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._page_caches is None else self._page_caches.num_bytes

    def take(
        self, network: Decoder, device: torch.device, budget: GenerationBudget
    ) -> GenerationCaches:
        """Return the previous generator's caches if they can be reused, otherwise new ones."""
        caches = self._page_caches
        self._page_caches = None
        if caches is not None:
            if caches.reuse(network, budget):
                return caches
            caches.close()
        return build_caches(network, device, budget)

    def give_back(self, caches: GenerationCaches) -> None:
        if isinstance(caches, PageCaches) and caches.is_unused:
            self.drop()  # pages of another generator that was open at the same time
            self._page_caches = caches
        else:
            caches.close()

    def drop(self) -> None:
        """Free the pages and graphs."""
        if self._page_caches is not None:
            self._page_caches.close()
            self._page_caches = None


def identify_storage(network: Decoder) -> Hashable:
    """Return a value that changes whenever graphs captured for the network become invalid.

    Graphs become invalid if the computation or the addresses of the memory that they read change.
    The value consists of the addresses of the tensors and the active adapters.
    """
    identity: list[Hashable] = [kernels.get_address(tensor) for tensor in network.parameters()]
    if isinstance(network, torch.nn.Module):
        for tensor in network.buffers():
            identity.append(kernels.get_address(tensor))
        for module in network.modules():
            if isinstance(module, Adapter | PrefixKeysValues):
                identity.append(module.active)
    return tuple(identity)


def choose_default_budget(
    config: TransformerConfig,
    device: torch.device,
    dtype: torch.dtype,
    kv_cache_gb: float | None = None,
    cache_bytes: int = 0,
) -> GenerationBudget:
    """Return the default limits of generation on a device.

    The limit of the KV cache is the result of `compute_kv_bytes`. `cache_bytes` is the current size
    of the cache in bytes.
    """
    return GenerationBudget(
        max_sequences=MAX_SEQUENCES.get(device.type, DEFAULT_MAX_SEQUENCES),
        max_tokens=max(
            1,
            compute_kv_bytes(device, kv_cache_gb, cache_bytes)
            // compute_token_bytes(config, dtype),
        ),
        max_prefill_tokens=PREFILL_TOKENS.get(device.type, DEFAULT_PREFILL_TOKENS),
        splits_prompts=config.rope is None or config.rope.scaling not in LENGTH_DEPENDENT_SCALINGS,
    )


def compute_token_bytes(config: TransformerConfig, dtype: torch.dtype) -> int:
    """Return the size in bytes of one token's keys and values."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def compute_kv_bytes(device: torch.device, kv_cache_gb: float | None, cache_bytes: int = 0) -> int:
    """Return the maximum size of the KV cache in bytes.

    This is `kv_cache_gb` if the user sets it. Otherwise it is a quarter of the memory that this
    process can use on the device, and on a GPU at most nine tenths of the free memory. The memory
    that the KV cache already occupies, `cache_bytes`, counts as free.

    Raises `ConfigError` if `kv_cache_gb` exceeds the free memory.
    """
    if kv_cache_gb is None:
        share = int(KV_SHARE * read_memory_bytes(device))
        if device.type != "cuda":
            return share
        return min(share, int(FREE_SHARE * free_bytes(device)) + cache_bytes)
    requested_bytes = int(kv_cache_gb * GIGABYTE)
    if device.type == "cuda" and requested_bytes > (available := free_bytes(device) + cache_bytes):
        raise ConfigError(
            f"gen.kv_cache_gb={kv_cache_gb:g}: {available / GIGABYTE:.1f} GiB are free on "
            f"{device}; lower it, or leave it out"
        )
    return requested_bytes
