"""A decode step in one call, from tokens to the states that the head reads: the same kernels as block by block, in the same
order, and so the same bits.

For networks of Llama's form: RMS norms before attention and MLP, a gated MLP with SiLU, no experts, no adapters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weft.models import rope
from weft.models.config import TransformerConfig
from weft.models.native import attention, library
from weft.models.native.product import MOST_ROWS
from weft.models.packed import Cached, Packed

if TYPE_CHECKING:
    from weft.models.kv_cache import KVCache
    from weft.models.transformer import Block, Norm, Transformer

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
        *((name, ctypes.c_void_p) for name in ("states", "embedding", "norm", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "segments", "places")),
        *((name, ctypes.c_long) for name in ("rows", "count", "blocks", "vocabulary", "hidden", "heads", "kv", "dim")),
        *((name, ctypes.c_long) for name in ("inner", "half", "room", "threads")),
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
    plain = config.placement == "pre" and not config.parallel_residual and config.experts is None
    normed = config.norm != "layer" and config.norm_weight and not config.norm_bias and config.qk_norm in (None, "head")
    gated = config.gated and config.activation == "silu"
    return (
        ends
        and plain
        and normed
        and gated
        and config.attention_softcap is None
        and config.head_dim <= attention.MOST_DIM
    )


@dataclass
class Prepared:
    """A network as the kernel reads it over one cache: its blocks, the modules and parameters that they were, and the rotations
    of the positions that were asked for so far."""

    network: Transformer
    blocks: ctypes.Array[_Block]
    modules: list[tuple[dict[str, Any], str, nn.Module]]  # where each is found, under which name
    addresses: list[int]
    rotations: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, network: Transformer, cache: KVCache) -> Prepared:
        blocks: Any = network.blocks
        made, modules = (_Block * len(blocks))(), _found(network._modules, ("embed", "norm"))
        for at, block in enumerate(blocks):
            scores, stored = block.attention.scores, (cache.keys[block.layer], cache.values[block.layer])
            pointers = _Pointers(*map(_at, _parameters(block)))
            made[at] = _Block(pointers, *map(_at, stored), scores.scale, scores.window or 0)
            modules += _found(block._modules, NORMS) + _found(block.attention._modules, (*NORMS, *"qkvo"))
            modules += _found(block.mlp._modules, LINEAR)
        return cls(network, made, modules, _addresses(modules))

    def holds(self, network: Transformer) -> bool:
        """Whether it is this network, with the same modules, and their parameters lie where they lay."""
        same = network is self.network and all(found.get(name) is module for found, name, module in self.modules)
        return same and _addresses(self.modules) == self.addresses

    def rotation(self, network: Transformer, x: Packed, context: Cached) -> tuple[Tensor, Tensor, Tensor] | None:
        """(cos, sin, each [P, 1, half], the row of them that each token takes, int64 [T]); None without a rotation."""
        settings = network.config.rope
        if settings is None:
            return None
        if settings.scaling in rope.CHANGING:
            cos, sin = rope.rotation(settings, x.positions, context.token_lengths, network.embed.weight.dtype)
            return cos.contiguous(), sin.contiguous(), torch.arange(len(x.positions))
        end = int((context.before + context.used + context.new).max())
        if self.rotations is None or len(self.rotations[0]) < end:
            positions = torch.arange(2 * end)
            self.rotations = rope.rotation(settings, positions, positions, network.embed.weight.dtype)
        return *self.rotations, x.positions


def prepared(network: Transformer, x: Packed, context: Cached) -> Prepared | None:
    """The network, where the kernel takes this pass: few new tokens of cached sequences, without gradients. It is prepared once
    for a cache, and again where modules or parameters are others or have moved, or the cache has, which then forgets it."""
    cache, weight = context.cache, network.embed.weight
    few = len(x.tokens) <= MOST_ROWS and not torch.is_grad_enabled() and library.serves(weight)
    if not few or cache.dtype != weight.dtype:
        return None
    if cache.prepared is None or not cache.prepared.holds(network):
        blocks: Any = network.blocks
        layers = (layer for block in blocks for layer in _linear(block))
        plain = fits(network.config) and weight.is_contiguous() and all(map(_plain, layers))
        cache.prepared = Prepared.of(network, cache) if plain else None
    return cache.prepared


def run(network: Transformer, at: Prepared, x: Packed, context: Cached) -> Tensor:
    """Hidden states [T, hidden] after the last norm. Raises `IndexError` for a token outside the vocabulary."""
    config, rotation = network.config, at.rotation(network, x, context)
    cos, sin, positions = (None, None, None) if rotation is None else rotation
    prefixes = [_prefix(prefix, rows) for prefix, rows in context.continued]
    states, tokens = network.embed.weight.new_empty(len(x.tokens), config.hidden_size), x.tokens.contiguous()
    step = _Step(
        states=_at(states), embedding=_at(network.embed.weight), norm=_at(_weight(network.norm)), cos=_at(cos), sin=_at(sin),
        tokens=_at(tokens), positions=_at(positions), segments=_at(context.segments), places=_at(context.places),
        rows=len(states), count=len(context.segments), blocks=len(at.blocks), vocabulary=len(network.embed.weight),
        hidden=config.hidden_size, heads=config.num_heads, kv=config.num_kv_heads, dim=config.head_dim,
        inner=config.intermediate_size, half=0 if cos is None else cos.shape[-1], room=context.cache.capacity,
        threads=torch.get_num_threads(), eps=config.norm_eps, offset=0.0 if config.norm == "rms" else 1.0,
        prefixes=(_Prefix * len(prefixes))(*prefixes), shared=len(prefixes),
    )  # fmt: skip
    if library.call("weft_decode", at.blocks, step):
        raise IndexError(f"a token of {x.tokens.tolist()} is outside the vocabulary of {len(network.embed.weight)}")
    return states


def _found(modules: dict[str, Any], names: Iterable[str]) -> list[tuple[dict[str, Any], str, nn.Module]]:
    return [(modules, name, modules[name]) for name in names if modules.get(name) is not None]


def _addresses(modules: list[tuple[dict[str, Any], str, nn.Module]]) -> list[int]:
    return [x.data_ptr() for _, _, module in modules for x in module._parameters.values() if x is not None]


def _linear(block: Block) -> list[Any]:
    """The layers that `LINEAR` names."""
    return [getattr(block.attention if name in "qkvo" else block.mlp, name) for name in LINEAR]


def _plain(layer: Any) -> bool:
    return isinstance(layer, nn.Linear) and layer.weight.is_contiguous() and layer.weight.dtype == torch.float32


def _parameters(block: Block) -> list[Tensor | None]:
    """Weights of the norms, then weight and bias of each layer."""
    norms = [getattr(block if name in block._modules else block.attention, name, None) for name in NORMS]
    layers = [x for layer in _linear(block) for x in (layer.weight, layer.bias)]
    return [None if norm is None else _weight(norm) for norm in norms] + layers


def _weight(norm: Norm) -> Tensor:
    assert norm.weight is not None
    return norm.weight


def _prefix(prefix: KVCache, rows: Tensor) -> _Prefix:
    stored = [_at(x) for pair in zip(prefix.keys, prefix.values, strict=True) for x in pair]
    pointers = (ctypes.c_void_p * len(stored))(*stored)
    return _Prefix(_at(rows), len(rows), int(prefix.used[0]), prefix.capacity, pointers)


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
