"""Forward pass of a whole network over cached sequences in one call, for prefill and decode steps.

The result is the hidden states after the last norm, or the tokens drawn from them. The kernels and
their order are the same as in a pass computed block by block, so results are bit-identical.
Networks like Llama are supported: they have RMS norms before attention and MLP, a gated MLP with
SiLU, and no experts, adapters or soft caps.
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

from weft.kernels.cpu import library
from weft.kernels.cpu.library import get_pointer
from weft.kernels.cpu.rows import MAX_ROWS

NO_MEMORY = -2  # value of `Outcome` in kernels.h


class LinearWeights(NamedTuple):
    """Weight and bias of a linear layer."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]


@dataclass(frozen=True)
class BlockWeights:
    """Parameters of one block, and the cached keys and values of the block.

    `keys` and `values` are [slots, kv_heads, room, head_dim], with `room` tokens per slot. `scale`
    is the factor by which q k^T is multiplied. `window` is the number of keys to which a token
    attends; None means no limit.
    """

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
    """Parameters and sizes of a network.

    In the RMS norms, `offset` is added to the weights, and `eps` is added to the mean squares.
    `head` is the output layer, which can be None if no tokens are drawn.
    """

    embedding: Tensor  # [V, H]
    blocks: Sequence[BlockWeights]
    norm: Tensor
    head: LinearWeights | None  # weight [V, H]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    eps: float
    offset: float

    def list_tensors(self) -> list[Tensor]:
        """Return all parameters as a list, without the cached keys and values."""
        norms: list[Tensor | None] = []
        layers: list[LinearWeights] = []
        for block in self.blocks:
            norms += [block.norm1, block.norm2, block.q_norm, block.k_norm]
            layers += [block.qkv, block.o, block.gate_up, block.down]
        if self.head is not None:
            layers.append(self.head)

        parameters = [*norms, *(parameter for layer in layers for parameter in layer)]
        return [self.embedding, self.norm, *(x for x in parameters if x is not None)]


class PrefixRows(NamedTuple):
    """Rows of a pass whose sequences begin with the same prefix, stored in a separate cache.

    Attributes:
        rows: Indices of these rows, int64 [n].
        used: Length of the prefix in tokens.
        room: Capacity of the cache of the prefix, in tokens.
        stored: Keys and values of the prefix: the keys of block 0, the values of block 0, the keys
            of block 1, and so on.
    """

    rows: Tensor
    used: int
    room: int
    stored: Sequence[Tensor]


@dataclass(frozen=True)
class CachedPass:
    """Input of one pass: the new tokens of several cached sequences.

    Sequence i has `new[i]` new tokens and is stored in slot `slots[i]`; after the pass, the slot
    contains `lengths[i]` tokens. `rotation` is None for a network without rotary positions.
    Otherwise it consists of two tables, cos and sin, and a row index for each token. The tables are
    [positions, 1, half of the rotated dimensions].
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

    Attributes:
        uniforms: Random numbers with which tokens are drawn, as in `rows.draw`, float64
            [steps, R].
        is_stop: True for each stop token, bool [V]. Decoding ends after the first step in which any
            row draws a stop token or has a log-prob that is not finite.
        early: Number of initial steps in which each row cannot draw a stop token, int64 [R]. In
            these steps too, log-probs are normalized over all tokens.
        temperature: Number by which the logits are divided.
    """

    uniforms: Tensor
    is_stop: Tensor
    early: Tensor
    temperature: float


def serves(weights: NetworkWeights) -> bool:
    """Return whether all parameters and caches are plain, contiguous float32 CPU tensors."""
    stored = [x for block in weights.blocks for x in (block.keys, block.values)]
    return all(library.serves(x) and x.is_contiguous() for x in (*weights.list_tensors(), *stored))


