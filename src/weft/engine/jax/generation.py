"""Key-value caches and decode steps in JAX, for the generator of `weft.engine.generation`.

The scheduler, the random numbers and the handling of requests are the torch engine's. A cache is an
array of slots, one per sequence, all with room for the longest sequence of the run. Sizes are
chosen for the first sequences, and a decode step always computes all slots or an eighth of them, so
that a run compiles in its first step alone:

- prefill: prompts are packed into rows, as in training; their keys and values go to their slots.
- decode: each slot gets one token. If no sampling limit is set, the next token is drawn in the same
  compiled function; otherwise the logits are copied to the host.
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

LEAST_ROWS = 8  # of a decode step
FEW = 8  # a decode step computes all slots, or one in so many
COPIES = 8  # copies of a slot that are made at once
LOGIT_ROWS = (8, 16, 32, 64)  # hidden states whose logits are computed at once
Cache = list[KeysValues]  # of each stack of blocks


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
        self.ready: list[Any] = []  # kinds of decode steps that were compiled for few slots too

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
        if not self.compute_logits._cache_size():
            for size in LOGIT_ROWS:
                self.compute_logits(
                    self.read_arrays(), np.zeros((size, states.shape[1]), states.dtype)
                )
        parts = []
        start = 0
        while start < len(states):
            own = states[start : start + LOGIT_ROWS[-1]]
            size = min(size for size in LOGIT_ROWS if size >= len(own))
            padded = np.zeros((size, states.shape[1]), states.dtype)
            padded[: len(own)] = own
            parts.append(to_torch(self.compute_logits(self.read_arrays(), padded))[: len(own)])
            start += len(own)
        return torch.cat(parts)

    # -- what gives each generator its caches (`weft.engine.generation.caches.CacheProvider`)

    @property
    def num_bytes(self) -> int:
        """Return 0: between generators, only compiled functions stay."""
        return 0

    def take(self, network: Any, device: torch.device, budget: GenerationBudget) -> JaxCaches:
        return JaxCaches(self, budget)

    def give_back(self, caches: JaxCaches) -> None:
        caches.close()

    def drop(self) -> None:
        """Do nothing: caches are freed when their generator is closed."""

    @property
    def num_row_parts(self) -> int:
        """Number of parts into which rows are divided over the devices."""
        sharding = self.decoder.row_sharding
        return 1 if sharding is None else count_row_parts(sharding)


class JaxSlotCache:
    """Key-value cache of several sequences; implements `SequenceCache`.

    The active slots are 0 to n - 1. `used` [slots] has the number of tokens in each.
    """

    def __init__(self, compiled: CompiledDecoder, slots: int, capacity: int) -> None:
        self._compiled = compiled
        self.num_active = 0
        self.used = np.zeros(slots, np.int64)
        self.arrays = self._create(slots, capacity)

    def _create(self, slots: int, capacity: int) -> Cache:
        decoder = self._compiled.decoder
        config = decoder.config
        parameters = self._compiled.read_arrays()
        # Where the compiled functions put it, so that none is compiled for another place.
        mesh = cast(NamedSharding, next(iter(parameters.values())).sharding).mesh
        sharding = _choose_sharding(decoder) or NamedSharding(mesh, P())
        arrays = []
        for layers, _ in group_stacks(parameters):
            shape = (len(layers), slots, config.num_kv_heads, capacity, config.head_dim)
            pair = []
            for _ in range(2):
                pair.append(jnp.zeros(shape, decoder.dtype, device=sharding))
            arrays.append(KeysValues(*pair))
        return arrays

    @property
    def capacity(self) -> int:
        return int(self.arrays[0].keys.shape[3])

    def resize(self, slots: int, capacity: int) -> None:
        """Make room for at least so many slots and tokens in each."""
        if slots <= len(self.used) and capacity <= self.capacity:
            return
        slots, capacity = max(slots, len(self.used)), max(capacity, self.capacity)
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
        """Free a slot, to which the last active slot is moved; return that slot's old index."""
        last = self.num_active = self.num_active - 1
        if slot != last:
            self._copy(last, [slot])
        return last

    def _copy(self, source: int, slots: list[int]) -> None:
        for start in range(0, len(slots), COPIES):
            own = slots[start : start + COPIES]
            places = np.full(COPIES, len(self.used), np.int32)
            places[: len(own)] = own
            self.arrays = self._compiled.copy_slot(self.arrays, np.int32(source), places)
        self.used[slots] = self.used[source]

    def append(self, slots: Sequence[int], counts: npt.NDArray[np.int64]) -> None:
        """Count new tokens of slots, whose keys and values are about to be computed.

        Raises `ConfigError` if they would change the rotary frequencies of cached keys.
        """
        where = list(slots)
        check_rotation(self._compiled.decoder.config.rope, self.used[where], counts)
        self.used[where] += counts

    def link(self, slots: Iterable[int], prefix: None) -> None:
        """Do nothing: prefixes are not shared, because the block manager does not offer it."""
        assert prefix is None

    def take(self, other: Any) -> int:
        raise AssertionError("prompts are computed whole")

    def close(self) -> None:
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
        assert room is None, "prompts are computed whole"
        return JaxSlotCache(self._compiled, self.blocks.slots, self.blocks.capacity)

    def resize(self, cache: JaxSlotCache) -> None:
        cache.resize(self.blocks.slots, self.blocks.capacity)

    def prefill(
        self, cache: JaxSlotCache, slots: list[int], tokens: Sequence[Tensor], start: int = 0
    ) -> Tensor:
        """Compute prompts in empty slots; return the hidden states [R, hidden] of their ends."""
        lengths = np.array([len(own) for own in tokens])
        cache.append(slots, lengths)
        packed = pack(list(tokens))
        ends = torch.from_numpy(np.cumsum(lengths) - 1)
        packed = replace(packed, rows=ends, labels=packed.tokens[ends])
        parts = []
        blocks = pack_blocks(packed, self._decoder, None, self._shapes)
        for block in blocks:
            # Slots of the tokens, and of the ends: beyond the cache for padding, which is dropped.
            own = np.array(slots, np.int32)[block.sequences]
            slot_of = np.array([len(cache.used), *own], np.int32)[block.rows.segments]
            end_slots = np.full(len(block.reads.rows), len(cache.used), np.int32)
            end_slots[: len(block.outputs)] = np.array(slots, np.int32)[block.outputs]
            states, cache.arrays = self._compiled.prefill(
                self._compiled.read_arrays(),
                cache.arrays,
                self._place(block.rows),
                block.reads.rows,
                slot_of.reshape(-1),
                end_slots,
            )
            parts.append(states)
        joined: Tensor | None = None
        for block, states in zip(blocks, parts, strict=True):
            values = to_torch(states)
            if joined is None:
                joined = values.new_zeros(len(slots), values.shape[1])
            joined[block.outputs] = values[np.array(slots)[block.outputs]]
        assert joined is not None
        return joined

    def decode(self, cache: JaxSlotCache, tokens: npt.NDArray[np.int64]) -> Tensor:
        states = self._run(self._compiled.decode, cache, tokens)
        return to_torch(states)[: len(tokens)]

    def decode_and_sample(
        self, cache: JaxSlotCache, rows: DecodeBatch, settings: SettingsTable
    ) -> Callable[[], SampledRows] | None:
        count = len(rows)
        how = settings.build_graph_sampling(rows.settings[:count], rows.count[:count])
        if how is None:
            return None
        # Temperatures of 0 stand for the likeliest tokens.
        temperatures = np.zeros(count) if how.greedy else how.temperatures
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
        """Run a decode step of the first slots, and return what `decode` returns but the cache.

        `draws` [n, R] are further arguments of each row.
        """
        count = len(tokens)
        slots = len(cache.used)
        parts = self._compiled.num_row_parts
        few = -(-max(slots // FEW, LEAST_ROWS) // parts) * parts
        few = few if few <= slots // 2 else slots
        size = few if count <= few else slots
        positions = np.zeros(size, np.int32)
        positions[:count] = cache.used[:count]
        cache.append(range(count), np.ones(count, np.int64))
        ready = (decode, slots, cache.capacity)
        if size > few and ready not in self._compiled.ready:
            # A later step may be of few slots: it is compiled now, and writes beyond the cache.
            self._compiled.ready.append(ready)
            beyond = np.full(few, cache.capacity, np.int32)
            given = self._build_arguments(np.zeros(few, np.int64), beyond, draws)
            *_, cache.arrays = decode(self._compiled.read_arrays(), cache.arrays, *given)
        given = self._build_arguments(tokens, positions, draws)
        *outputs, cache.arrays = decode(self._compiled.read_arrays(), cache.arrays, *given)
        return outputs[0] if len(outputs) == 1 else outputs

    def _build_arguments(
        self,
        tokens: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int32],
        draws: npt.NDArray[np.float64] | None,
    ) -> list[Any]:
        """Return the tokens of a step and the other arguments of its rows, with rows added.

        Slots that are not active get a token too, in a place that their next owner writes.
        """
        config = self._decoder.config
        cos = sin = None
        if config.rope is not None:
            wide = torch.float64 if np.dtype(self._decoder.dtype) == np.float64 else torch.float32
            at = torch.from_numpy(positions.astype(np.int64))
            rotation = rope.compute_rotation(config.rope, at, at + 1, wide)
            cos, sin = (to_numpy(each).astype(self._decoder.dtype) for each in rotation)
        count = min(len(tokens), len(positions))
        last = np.zeros((len(positions), 1), np.int32)
        last[:count, 0] = tokens[:count]
        rows = self._place(TokenRows(last, positions[:, None], np.ones_like(last), cos, sin))
        arguments: list[Any] = [rows]
        if draws is not None:
            count = min(draws.shape[1], len(positions))
            whole = np.zeros((len(draws), len(positions)))
            whole[:, :count] = draws[:, :count]
            arguments += list(whole.astype(self._decoder.wide))
        return arguments

    def build_multi_step_decoder(self, rows: DecodeBatch, settings: SettingsTable) -> None:
        """Return None: each step is one call."""

    def on_weights_changed(self) -> None:
        """Do nothing: each pass reads the current parameters."""

    def close(self) -> None:
        """Do nothing, since each cache frees its memory in its own `close`."""

    def _place(self, rows: TokenRows) -> TokenRows:
        placed: TokenRows = put_on_mesh(rows, self._decoder.row_sharding)
        return placed


def choose_budget(
    decoder: DecoderSettings, devices: Sequence[Any], kv_cache_gb: float | None
) -> GenerationBudget:
    """Return the limits of generation on a mesh, by the rules of `choose_default_budget`."""
    config = decoder.config
    # Only the memory of own devices can be read.
    first = next(each for each in devices if each.process_index == jax.process_index())
    kind = first.platform
    if kv_cache_gb is not None:
        num_bytes = kv_cache_gb * GIGABYTE
    elif kind == "cpu":
        num_bytes = KV_SHARE * read_memory_bytes(torch.device("cpu"))
    else:
        memory = first.memory_stats() or {}
        whole = memory.get("bytes_limit", 0)
        free = whole - memory.get("bytes_in_use", 0)
        num_bytes = min(KV_SHARE * whole, FREE_SHARE * free) * len(devices)
    if jax.process_count() > 1:  # all hosts must take the same sequences
        num_bytes = float(multihost_utils.process_allgather(np.float32(num_bytes)).min())
    keys = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    sharding = _choose_sharding(decoder)
    if sharding is not None and "mp" not in sharding.spec:
        keys *= sharding.mesh.shape["mp"]  # as many copies
    per_token = keys * jnp.dtype(decoder.dtype).itemsize
    return GenerationBudget(
        max_sequences=MAX_SEQUENCES.get(kind, DEFAULT_MAX_SEQUENCES),
        max_tokens=max(1, int(num_bytes / per_token)),
        max_prefill_tokens=PREFILL_TOKENS.get(kind, DEFAULT_PREFILL_TOKENS),
        splits_prompts=False,
    )


def _choose_sharding(decoder: DecoderSettings) -> NamedSharding | None:
    """Return how a cache is divided: slots like rows, and heads over the axis of tensor ranks."""
    if decoder.row_sharding is None:
        return None
    mesh = decoder.row_sharding.mesh
    heads = "mp" if decoder.config.num_kv_heads % mesh.shape["mp"] == 0 else None
    return NamedSharding(mesh, P(None, BATCH, heads))


def _place_cache(cache: Cache, decoder: DecoderSettings) -> Cache:
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
    """Compute prompts in rows; return hidden states [slots, hidden], and the cache with their keys.

    `slots` [R * L] is the slot of each token; keys of tokens without one are dropped. The hidden
    states at `reads` are returned at the places `end_slots`.
    """
    hidden, new = compute_hidden(parameters, rows, decoder, keeps=True)
    positions = rows.positions.reshape(-1)

    def write(old: Array, own: Array) -> Array:
        flat = own.reshape(len(own), -1, *own.shape[3:]).swapaxes(0, 1)  # [R * L, layers, k, d]
        return old.at[:, slots, :, positions].set(flat, mode="drop")

    cache = jax.tree.map(write, cache, new)
    num_slots = cache[0].keys.shape[1]
    states = jnp.zeros((num_slots, hidden.shape[-1]), hidden.dtype)
    states = states.at[end_slots].set(hidden.reshape(-1, hidden.shape[-1])[reads], mode="drop")
    return states, _place_cache(cache, decoder)


def _decode(
    parameters: Parameters, cache: Cache, rows: TokenRows, *, decoder: DecoderSettings
) -> tuple[Array, Cache]:
    """Compute one token of the first slots; return the hidden states and the cache."""
    count = len(rows.tokens)
    past = jax.tree.map(lambda own: own[:, :count], cache)
    hidden, new = compute_hidden(parameters, rows, decoder, past, keeps=True)
    slots = jnp.arange(count)

    def write(old: Array, own: Array) -> Array:
        return old.at[:, slots, :, rows.positions[:, 0]].set(own[:, :, 0].swapaxes(0, 1))

    return hidden[:, 0], _place_cache(jax.tree.map(write, cache, new), decoder)


def _decode_and_sample(
    parameters: Parameters,
    cache: Cache,
    rows: TokenRows,
    uniforms: Array,
    temperatures: Array,
    *,
    decoder: DecoderSettings,
) -> tuple[Array, Array, Cache]:
    """Compute one token of the first slots; return their next tokens, log-probs and the cache.

    Tokens are sampled as in `weft.engine.generation.sampling.sample_rows`. If all temperatures are
    0, the likeliest ones are taken.
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
        return jnp.minimum((ends <= target[:, None]).sum(axis=-1), ends.argmax(axis=-1))

    block = find_first_above(ends, target)
    rows = jnp.arange(len(weights))
    before = jnp.where(block > 0, ends[rows, jnp.maximum(block - 1, 0)], 0)
    inside = jnp.cumsum(blocks[rows, block], axis=-1)
    return block * CDF_BLOCK + find_first_above(inside, target - before)


def _copy_slot(cache: Cache, source: Array, places: Array, *, decoder: DecoderSettings) -> Cache:
    """Copy one slot to others; places beyond the cache get no copy."""

    def copy(own: Array) -> Array:
        slot = lax.dynamic_slice_in_dim(own, source, 1, axis=1)
        return own.at[:, places].set(slot, mode="drop")

    return _place_cache(jax.tree.map(copy, cache), decoder)


def _grow(cache: Cache, *, decoder: DecoderSettings, slots: int, capacity: int) -> Cache:
    """Return a larger cache with the same contents."""

    def pad(own: Array) -> Array:
        missing = (slots - own.shape[1], capacity - own.shape[3])
        return jnp.pad(own, ((0, 0), (0, missing[0]), (0, 0), (0, missing[1]), (0, 0)))

    return _place_cache(jax.tree.map(pad, cache), decoder)
