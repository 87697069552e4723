"""A pass over new tokens of cached sequences in one call, a prefill or a decode step, from tokens to the states that the head
reads: the same kernels as block by block, in the same order, and so the same bits.

For networks of Llama's form: RMS norms before attention and MLP, a gated MLP with SiLU, no experts, no adapters.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from weft.models import rope
from weft.models.config import TransformerConfig
from weft.models.native import large_pages, library
from weft.models.native.block import FUSED, fused, layers_of, plain, pointer
from weft.models.native.product import MOST_ROWS
from weft.models.packed import Cached, Packed, Sharers

if TYPE_CHECKING:
    from weft.models.heads import Projection
    from weft.models.kv_cache import KVCache
    from weft.models.transformer import Block, Norm, Transformer

NORMS = ("norm1", "norm2", "q_norm", "k_norm")
NO_MEMORY = -2  # of `Outcome` in forward.h


# Weights of the norms; weight and bias of each product.
_Pointers: Any = ctypes.c_void_p * (len(NORMS) + 2 * len(FUSED))


class _Block(ctypes.Structure):
    _fields_ = (
        ("parameters", _Pointers),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        ("scale", ctypes.c_double),
        ("window", ctypes.c_long),
    )


class _Prefix(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("count", "keys", "room")),
        ("stored", ctypes.POINTER(ctypes.c_void_p)),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("states", "embedding", "norm", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "wanted", "slots", "news", "lengths")),
        *(
            (name, ctypes.c_long)
            for name in ("rows", "wants", "count", "blocks", "vocabulary", "hidden", "heads", "kv")
        ),
        *((name, ctypes.c_long) for name in ("dim", "inner", "half", "room", "few", "threads")),
        *((name, ctypes.c_double) for name in ("eps", "offset")),
        ("prefixes", ctypes.POINTER(_Prefix)),
        ("shared", ctypes.c_long),
    )


def fits(config: TransformerConfig) -> bool:
    """Whether the kernel computes networks like this one."""
    ends = (
        config.embed_scale is None
        and config.embed_dim is None
        and config.learned_positions is None
        and config.final_norm
    )
    return ends and plain(config) and config.qk_norm in (None, "head")


@dataclass
class Prepared:
    """A network as the kernel reads it over one cache. `step` holds what all steps have in common, and what the last had."""

    network: Transformer
    blocks: ctypes.Array[_Block]
    step: _Step
    held: list[torch.UntypedStorage]  # its parameters' memory
    draws: bool  # whether the kernel reads the output matrix too
    rotations: tuple[Tensor, Tensor] | None = None  # of the positions that were asked for so far
    sharers: tuple[Sharers, ...] | None = None  # of the decode step whose prefixes `step` holds
    prefixes: list[_Prefix] = field(default_factory=list)

    @classmethod
    def of(cls, network: Transformer, cache: KVCache) -> Prepared:
        blocks: Any = network.blocks
        made = (_Block * len(blocks))()
        for at, block in enumerate(blocks):
            scores, stored = block.attention.scores, (cache.keys[block.layer], cache.values[block.layer])
            pointers = _Pointers(*map(pointer, _parameters(block)))
            made[at] = _Block(pointers, *map(pointer, stored), scores.scale, scores.window or 0)
        config, (vocabulary, hidden) = network.config, network.embed.weight.shape
        step = _Step(
            embedding=pointer(network.embed.weight), norm=pointer(_weight(network.norm)), blocks=len(made),
            vocabulary=vocabulary, hidden=hidden, heads=config.num_heads, kv=config.num_kv_heads, dim=config.head_dim,
            inner=config.intermediate_size, room=cache.capacity, few=MOST_ROWS, eps=config.norm_eps,
            offset=0.0 if config.norm == "rms" else 1.0,
        )  # fmt: skip
        held = [parameter.untyped_storage() for parameter in network.parameters()]
        draws = network.kind == "lm" and _reads(network.projection, network.embed.weight.shape)
        if draws:
            large_pages.collapse(network.projection.weight)
        return cls(network, made, step, held, draws)

    def rotation(self, x: Packed, context: Cached, steps: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """(cos, sin, each [P, 1, half], the row of them that each token of the first step takes, int64 [T]); None without a
        rotation."""
        network = self.network
        settings = network.config.rope
        if settings is None:
            return None
        if settings.scaling in rope.CHANGING:
            cos, sin = rope.rotation(settings, x.positions, context.token_lengths, network.embed.weight.dtype)
            return cos.contiguous(), sin.contiguous(), torch.arange(len(x.positions))
        end = max(context.cache.capacity, context.max_used + steps) + int(context.before.max())
        if self.rotations is None or self.rotations[0].shape[0] < end:
            positions = torch.arange(end)
            self.rotations = rope.rotation(settings, positions, positions, network.embed.weight.dtype)
        return *self.rotations, x.positions

    def begin(
        self, x: Packed, context: Cached, wanted: Tensor | None, steps: int
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Have `step` hold this pass, with rotations for `steps` of them; the states that are `wanted`, to be filled, and what
        else it points to."""
        assert x.tokens.dtype == torch.int64 and (wanted is None or wanted.dtype == torch.int64)
        tokens, given = x.tokens.contiguous(), (context.slots, context.new, context.used + context.new)
        slots, news, lengths = map(torch.from_numpy, given)
        step, rows, rotation = self.step, tokens.shape[0], self.rotation(x, context, steps)
        states = torch.empty(rows if wanted is None else len(wanted), step.hidden)
        step.states, step.tokens, step.wanted, step.wants = *map(pointer, (states, tokens, wanted)), len(states)
        step.slots, step.news, step.lengths = map(pointer, (slots, news, lengths))
        step.rows, step.count, step.threads = rows, len(context.slots), torch.get_num_threads()
        if rotation is not None:
            step.cos, step.sin, step.positions = map(pointer, rotation)
            step.half = rotation[0].shape[-1]
        self.share(context)
        return states, (tokens, wanted, slots, news, lengths, *(rotation or ()))

    def share(self, context: Cached) -> None:
        """Have `step` hold the prefixes that rows go on from; those of a decode step are mostly those of the one before."""
        sharers = context.sharers if context.max_len == 1 else None
        if sharers is None or sharers is not self.sharers:
            self.prefixes = [_prefix(prefix, rows) for prefix, rows in context.continued]
            self.step.prefixes, self.step.shared = (_Prefix * len(self.prefixes))(*self.prefixes), len(self.prefixes)
            self.sharers = sharers


