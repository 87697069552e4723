"""Forward pass of a whole network over cached sequences in one call: prefill or decode steps.

The result is the hidden states that the head reads, or the tokens drawn from them. The kernels and
their order are those of the block-by-block pass, so results are bit-identical. Supports networks of
Llama's form: RMS norms before attention and MLP, a gated MLP with SiLU, no experts, no adapters, no
soft-capping.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.kernels.cpu import library, structures
from weft.kernels.cpu.product import MOST_ROWS
from weft.kernels.cpu.structures import get_pointer

NO_MEMORY = -2  # value of `Outcome` in kernels.h


class LinearWeights(NamedTuple):
    """Weight and bias of a linear layer."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]


@dataclass(frozen=True)
class BlockWeights:
    """Parameters of a block, and its part of the cache: [slots, kv_heads, room, head_dim] each."""

    norm1: Tensor
    norm2: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: LinearWeights
    o: LinearWeights
    gate_up: LinearWeights
    down: LinearWeights
    keys: Tensor
    values: Tensor
    scale: float
    window: int | None


@dataclass(frozen=True)
class NetworkWeights:
    """Parameters and sizes of a network; `offset` is added to the weights of norms."""

    embedding: Tensor  # [V, H]
    blocks: Sequence[BlockWeights]
    norm: Tensor
    head: LinearWeights | None  # shape of the embedding; needed to draw tokens
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    eps: float
    offset: float

    def list_tensors(self) -> list[Tensor]:
        """Return all parameters, without the cached keys and values."""
        linear = [layer for b in self.blocks for layer in (b.qkv, b.o, b.gate_up, b.down)]
        linear += [] if self.head is None else [self.head]
        norms = [
            n for b in self.blocks for n in (b.norm1, b.norm2, b.q_norm, b.k_norm) if n is not None
        ]
        return [
            self.embedding,
            self.norm,
            *norms,
            *(t for layer in linear for t in layer if t is not None),
        ]


class PrefixRows(NamedTuple):
    """Rows of a pass that continue a prefix whose keys and values are stored separately.

    `stored` has the prefix's keys, then values, of each block.
    """

    rows: Tensor  # int64 [n]
    used: int  # tokens of the prefix
    room: int  # tokens for which there is room
    stored: Sequence[Tensor]


@dataclass(frozen=True)
class CachedPass:
    """New tokens of cached sequences.

    Sequence i has `new[i]` new tokens, is in slot `slots[i]`, and has `lengths[i]` tokens there,
    including the new ones. Row t uses rotation `index[t]` of cos and sin [P, 1, half], if the
    network has rotations.
    """

    tokens: Tensor  # int64 [T]
    slots: npt.NDArray[np.int64]
    new: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    rotation: tuple[Tensor, Tensor, Tensor] | None = None  # cos, sin, index int64 [T]
    prefixes: Sequence[PrefixRows] = ()


@dataclass(frozen=True)
class DrawParameters:
    """Sampling parameters of decode steps.

    Tokens are drawn like `softmax.draw` from logits / `temperature`, with `uniforms` float64
    [steps, R]. A step that draws a token of `is_stop`, bool [V], or gets a log-prob that is not
    finite, is the last one. In the first `early` steps, int64 [R], a row draws no token of
    `is_stop`; these tokens still count in its log-probs.
    """

    uniforms: Tensor
    is_stop: Tensor
    early: Tensor
    temperature: float


def serves(weights: NetworkWeights) -> bool:
    """Return True if the parameters and caches are plain, contiguous float32 CPU tensors."""
    stored = [x for block in weights.blocks for x in (block.keys, block.values)]
    return all(library.serves(x) and x.is_contiguous() for x in (*weights.list_tensors(), *stored))