@dataclass
class CachedForward:
    """Forward passes of a network over one key-value cache, computed by a C++ kernel.

    The kernel keeps the addresses of the parameters and of the cache, so their memory must not move
    while this object is used.
    """

    weights: NetworkWeights
    _blocks: Any = field(init=False, repr=False)
    _step: library.StepStruct = field(init=False, repr=False)

    def __post_init__(self) -> None:
        weights = self.weights
        self._blocks = (library.BlockStruct * len(weights.blocks))(
            *map(_build_block_struct, weights.blocks)
        )
        vocabulary, hidden = weights.embedding.shape
        self._step = library.StepStruct(
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
            few=MAX_ROWS,
            eps=weights.eps,
            offset=weights.offset,
        )

    def run(self, inputs: CachedPass, rows_to_return: Tensor | None = None) -> Tensor:
        """Return the hidden states after the last norm, [T, hidden].

        If `rows_to_return`, int64 [N], is given, only these rows are returned, [N, hidden]. Raises
        `IndexError` if a token is outside the vocabulary or a row does not exist, and `MemoryError`
        if there is too little memory.
        """
        if rows_to_return is not None:
            # The kernel supports 1 to T rows.
            if not 0 < len(rows_to_return) <= len(inputs.tokens):
                return self.run(inputs).index_select(0, rows_to_return)
            rows_to_return = rows_to_return.contiguous()
        states, _referenced = self._begin(inputs, rows_to_return)
        if outcome := library.call("weft_forward", self._blocks, self._step):
            raise self._build_error(outcome, inputs, rows_to_return)
        return states

    def run_ahead(self, inputs: CachedPass, draws: DrawParameters) -> tuple[Tensor, Tensor]:
        """Run several decode steps; return tokens int64 [n, R] and log-probs float32 [n, R].

        `inputs` is the first decode step, for slots 0 to R - 1. Each later step processes the
        tokens that were drawn in the step before. n is the number of steps that were run, which is
        at most the number of steps in `draws`. The cache must have room for all steps, although
        `inputs.lengths` includes only the token of the first step. Raises the same errors as `run`.
        """
        assert self.weights.head is not None, "drawing tokens requires the head"
        steps, rows = draws.uniforms.shape
        ids = torch.empty(steps, rows, dtype=torch.int64)
        logprobs = torch.empty(steps, rows)
        tensors = *self.weights.head, draws.uniforms, draws.is_stop, draws.early, ids, logprobs
        _, _referenced = self._begin(inputs, None)
        draws_struct = library.DrawsStruct(*map(get_pointer, tensors), draws.temperature, steps)
        count = library.call("weft_decode_ahead", self._blocks, draws_struct, self._step)
        if count < 0:
            raise self._build_error(count, inputs, None)
        return ids[:count], logprobs[:count]

    def _begin(
        self, inputs: CachedPass, rows_to_return: Tensor | None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Write the arguments of a pass to the C structure `_step`.

        Returns the tensor to which the kernel will write the hidden states, and the objects whose
        memory `_step` points to. The caller must keep these objects alive during the pass.
        """
        assert inputs.tokens.dtype == torch.int64
        assert rows_to_return is None or rows_to_return.dtype == torch.int64
        step = self._step
        tokens = inputs.tokens.contiguous()
        slots, new, lengths = map(torch.from_numpy, (inputs.slots, inputs.new, inputs.lengths))
        num_states = len(tokens) if rows_to_return is None else len(rows_to_return)
        states = torch.empty(num_states, step.hidden)
        step.states, step.tokens, step.wanted = map(get_pointer, (states, tokens, rows_to_return))
        step.num_wanted = num_states
        step.slots, step.new_tokens, step.lengths = map(get_pointer, (slots, new, lengths))
        step.rows = len(tokens)
        step.count = len(inputs.slots)
        step.threads = torch.get_num_threads()
        if inputs.rotation is None:
            rotation: tuple[Tensor, ...] = ()
        else:
            rotation = tuple(x.contiguous() for x in inputs.rotation)
        if rotation:
            step.cos, step.sin, step.positions = map(get_pointer, rotation)
            step.half = rotation[0].shape[-1]
        prefixes = [_build_prefix_struct(prefix) for prefix in inputs.prefixes]
        step.prefixes = (library.PrefixStruct * len(prefixes))(*prefixes)
        step.shared = len(prefixes)
        return states, (tokens, rows_to_return, slots, new, lengths, rotation, prefixes, inputs)

    def _build_error(
        self, outcome: int, inputs: CachedPass, rows_to_return: Tensor | None
    ) -> Exception:
        """Return the exception for an error code: too little memory, or an invalid token or row."""
        step = self._step
        if outcome == NO_MEMORY:
            return MemoryError(f"not enough memory for a pass over {len(inputs.tokens)} tokens")
        for token in inputs.tokens.tolist():
            if not 0 <= token < step.vocabulary:
                return IndexError(f"token {token} is outside the vocabulary of {step.vocabulary}")
        rows = [] if rows_to_return is None else rows_to_return.tolist()
        missing = next(row for row in rows if not 0 <= row < step.rows)
        return IndexError(f"there is no row {missing} in {step.rows}")


def _build_block_struct(block: BlockWeights) -> library.BlockStruct:
    norms = [getattr(block, name) for name in library.NORMS]
    linear = [part for name in library.PRODUCTS for part in getattr(block, name)]
    pointers = library.Parameters(*map(get_pointer, (*norms, *linear)))
    return library.BlockStruct(
        pointers, get_pointer(block.keys), get_pointer(block.values), block.scale, block.window or 0
    )


def _build_prefix_struct(prefix: PrefixRows) -> library.PrefixStruct:
    stored = (ctypes.c_void_p * len(prefix.stored))(*map(get_pointer, prefix.stored))
    return library.PrefixStruct(
        get_pointer(prefix.rows), len(prefix.rows), prefix.used, prefix.room, stored
    )