def prepared(network: Transformer, cache: KVCache) -> Prepared | None:
    """The network, where the kernel takes its passes over the cache: those without gradients. It is prepared once for a cache,
    which forgets it where its size changes, and where it is told that weights may have `moved`."""
    if torch.is_grad_enabled():
        return None
    if cache.prepared is None or cache.prepared.network is not network:
        blocks, weight = cast(Any, network.blocks), network.embed.weight
        layers = (layer for block in blocks for layers in layers_of(block) for layer in layers)
        # What fails soonest comes first: a network that does not fit is asked in every step.
        linear = fits(network.config) and all(isinstance(layer, nn.Linear) for layer in layers)
        served = linear and library.serves(weight) and cache.dtype == weight.dtype
        plain = served and all(map(_plain, network.parameters()))
        cache.prepared = Prepared.of(network, cache) if plain else None
    return cache.prepared


def run(at: Prepared, x: Packed, context: Cached, wanted: Tensor | None = None) -> Tensor:
    """Hidden states [T, hidden] after the last norm, or those of the rows `wanted`, int64 [N]. Raises `IndexError` for a
    token outside the vocabulary and for a row that is not there, `MemoryError` where there is too little."""
    if wanted is not None and not 0 < len(wanted) <= len(x.tokens):
        return run(at, x, context).index_select(0, wanted)
    states, _kept = at.begin(x, context, None if wanted is None else wanted.contiguous(), 1)
    if outcome := library.call("weft_forward", at.blocks, at.step):
        raise failure(outcome, x, wanted, at.step)
    return states


def failure(outcome: int, x: Packed, wanted: Tensor | None, step: _Step) -> Exception:
    """What the kernel says did not work."""
    if outcome == NO_MEMORY:
        return MemoryError(f"not enough memory for a pass over {len(x.tokens)} tokens")
    for token in x.tokens.tolist():
        if not 0 <= token < step.vocabulary:
            return IndexError(f"token {token} is outside the vocabulary of {step.vocabulary}")
    rows = [] if wanted is None else wanted.tolist()
    return IndexError(f"there is no row {next(row for row in rows if not 0 <= row < step.rows)} in {step.rows}")


def _reads(projection: Projection, shape: torch.Size) -> bool:
    """Whether the kernel takes this output matrix, of the embedding's shape."""
    read = [projection.weight, *([] if projection.bias is None else [projection.bias])]
    lie = all(x.is_cpu and x.is_contiguous() and x.dtype == torch.float32 for x in read)
    return lie and projection.weight.shape == shape and projection.softcap is None


def _plain(parameter: Tensor) -> bool:
    return parameter.is_contiguous() and parameter.dtype == torch.float32


def _parameters(block: Block) -> list[Tensor | None]:
    """Weights of the norms, then weight and bias of each product."""
    norms = [getattr(block if name in block._modules else block.attention, name, None) for name in NORMS]
    layers = layers_of(block)
    weights = fused([[layer.weight for layer in each] for each in layers])
    biases = fused([[layer.bias for layer in each if layer.bias is not None] for each in layers])
    return [*(None if norm is None else _weight(norm) for norm in norms), *chain(*zip(weights, biases, strict=True))]


def _weight(norm: Norm) -> Tensor:
    assert norm.weight is not None
    return norm.weight


def _prefix(prefix: KVCache, rows: Tensor) -> _Prefix:
    stored = [pointer(x) for pair in zip(prefix.keys, prefix.values, strict=True) for x in pair]
    pointers = (ctypes.c_void_p * len(stored))(*stored)
    return _Prefix(pointer(rows), len(rows), int(prefix.used[0]), prefix.capacity, pointers)
