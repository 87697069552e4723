"""Key-value caches and decode steps in JAX, for the generator of `weft.engine.generation`.

The scheduler, the random numbers and the handling of requests are shared with the torch engine. A
cache is an array of slots, one per sequence, each with room for the longest sequence of the run.
The sizes are chosen for the first sequences, and a decode step always computes either all slots or
an eighth of them. Functions are therefore compiled only in the first step of a run. They are:

- prefill: computes prompts, which are packed into rows as in training, and writes their keys and
  values to their slots.
- decode: computes one token per slot. If no sampling limit is set, the same compiled function also
  draws the next token; otherwise, the logits are copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch
from jax import Array, lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch import Tensor

from weft.engine.device import GIGABYTE, read_memory_bytes
from weft.engine.generation.caches import (
    DEFAULT_MAX_SEQUENCES,
    DEFAULT_PREFILL_TOKENS,
    FREE_SHARE,
    KV_SHARE,
    MAX_SEQUENCES,
    PREFILL_TOKENS,
)
from weft.engine.generation.decode_batch import DecodeBatch
from weft.engine.generation.sampling import CDF_BLOCK, SampledRows, SettingsTable
from weft.engine.generation.scheduler import GenerationBudget
from weft.engine.jax.decoder import DecoderSettings, KeysValues, TokenRows
from weft.engine.jax.mesh import BATCH, count_row_parts, fetch, put_on_mesh
from weft.engine.jax.network import (
    Parameters,
    compute_hidden,
    compute_logits,
    group_stacks,
)
from weft.engine.jax.packing import BlockShapes, pack_blocks
from weft.engine.jax.parameters import to_numpy, to_torch
from weft.engine.jax.slots import CacheSizes, SlotsOfOneSize
from weft.models.kv.slots import check_rotation
from weft.models.network import rope
from weft.models.network.packed import pack

MIN_ROWS = 8  # fewest rows of a decode step
FEW_DIVISOR = 8  # a decode step computes all slots, or an eighth of them
COPIES = 8  # number of slots to which the compiled copy writes
LOGIT_ROWS = (8, 16, 32, 64)  # numbers of hidden states for which logits are compiled
Cache = list[KeysValues]  # keys and values of each stack of blocks


class CompiledDecoder:
    """Compiled functions of one network for generation, and the sizes they were compiled for.

    `read_arrays` returns the network's current parameters. `longest` is the number of tokens of the
    longest sequence of the run, or None if it is not known.
    """

    def __init__(
        self,
        decoder: DecoderSettings,
        read_arrays: Callable[[], dict[str, Array]],
        longest: int | None,
    ) -> None:
        self.decoder = decoder
        self.read_arrays = read_arrays
        self.prompt_shapes = BlockShapes(longest, decoder)
        self.cache_sizes = CacheSizes(longest, self.num_row_parts)
        # Decode steps that have been compiled for few slots too: (function, slots, capacity).
        self.compiled_for_few: list[Any] = []

        def compile(function: Callable[..., Any], **options: Any) -> Any:
            def compute(*inputs: Any, **static: Any) -> Any:
                with jax.default_matmul_precision(decoder.matmul_precision):
                    return function(*inputs, decoder=decoder, **static)

            return jax.jit(compute, **options)

        self.prefill = compile(_prefill, donate_argnums=1)
        self.decode = compile(_decode, donate_argnums=1)
        self.decode_and_sample = compile(_decode_and_sample, donate_argnums=1)
        self.compute_logits = compile(compute_logits)
        self.copy_slot = compile(_copy_slot, donate_argnums=0)
        self.grow = compile(_grow, static_argnames=("slots", "capacity"))

    def compute_next_logits(self, states: npt.NDArray[Any]) -> Tensor:
        """Return the logits [R, V] of hidden states [R, hidden]."""
        # At the first call, compile the function for all sizes.
        if not self.compute_logits._cache_size():
            for size in LOGIT_ROWS:
                self.compute_logits(
                    self.read_arrays(), np.zeros((size, states.shape[1]), states.dtype)
                )
        parts = []
        start = 0
        while start < len(states):
            chunk = states[start : start + LOGIT_ROWS[-1]]
            size = min(size for size in LOGIT_ROWS if size >= len(chunk))
            padded = np.zeros((size, states.shape[1]), states.dtype)
            padded[: len(chunk)] = chunk
            logits = to_torch(self.compute_logits(self.read_arrays(), padded))
            parts.append(logits[: len(chunk)])
            start += len(chunk)
        return torch.cat(parts)

    # -- implementation of `weft.engine.generation.caches.CacheProvider`

    @property
    def num_bytes(self) -> int:
        """0, because no cache is kept between generators."""
        return 0

    def take(self, network: Any, device: torch.device, budget: GenerationBudget) -> JaxCaches:
        """Return new caches for one generator."""
        return JaxCaches(self, budget)

    def give_back(self, caches: JaxCaches) -> None:
        """Close the caches of a generator."""
        caches.close()

    def drop(self) -> None:
        """Do nothing, because caches are freed when their generator is closed."""

    @property
    def num_row_parts(self) -> int:
        """Number of parts into which rows are divided over the devices."""
        sharding = self.decoder.row_sharding
        return 1 if sharding is None else count_row_parts(sharding)


class JaxSlotCache:
    """Key-value cache of several sequences; implements `SequenceCache`.

    The active slots have the indices 0 to `num_active` - 1. `used`, int64 [slots], is the number of
    tokens in each slot.
    """

    def __init__(self, compiled: CompiledDecoder, slots: int, capacity: int) -> None:
        self._compiled = compiled
        self.num_active = 0
        self.used = np.zeros(slots, np.int64)
        self.arrays = self._create(slots, capacity)

    def _create(self, slots: int, capacity: int) -> Cache:
        """Return a cache of zeros for the given number of slots, and of tokens per slot."""
        decoder = self._compiled.decoder
        config = decoder.config
        parameters = self._compiled.read_arrays()
        # Use the sharding of the compiled functions' results, so that they are compiled only once.
        mesh = cast(NamedSharding, next(iter(parameters.values())).sharding).mesh
        sharding = _choose_sharding(decoder) or NamedSharding(mesh, P())
        arrays = []
        for layers, _ in group_stacks(parameters):
            shape = (len(layers), slots, config.num_kv_heads, capacity, config.head_dim)
            keys = jnp.zeros(shape, decoder.dtype, device=sharding)
            values = jnp.zeros(shape, decoder.dtype, device=sharding)
            arrays.append(KeysValues(keys, values))
        return arrays

    @property
    def capacity(self) -> int:
        """Number of tokens for which each slot has room."""
        return int(self.arrays[0].keys.shape[3])

    def resize(self, slots: int, capacity: int) -> None:
        """Grow the cache to at least `slots` slots of at least `capacity` tokens each."""
        if slots <= len(self.used) and capacity <= self.capacity:
            return
        slots = max(slots, len(self.used))
        capacity = max(capacity, self.capacity)
        self.arrays = self._compiled.grow(self.arrays, slots=slots, capacity=capacity)
        self.used = np.concatenate([self.used, np.zeros(slots - len(self.used), np.int64)])

    def allocate(self, count: int = 1) -> list[int]:
        """Return the indices of `count` new empty slots, which follow the active ones."""
        slots = list(range(self.num_active, self.num_active + count))
        self.num_active += count
        self.used[slots] = 0
        return slots

    def fork(self, slot: int, count: int) -> list[int]:
        """Copy a slot to `count` new slots, and return their indices."""
        slots = self.allocate(count)
        self._copy(slot, slots)
        return slots

    def release(self, slot: int) -> int:
        """Release a slot, and move the last active slot to its index.

        Returns the former index of the last active slot.
        """
        last = self.num_active = self.num_active - 1
        if slot != last:
            self._copy(last, [slot])
        return last

    def _copy(self, source: int, slots: list[int]) -> None:
        """Copy the slot `source` to other slots."""
        for start in range(0, len(slots), COPIES):
            chunk = slots[start : start + COPIES]
            targets = np.full(COPIES, len(self.used), np.int32)  # indices beyond the cache: no copy
            targets[: len(chunk)] = chunk
            self.arrays = self._compiled.copy_slot(self.arrays, np.int32(source), targets)
        self.used[slots] = self.used[source]

    def append(self, slots: Sequence[int], counts: npt.NDArray[np.int64]) -> None:
        """Count `counts[i]` new tokens as used in slot `slots[i]`, before they are computed.

        Raises `ConfigError` if they would change the rotary frequencies of cached keys.
        """
        indices = list(slots)
        check_rotation(self._compiled.decoder.config.rope, self.used[indices], counts)
        self.used[indices] += counts

    def link(self, slots: Iterable[int], prefix: None) -> None:
        """Do nothing, because prefixes are never shared (`SlotsOfOneSize.min_saved_tokens`)."""
        assert prefix is None

    def take(self, other: Any) -> int:
        raise AssertionError("prompts are not divided into chunks")

    def close(self) -> None:
        """Free the memory of the cache."""
        self.arrays = []


class JaxCaches:
    """Caches and passes of one generator; implements `GenerationCaches`."""

    min_rows = 1

    def __init__(self, compiled: CompiledDecoder, budget: GenerationBudget) -> None:
        self._compiled = compiled
        self._decoder = compiled.decoder
        self._shapes = compiled.prompt_shapes
        self.blocks = SlotsOfOneSize(budget, compiled.cache_sizes)

    def create_cache(self, room: int | None = None) -> JaxSlotCache:
        assert room is None, "prompts are not divided into chunks"
        return JaxSlotCache(self._compiled, self.blocks.slots, self.blocks.capacity)

    def resize(self, cache: JaxSlotCache) -> None:
        cache.resize(self.blocks.slots, self.blocks.capacity)

    def prefill(
        self, cache: JaxSlotCache, slots: list[int], tokens: Sequence[Tensor], start: int = 0
    ) -> Tensor:
        """Compute prompts in empty slots; return the hidden states of their last tokens.

        `tokens` are the prompts, each int64 [n], and the result is [R, hidden].
        """
        # Pack the prompts.
        lengths = np.array([len(prompt) for prompt in tokens])
        cache.append(slots, lengths)
        packed = pack(list(tokens))
        ends = torch.from_numpy(np.cumsum(lengths) - 1)
        packed = replace(packed, rows=ends, labels=packed.tokens[ends])
        parts = []
        blocks = pack_blocks(packed, self._decoder, None, self._shapes)
        slot_array = np.array(slots, np.int32)
        for block in blocks:
            # Find the slots of all tokens and of the last tokens. Padding gets a slot beyond the
            # cache, so that its results are dropped.
            beyond = len(cache.used)
            slot_by_segment = np.array([beyond, *slot_array[block.sequences]], np.int32)
            token_slots = slot_by_segment[block.rows.segments]
            end_slots = np.full(len(block.reads.rows), beyond, np.int32)
            end_slots[: len(block.outputs)] = slot_array[block.outputs]
            states, cache.arrays = self._compiled.prefill(
                self._compiled.read_arrays(),
                cache.arrays,
                self._place(block.rows),
                block.reads.rows,
                token_slots.reshape(-1),
                end_slots,
            )
            parts.append(states)
        # Put the hidden states into the order of the prompts.
        joined: Tensor | None = None
        for block, states in zip(blocks, parts, strict=True):
            values = to_torch(states)
            if joined is None:
                joined = values.new_zeros(len(slots), values.shape[1])
            joined[block.outputs] = values[np.array(slots)[block.outputs]]
        assert joined is not None
        return joined

    def decode(self, cache: JaxSlotCache, tokens: npt.NDArray[np.int64]) -> Tensor:
        """Compute one token of each active slot; return the hidden states [R, hidden]."""
        states = self._run(self._compiled.decode, cache, tokens)
        return to_torch(states)[: len(tokens)]

    def decode_and_sample(
        self, cache: JaxSlotCache, rows: DecodeBatch, settings: SettingsTable
    ) -> Callable[[], SampledRows] | None:
        """Start a decode step that also samples; return a function that waits for its result.

        Returns None if the sampling settings are not supported by the compiled function.
        """
        count = len(rows)
        sampling = settings.build_graph_sampling(rows.settings[:count], rows.count[:count])
        if sampling is None:
            return None
        # A temperature of 0 selects the most likely token.
        temperatures = np.zeros(count) if sampling.greedy else sampling.temperatures
        draws = np.stack([rows.compute_uniforms(1)[0], temperatures])
        decode = self._compiled.decode_and_sample
        tokens, logprobs = self._run(decode, cache, rows.last[:count], draws)

        def wait_for_tokens() -> SampledRows:
            sampled = fetch(tokens)[:count].astype(np.int64)
            return sampled, fetch(logprobs)[:count].astype(np.float64), None

        return wait_for_tokens

    def _run(
        self,
        decode: Callable[..., Any],
        cache: JaxSlotCache,
        tokens: npt.NDArray[np.int64],
        draws: npt.NDArray[np.float64] | None = None,
    ) -> Any:
        """Run a decode step of the first slots; return the results of `decode` without the cache.

        `draws` [n, R] are n further arguments of `decode`, each with one value per row.
        """
        # Choose the number of slots to compute: a few, or all.
        count = len(tokens)
        slots = len(cache.used)
        parts = self._compiled.num_row_parts
        few = -(-max(slots // FEW_DIVISOR, MIN_ROWS) // parts) * parts
        if few > slots // 2:
            few = slots
        size = few if count <= few else slots
        positions = np.zeros(size, np.int32)
        positions[:count] = cache.used[:count]
        cache.append(range(count), np.ones(count, np.int64))
        # Compile the step for few slots too, because later steps may need it. Its tokens have
        # positions beyond the cache, so nothing is written.
        kind = (decode, slots, cache.capacity)
        if size > few and kind not in self._compiled.compiled_for_few:
            self._compiled.compiled_for_few.append(kind)
            beyond = np.full(few, cache.capacity, np.int32)
            arguments = self._build_arguments(np.zeros(few, np.int64), beyond, draws)
            *_, cache.arrays = decode(self._compiled.read_arrays(), cache.arrays, *arguments)
        arguments = self._build_arguments(tokens, positions, draws)
        *outputs, cache.arrays = decode(self._compiled.read_arrays(), cache.arrays, *arguments)
        return outputs[0] if len(outputs) == 1 else outputs

    def _build_arguments(
        self,
        tokens: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int32],
        draws: npt.NDArray[np.float64] | None,
    ) -> list[Any]:
        """Return the arguments of a decode step: its tokens, and the values of `draws`.

        The arguments are padded to one row per element of `positions`. The padding rows belong to
        inactive slots. Their tokens are written to position 0, which the next sequence of the slot
        overwrites.
        """
        config = self._decoder.config
        cos = sin = None
        if config.rope is not None:
            wide = torch.float64 if np.dtype(self._decoder.dtype) == np.float64 else torch.float32
            torch_positions = torch.from_numpy(positions.astype(np.int64))
            lengths = torch_positions + 1
            rotation = rope.compute_rotation(config.rope, torch_positions, lengths, wide)
            cos, sin = (to_numpy(x).astype(self._decoder.dtype) for x in rotation)
        count = min(len(tokens), len(positions))
        padded_tokens = np.zeros((len(positions), 1), np.int32)
        padded_tokens[:count, 0] = tokens[:count]
        segments = np.ones_like(padded_tokens)
        rows = self._place(TokenRows(padded_tokens, positions[:, None], segments, cos, sin))
        arguments: list[Any] = [rows]
        if draws is not None:
            count = min(draws.shape[1], len(positions))
            padded_draws = np.zeros((len(draws), len(positions)))
            padded_draws[:, :count] = draws[:, :count]
            arguments += list(padded_draws.astype(self._decoder.wide))
        return arguments

    def build_multi_step_decoder(self, rows: DecodeBatch, settings: SettingsTable) -> None:
        """Return None, because each decode step is a separate call."""

    def on_weights_changed(self) -> None:
        """Do nothing, because each pass reads the current parameters."""

    def close(self) -> None:
        """Do nothing, because each cache frees its memory in `close`."""

    def _place(self, rows: TokenRows) -> TokenRows:
        placed: TokenRows = put_on_mesh(rows, self._decoder.row_sharding)
        return placed


def choose_budget(
    decoder: DecoderSettings, devices: Sequence[Any], kv_cache_gb: float | None
) -> GenerationBudget:
    """Return the limits of generation on a mesh, by the rules of `choose_default_budget`.

    `kv_cache_gb` is the maximum size of the cache in GiB; None chooses it by the device's memory.
    """
    config = decoder.config
    # Only the memory of this process's devices can be read.
    first = next(device for device in devices if device.process_index == jax.process_index())
    kind = first.platform
    if kv_cache_gb is not None:
        num_bytes = kv_cache_gb * GIGABYTE
    elif kind == "cpu":
        num_bytes = KV_SHARE * read_memory_bytes(torch.device("cpu"))
    else:
        memory = first.memory_stats() or {}
        total = memory.get("bytes_limit", 0)
        free = total - memory.get("bytes_in_use", 0)
        num_bytes = min(KV_SHARE * total, FREE_SHARE * free) * len(devices)
    if jax.process_count() > 1:  # all hosts must admit the same sequences
        num_bytes = float(multihost_utils.process_allgather(np.float32(num_bytes)).min())
    elements = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    sharding = _choose_sharding(decoder)
    if sharding is not None and "mp" not in sharding.spec:
        elements *= sharding.mesh.shape["mp"]  # number of copies of each key and value
    per_token = elements * jnp.dtype(decoder.dtype).itemsize
    return GenerationBudget(
        max_sequences=MAX_SEQUENCES.get(kind, DEFAULT_MAX_SEQUENCES),
        max_tokens=max(1, int(num_bytes / per_token)),
        max_prefill_tokens=PREFILL_TOKENS.get(kind, DEFAULT_PREFILL_TOKENS),
        splits_prompts=False,
    )


def _choose_sharding(decoder: DecoderSettings) -> NamedSharding | None:
    """Return the sharding of a cache: slots over the data axes, and heads over `mp`.

    Heads are not divided if their number is not a multiple of the size of `mp`. Returns None for a
    single device.
    """
    if decoder.row_sharding is None:
        return None
    mesh = decoder.row_sharding.mesh
    heads = "mp" if decoder.config.num_kv_heads % mesh.shape["mp"] == 0 else None
    return NamedSharding(mesh, P(None, BATCH, heads))


def _set_sharding(cache: Cache, decoder: DecoderSettings) -> Cache:
    """Make the compiler divide a cache as `_choose_sharding` specifies."""
    sharding = _choose_sharding(decoder)
    if sharding is None:
        return cache
    return jax.tree.map(partial(lax.with_sharding_constraint, shardings=sharding), cache)


# -- compiled functions


def _prefill(
    parameters: Parameters,
    cache: Cache,
    rows: TokenRows,
    reads: Array,
    slots: Array,
    end_slots: Array,
    *,
    decoder: DecoderSettings,
) -> tuple[Array, Cache]:
    """Compute prompts in rows, and write their keys and values to the cache.

    Returns hidden states [slots, hidden], and the cache. `slots`, int32 [R * L], is the slot of
    each token; keys and values are dropped if it is beyond the cache. The hidden state at row
    `reads[i]` is returned at the index `end_slots[i]`.
    """
    hidden, new = compute_hidden(parameters, rows, decoder, return_kv=True)
    positions = rows.positions.reshape(-1)

    def write(old: Array, values: Array) -> Array:
        layers, kv_shape = len(values), values.shape[3:]
        flat = values.reshape(layers, -1, *kv_shape).swapaxes(0, 1)  # [R * L, layers, k, d]
        return old.at[:, slots, :, positions].set(flat, mode="drop")

    cache = jax.tree.map(write, cache, new)
    num_slots = cache[0].keys.shape[1]
    states = jnp.zeros((num_slots, hidden.shape[-1]), hidden.dtype)
    states = states.at[end_slots].set(hidden.reshape(-1, hidden.shape[-1])[reads], mode="drop")
    return states, _set_sharding(cache, decoder)


def _decode(
    parameters: Parameters, cache: Cache, rows: TokenRows, *, decoder: DecoderSettings
) -> tuple[Array, Cache]:
    """Compute one token of each of the first R slots.

    Returns the hidden states [R, hidden], and the cache with the tokens' keys and values.
    """
    count = len(rows.tokens)
    past = jax.tree.map(lambda array: array[:, :count], cache)
    hidden, new = compute_hidden(parameters, rows, decoder, past, return_kv=True)
    slots = jnp.arange(count)

    def write(old: Array, values: Array) -> Array:
        return old.at[:, slots, :, rows.positions[:, 0]].set(values[:, :, 0].swapaxes(0, 1))

    return hidden[:, 0], _set_sharding(jax.tree.map(write, cache, new), decoder)


def _decode_and_sample(
    parameters: Parameters,
    cache: Cache,
    rows: TokenRows,
    uniforms: Array,
    temperatures: Array,
    *,
    decoder: DecoderSettings,
) -> tuple[Array, Array, Cache]:
    """Compute one token of each of the first R slots, and sample the next tokens.

    Returns the next tokens [R], their log-probs [R], and the cache. Tokens are sampled as in
    `weft.engine.generation.sampling.sample_rows`. If all temperatures are 0, the most likely tokens
    are returned.
    """
    hidden, cache = _decode(parameters, cache, rows, decoder=decoder)
    scores = compute_logits(parameters, hidden, decoder)
    scores = scores / jnp.where(temperatures == 0, 1, temperatures)[:, None]
    tokens = lax.cond(
        (temperatures == 0).all(),
        lambda: scores.argmax(axis=-1),
        lambda: _invert_cdf(jax.nn.softmax(scores, axis=-1), uniforms),
    )
    logprobs = jax.nn.log_softmax(scores, axis=-1)
    return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0], cache


def _invert_cdf(weights: Array, uniforms: Array) -> Array:
    """Draw one id per row, as `weft.engine.generation.sampling.invert_cdf` does.

    Sums are computed in the weights' dtype, which moves the boundaries between ids by a few units
    in the last place.
    """
    weights = jnp.pad(weights, ((0, 0), (0, -weights.shape[1] % CDF_BLOCK)))
    blocks = weights.reshape(len(weights), -1, CDF_BLOCK)
    ends = jnp.cumsum(blocks.sum(axis=-1), axis=-1)
    target = uniforms * ends[:, -1]

    def find_first_above(ends: Array, target: Array) -> Array:
        """Return the first index in each row of `ends` whose element exceeds the row's target."""
        return jnp.minimum((ends <= target[:, None]).sum(axis=-1), ends.argmax(axis=-1))

    block = find_first_above(ends, target)
    rows = jnp.arange(len(weights))
    block_start = jnp.where(block > 0, ends[rows, jnp.maximum(block - 1, 0)], 0)
    ends_in_block = jnp.cumsum(blocks[rows, block], axis=-1)
    return block * CDF_BLOCK + find_first_above(ends_in_block, target - block_start)


def _copy_slot(cache: Cache, source: Array, targets: Array, *, decoder: DecoderSettings) -> Cache:
    """Copy the slot `source` to the slots `targets`; targets beyond the cache are ignored."""

    def copy(array: Array) -> Array:
        slot = lax.dynamic_slice_in_dim(array, source, 1, axis=1)
        return array.at[:, targets].set(slot, mode="drop")

    return _set_sharding(jax.tree.map(copy, cache), decoder)


def _grow(cache: Cache, *, decoder: DecoderSettings, slots: int, capacity: int) -> Cache:
    """Return a larger cache with the same contents."""

    def pad(array: Array) -> Array:
        new_slots = slots - array.shape[1]
        new_tokens = capacity - array.shape[3]
        return jnp.pad(array, ((0, 0), (0, new_slots), (0, 0), (0, new_tokens), (0, 0)))

    return _set_sharding(jax.tree.map(pad, cache), decoder)