@dataclass
class CachedForward:
    """Forward passes of a network over one cache.

    Parameters and cache must not move during its lifetime. `_step` has the values that all passes
    share, and those of the last pass.
    """

    weights: NetworkWeights
    _blocks: Any = field(init=False, repr=False)
    _step: structures.StepStruct = field(init=False, repr=False)

    def __post_init__(self) -> None:
        weights = self.weights
        self._blocks = (structures.BlockStruct * len(weights.blocks))(
            *map(_build_block_struct, weights.blocks)
        )
        vocabulary, hidden = weights.embedding.shape
        self._step = structures.StepStruct(
            embedding=get_pointer(weights.embedding),
            norm=get_pointer(weights.norm),
            blocks=len(weights.blocks),
            vocabulary=vocabulary,
            hidden=hidden,
            heads=weights.num_heads,
            kv=weights.num_kv_heads,
            dim=weights.head_dim,
            inner=weights.intermediate_size,
            room=weights.blocks[0].keys.shape[2],
            few=MOST_ROWS,
            eps=weights.eps,
            offset=weights.offset,
        )

    def run(self, at: CachedPass, wanted: Tensor | None = None) -> Tensor:
        """Return hidden states [T, hidden] after the last norm, or those of the `wanted` rows.

        `wanted` is int64 [N]. Raises `IndexError` for a token outside the vocabulary or a row that
        does not exist, and `MemoryError` if memory is short.
        """
        if wanted is not None and not 0 < len(wanted) <= len(at.tokens):
            return self.run(at).index_select(0, wanted)
        states, _kept = self._begin(at, None if wanted is None else wanted.contiguous())
        if outcome := library.call("weft_forward", self._blocks, self._step):
            raise self._build_error(outcome, at, wanted)
        return states

    def run_ahead(self, at: CachedPass, draws: DrawParameters) -> tuple[Tensor, Tensor]:
        """Run several decode steps; return tokens int64 [n, R] and log-probs float32 [n, R].

        `at` is the first decode step, of slots 0 to R - 1. Each later step runs on the tokens that
        the previous one drew. n is at most the number of steps in `draws`. The cache must have room
        for all of them; `at.lengths` counts the tokens of the first. Raises like `run`.
        """
        assert self.weights.head is not None, "tokens are drawn by a head"
        steps, rows = draws.uniforms.shape
        ids = torch.empty(steps, rows, dtype=torch.int64)
        logprobs = torch.empty(steps, rows)
        given = *self.weights.head, draws.uniforms, draws.is_stop, draws.early, ids, logprobs
        _, _kept = self._begin(at, None)
        how = structures.DrawsStruct(*map(get_pointer, given), draws.temperature, steps)
        count = library.call("weft_decode_ahead", self._blocks, how, self._step)
        if count < 0:
            raise self._build_error(count, at, None)
        return ids[:count], logprobs[:count]

    def _begin(self, at: CachedPass, wanted: Tensor | None) -> tuple[Tensor, tuple[Any, ...]]:
        """Set up `_step` for a pass; return the states to be filled, and the objects it points to.

        The caller must keep these objects alive during the pass.
        """
        assert at.tokens.dtype == torch.int64 and (wanted is None or wanted.dtype == torch.int64)
        step = self._step
        tokens = at.tokens.contiguous()
        slots, news, lengths = map(torch.from_numpy, (at.slots, at.new, at.lengths))
        states = torch.empty(len(tokens) if wanted is None else len(wanted), step.hidden)
        step.states, step.tokens, step.wanted, step.wants = (
            *map(get_pointer, (states, tokens, wanted)),
            len(states),
        )
        step.slots, step.news, step.lengths = map(get_pointer, (slots, news, lengths))
        step.rows = len(tokens)
        step.count = len(at.slots)
        step.threads = torch.get_num_threads()
        if at.rotation is None:
            rotation: tuple[Tensor, ...] = ()
        else:
            rotation = tuple(x.contiguous() for x in at.rotation)
        if rotation:
            step.cos, step.sin, step.positions = map(get_pointer, rotation)
            step.half = rotation[0].shape[-1]
        prefixes = [_build_prefix_struct(prefix) for prefix in at.prefixes]
        step.prefixes, step.shared = (
            (structures.PrefixStruct * len(prefixes))(*prefixes),
            len(prefixes),
        )
        return states, (tokens, wanted, slots, news, lengths, rotation, prefixes, at)

    def _build_error(self, outcome: int, at: CachedPass, wanted: Tensor | None) -> Exception:
        """Return the exception for a kernel's outcome."""
        step = self._step
        if outcome == NO_MEMORY:
            return MemoryError(f"not enough memory for a pass over {len(at.tokens)} tokens")
        for token in at.tokens.tolist():
            if not 0 <= token < step.vocabulary:
                return IndexError(f"token {token} is outside the vocabulary of {step.vocabulary}")
        rows = [] if wanted is None else wanted.tolist()
        return IndexError(
            f"there is no row {next(row for row in rows if not 0 <= row < step.rows)} in "
            f"{step.rows}"
        )


def _build_block_struct(block: BlockWeights) -> structures.BlockStruct:
    norms = [getattr(block, name) for name in structures.NORMS]
    linear = [part for name in structures.PRODUCTS for part in getattr(block, name)]
    pointers = structures.Parameters(*map(get_pointer, (*norms, *linear)))
    return structures.BlockStruct(
        pointers, get_pointer(block.keys), get_pointer(block.values), block.scale, block.window or 0
    )


def _build_prefix_struct(prefix: PrefixRows) -> structures.PrefixStruct:
    stored = (ctypes.c_void_p * len(prefix.stored))(*map(get_pointer, prefix.stored))
    return structures.PrefixStruct(
        get_pointer(prefix.rows), len(prefix.rows), prefix.used, prefix.room, stored
    )
