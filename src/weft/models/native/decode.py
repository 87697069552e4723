"""A decode step through all blocks in one call: the same kernels as block by block, in the same order, and so the same bits.

For networks of Llama's form: RMS norms before attention and MLP, a gated MLP with SiLU, no experts, no adapters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weft.models.config import TransformerConfig
from weft.models.native import attention, library
from weft.models.native.product import MOST_ROWS
from weft.models.packed import Cached

if TYPE_CHECKING:
    from weft.models.kv_cache import KVCache
    from weft.models.transformer import Block

NORMS = ("norm1", "norm2", "q_norm", "k_norm")
LINEAR = ("q", "k", "v", "o", "gate", "up", "down")


_Pointers: Any = ctypes.c_void_p * (len(NORMS) + 2 * len(LINEAR))  # weights of the norms; weight and bias of each layer


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
        *((name, ctypes.c_void_p) for name in ("states", "cos", "sin", "segments", "places")),
        *((name, ctypes.c_long) for name in ("rows", "count", "blocks", "hidden", "heads", "kv", "dim")),
        *((name, ctypes.c_long) for name in ("inner", "half", "room", "threads")),
        *((name, ctypes.c_double) for name in ("eps", "offset")),
        ("prefixes", ctypes.POINTER(_Prefix)),
        ("shared", ctypes.c_long),
    )


def fits(config: TransformerConfig) -> bool:
    """Whether the kernel computes blocks like these."""
    plain = config.placement == "pre" and not config.parallel_residual and config.experts is None
    normed = config.norm != "layer" and config.norm_weight and not config.norm_bias and config.qk_norm in (None, "head")
    gated = config.gated and config.activation == "silu"
    return plain and normed and gated and config.attention_softcap is None and config.head_dim <= attention.MOST_DIM


@dataclass(frozen=True)
class Prepared:
    """Blocks as the kernel reads them over one cache, and where their parameters lie."""

    blocks: ctypes.Array[_Block]
    parameters: list[Tensor]
    addresses: list[int]

    @classmethod
    def of(cls, blocks: Sequence[Block], cache: KVCache) -> Prepared:
        made, found = (_Block * len(blocks))(), []
        for at, block in enumerate(blocks):
            parameters, scores = _parameters(block), block.attention.scores
            stored = cache.keys[block.layer], cache.values[block.layer]
            made[at] = _Block(_Pointers(*map(_at, parameters)), *map(_at, stored), scores.scale, scores.window or 0)
            found += [x for x in parameters if x is not None]
        return cls(made, found, [x.data_ptr() for x in found])

    @property
    def holds(self) -> bool:
        """Whether the parameters lie where they lay."""
        return [x.data_ptr() for x in self.parameters] == self.addresses


def prepared(blocks: Sequence[Block], config: TransformerConfig, states: Tensor, context: Cached) -> Prepared | None:
    """The blocks, where the kernel takes this pass: few new tokens of cached sequences, without gradients. They are prepared
    once for a cache, and again where parameters have moved, or the cache has, which then forgets them."""
    cache = context.cache
    few = len(states) <= MOST_ROWS and not torch.is_grad_enabled() and library.serves(states)
    if not few or cache.dtype != states.dtype:
        return None
    if cache.prepared is None or not cache.prepared.holds:
        plain = fits(config) and all(_plain(layer) for block in blocks for layer in _linear(block))
        cache.prepared = Prepared.of(blocks, cache) if plain else None
    return cache.prepared


def run(
    blocks: Prepared, config: TransformerConfig, states: Tensor, context: Cached, rotation: tuple[Tensor, Tensor] | None
) -> None:
    """Take `states` [T, hidden] through the blocks, in their place."""
    prefixes = [_prefix(prefix, rows) for prefix, rows in context.continued]
    cos, sin = (None, None) if rotation is None else (angle.contiguous() for angle in rotation)
    step = _Step(
        states=states.data_ptr(), cos=_at(cos), sin=_at(sin), segments=_at(context.segments), places=_at(context.places),
        rows=len(states), count=len(context.segments), blocks=len(blocks.blocks), hidden=config.hidden_size,
        heads=config.num_heads, kv=config.num_kv_heads, dim=config.head_dim, inner=config.intermediate_size,
        half=0 if cos is None else cos.shape[-1], room=context.cache.capacity, threads=torch.get_num_threads(),
        eps=config.norm_eps, offset=0.0 if config.norm == "rms" else 1.0,
        prefixes=(_Prefix * len(prefixes))(*prefixes), shared=len(prefixes),
    )  # fmt: skip
    library.call("weft_decode", blocks.blocks, step)


def _linear(block: Block) -> list[Any]:
    """The layers that `LINEAR` names."""
    return [getattr(block.attention if name in "qkvo" else block.mlp, name) for name in LINEAR]


def _plain(layer: Any) -> bool:
    return isinstance(layer, nn.Linear) and layer.weight.is_contiguous() and layer.weight.dtype == torch.float32


def _parameters(block: Block) -> list[Tensor | None]:
    """Weights of the norms, then weight and bias of each layer."""
    norms = [getattr(block if name in block._modules else block.attention, name, None) for name in NORMS]
    layers = [x for layer in _linear(block) for x in (layer.weight, layer.bias)]
    return [None if norm is None else norm.weight for norm in norms] + layers


def _prefix(prefix: KVCache, rows: Tensor) -> _Prefix:
    stored = [_at(x) for pair in zip(prefix.keys, prefix.values, strict=True) for x in pair]
    pointers = (ctypes.c_void_p * len(stored))(*stored)
    return _Prefix(_at(rows), len(rows), int(prefix.used[0]), prefix.capacity, pointers)


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
