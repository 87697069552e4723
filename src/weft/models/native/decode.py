"""A decode step through all blocks in one call: the same kernels as block by block, in the same order, and so the same bits.

For networks of Llama's form: RMS norms before attention and MLP, a gated MLP with SiLU, no experts, no adapters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weft.models.config import TransformerConfig
from weft.models.native import attention, library
from weft.models.native.product import MOST_ROWS
from weft.models.packed import Cached

if TYPE_CHECKING:
    from weft.models.transformer import Block

LINEAR = ("q", "k", "v", "o", "gate", "up", "down")


class _Linear(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p))


class _Block(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("norm1", "norm2", "q_norm", "k_norm")),
        *((name, _Linear) for name in LINEAR),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        ("scale", ctypes.c_double),
        ("window", ctypes.c_long),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("states", "cos", "sin", "segments", "places")),
        *((name, ctypes.c_long) for name in ("rows", "count", "blocks", "hidden", "heads", "kv", "dim")),
        *((name, ctypes.c_long) for name in ("inner", "half", "room", "threads")),
        *((name, ctypes.c_double) for name in ("eps", "offset")),
    )


def fits(config: TransformerConfig) -> bool:
    """Whether the kernel computes blocks like these."""
    plain = config.placement == "pre" and not config.parallel_residual and config.experts is None
    normed = config.norm != "layer" and config.norm_weight and not config.norm_bias and config.qk_norm in (None, "head")
    gated = config.gated and config.activation == "silu"
    return plain and normed and gated and config.attention_softcap is None and config.head_dim <= attention.MOST_DIM


def serves(blocks: Sequence[Block], config: TransformerConfig, states: Tensor, context: Cached) -> bool:
    """Whether the kernel takes this pass: few new tokens of sequences with a slot of their own alone, without gradients."""
    few = len(states) <= MOST_ROWS and not torch.is_grad_enabled() and library.serves(states)
    if not few or context.continued or not fits(config):
        return False
    return all(isinstance(layer, nn.Linear) for block in blocks for layer in _linear(block))


def run(
    blocks: Sequence[Block], config: TransformerConfig, states: Tensor, context: Cached,
    rotation: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """Take `states` [T, hidden] through the blocks, in their place."""
    given = [_block(block, context) for block in blocks]
    cos, sin = (None, None) if rotation is None else (angle.contiguous() for angle in rotation)
    step = _Step(
        states=states.data_ptr(), cos=_at(cos), sin=_at(sin), segments=_at(context.segments), places=_at(context.places),
        rows=len(states), count=len(context.segments), blocks=len(given), hidden=config.hidden_size,
        heads=config.num_heads, kv=config.num_kv_heads, dim=config.head_dim, inner=config.intermediate_size,
        half=0 if cos is None else cos.shape[-1], room=context.cache.capacity, threads=torch.get_num_threads(),
        eps=config.norm_eps, offset=0.0 if config.norm == "rms" else 1.0,
    )  # fmt: skip
    library.call("weft_decode", (_Block * len(given))(*given), step)


def _linear(block: Block) -> tuple[Any, ...]:
    """The layers that `LINEAR` names."""
    attend: Any
    mlp: Any
    attend, mlp = block.attention, block.mlp
    return attend.q, attend.k, attend.v, attend.o, mlp.gate, mlp.up, mlp.down


def _block(block: Block, context: Cached) -> _Block:
    attend: Any = block.attention
    heads = (None, None) if attend.qk_norm is None else (attend.q_norm.weight, attend.k_norm.weight)
    return _Block(
        *(_at(weight) for weight in (block.norm1.weight, block.norm2.weight, *heads)),
        *((_at(layer.weight), _at(layer.bias)) for layer in _linear(block)),
        _at(context.cache.keys[block.layer]), _at(context.cache.values[block.layer]),
        attend.scores.scale, attend.scores.window or 0,
    )  # fmt: skip


def _at(x: Tensor | None) -> Any:
    return None if x is None else x.data_ptr()
