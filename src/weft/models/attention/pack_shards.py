"""Attention under context parallelism: local queries over the keys and values of the whole pack.

Each rank has several runs of consecutive tokens of the pack, and gathers the keys and values of the
other ranks' tokens. A piece is the part of one sequence that lies in one run. The keys that a piece
needs are consecutive: they begin at the start of the sequence and end at the piece's last token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import torch
from torch import Tensor

from weft import kernels
from weft.kernels import VarlenLengths, VarlenSegments, flash
from weft.models.attention import accelerator, rectangles
from weft.models.attention.contexts import AttentionInputs, Dense

# (first local row, number of rows, first key in the pack, number of keys); the last row attends to
# all of these keys
Piece = tuple[int, int, int, int]


@dataclass(frozen=True)
class PackShard:
    """Attention context of one rank's tokens, for a pack whose tokens are split over ranks.

    Attributes:
        pack: Context of the whole pack.
        runs: Pairs (start, stop) for this rank's tokens `start:stop` of the pack, in ascending
            order. No run is empty.
        gather: Function that collects the local keys or values [n, ...] of all ranks and returns
            those of the whole pack, [T, ...]. All ranks must call it.
        last_tokens: Indices, among this rank's tokens, of the tokens at which sequences are scored,
            int64. Tokens of other ranks are left out.
    """

    pack: Dense
    runs: tuple[tuple[int, int], ...]
    gather: Callable[[Tensor], Tensor]
    last_tokens: Tensor

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """Pieces of sequences in each of this rank's token ranges (`runs`).

        Each piece lies in one sequence and is given by four numbers: (first local row, number of
        rows, first key in the pack, number of keys). Its keys are all tokens of the sequence up to
        the end of the piece, including those on other ranks.
        """
        pieces_by_run = []
        row = 0
        for start, stop in self.runs:
            pieces = []
            for first, end in pairwise(self.pack.starts):
                low = max(first, start)
                high = min(end, stop)
                if low < high:
                    pieces.append((row + low - start, high - low, first, high - first))
            pieces_by_run.append(tuple(pieces))
            row += stop - start
        return tuple(pieces_by_run)

    @cached_property
    def dense(self) -> Dense:
        """Context that treats this rank's tokens of each sequence as a whole sequence.

        Sequences without tokens on this rank are empty.
        """
        counts = []
        for first, end in pairwise(self.pack.starts):
            counts.append(
                sum(max(0, min(end, stop) - max(first, start)) for start, stop in self.runs)
            )
        ends = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        return Dense(ends.to(self.pack.cu_seqlens.device), max(counts), sum(counts))

    @cached_property
    def tokens(self) -> Tensor:
        """Index in the pack of each token of this rank, int64 [n]."""
        device = self.pack.cu_seqlens.device
        runs = [torch.arange(*run, device=device) for run in self.runs]
        if runs:
            return torch.cat(runs)
        return torch.zeros(0, dtype=torch.int64, device=device)

    @cached_property
    def token_lengths(self) -> Tensor:
        """Length of the whole sequence to which each token of this rank belongs, int64 [n]."""
        return self.pack.token_lengths[self.tokens]

    @cached_property
    def segments(self) -> tuple[Tensor, ...]:
        """Tables of pieces, one per run of tokens, each int64 [number of pieces, 4] on the host.

        A run is a range of consecutive tokens on this rank, and a piece is the part of one sequence
        that lies within a run. The columns are the local index of the piece's first token, its
        number of tokens, the index of its first key in the pack, and its number of keys.
        """
        return tuple(torch.tensor(pieces) for pieces in self.pieces)

    @cached_property
    def lengths(self) -> tuple[VarlenLengths, ...]:
        """Query and key lengths of `pieces` for flash attention, one item per range in `runs`."""
        return tuple(_build_lengths(pieces, self.pack.cu_seqlens.device) for pieces in self.pieces)


def _build_lengths(pieces: tuple[Piece, ...], device: torch.device) -> VarlenLengths:
    row_counts = [rows for _, rows, _, _ in pieces]
    key_counts = [keys for *_, keys in pieces]
    row_bounds, key_bounds = (
        torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
        for counts in (row_counts, key_counts)
    )
    return VarlenLengths(row_bounds, key_bounds, max(row_counts), max(key_counts))


def attend_by_kernels(inputs: AttentionInputs, context: PackShard) -> Tensor:
    """Compute attention of this rank's n tokens with weft's kernels; the result is [n, heads, dim]."""
    k, v = _gather_keys_values(inputs, context)
    segments = [VarlenSegments(table, None, inputs.spec.window) for table in context.segments]
    return kernels.attend_rows(inputs.q, k, v, segments, inputs.spec.scale)


def attend_by_torch(inputs: AttentionInputs, context: PackShard) -> Tensor:
    """Return attention of this rank's tokens, [n, heads, dim], computed by torch.

    The pieces in `context.pieces` are computed one after the other. This saves memory, because the
    attention scores [heads, rows, keys] exist for only one piece at a time.
    """
    k, v = _gather_keys_values(inputs, context)
    outputs = []
    for row, rows, key, keys in (piece for pieces in context.pieces for piece in pieces):
        piece_q, piece_k, piece_v = (
            x.transpose(0, 1)[None]
            for x in (inputs.q[row : row + rows], k[key : key + keys], v[key : key + keys])
        )
        drop = partial(_drop_weights, inputs, row, keys - rows) if inputs.has_dropout else None
        output = rectangles.attend_tail(piece_q, piece_k, piece_v, inputs.spec, drop)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs) if outputs else _build_empty_result(inputs, k, v)


def attend_on_accelerator(inputs: AttentionInputs, context: PackShard) -> Tensor:
    """Return attention of this rank's tokens, [n, heads, dim].

    Flash attention is used if it supports the inputs. Otherwise, `attend_by_torch` is used.
    """
    if inputs.has_dropout or not accelerator.supports_flash(inputs.q, inputs.spec):
        return attend_by_torch(inputs, context)
    k, v = _gather_keys_values(inputs, context)
    outputs = []
    for pieces, lengths in zip(context.pieces, context.lengths, strict=True):
        rows = slice(pieces[0][0], pieces[-1][0] + pieces[-1][1])
        keys = slice(pieces[0][2], pieces[-1][2] + pieces[-1][3])
        outputs.append(flash.attend_packed(inputs.q[rows], k[keys], v[keys], lengths, inputs.spec))
    return torch.cat(outputs) if outputs else _build_empty_result(inputs, k, v)


def _gather_keys_values(inputs: AttentionInputs, context: PackShard) -> tuple[Tensor, Tensor]:
    """Return the keys and values of the whole pack, gathered from all ranks."""
    k, v = context.gather(torch.cat([inputs.k, inputs.v], dim=1)).split(inputs.k.shape[1], dim=1)
    return k, v


def _build_empty_result(inputs: AttentionInputs, k: Tensor, v: Tensor) -> Tensor:
    """Return the empty attention result of a rank without tokens.

    `k` and `v` were gathered from all ranks, so their backward pass communicates and must run on
    every rank. The result therefore depends on them, although it is empty.
    """
    return inputs.q + (k.sum() + v.sum()) * 0.0


def _drop_weights(inputs: AttentionInputs, row: int, position: int, weights: Tensor) -> Tensor:
    """Apply dropout to the attention weights of consecutive tokens of a sequence.

    `row` is the index of the first token among this rank's tokens, and `position` is its position
    in the sequence.
    """
    assert inputs.dropout is not None
    token = torch.tensor([[row]], device=weights.device)
    return inputs.dropout.drop_weights(weights, inputs.spec.dropout, token, position)
