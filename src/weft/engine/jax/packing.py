"""Packing of micro-batches into blocks of rows of equal shape, and inputs of the head.

A pass is compiled for one shape: the number of rows, and their length. A larger micro-batch is
divided into several blocks of this shape, so that it does not need another compilation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.engine.jax.decoder import DecoderSettings, HeadInputs, TokenRows
from weft.engine.jax.mesh import count_row_parts
from weft.engine.jax.network import round_up
from weft.engine.jax.parameters import to_numpy
from weft.models.network import rope
from weft.models.network.packed import Packed, SamplingSupport
from weft.models.network.transformer import find_score_rows

Index = npt.NDArray[np.int64]
MIN_LENGTH = 32  # fewest tokens of a row
MIN_TOKENS = 2048  # fewest tokens of a block on each device, if the first micro-batch has as many
MAX_BLOCKS_AT_FIRST = 4  # most blocks of the first micro-batch
MAX_BLOCKS = 32  # most blocks of a later micro-batch; with more, a new shape is chosen
MAX_WASTE = 4  # largest ratio of the length of a row to its longest sequence


def place_sequences(lengths: Index, length: int) -> tuple[Index, int]:
    """Place sequences in rows of `length` tokens; return (starts, number of rows).

    `lengths`, int64 [S], are the lengths of the sequences, and `starts`, int64 [S], are the indices
    of their first tokens in the flattened rows. Each sequence is placed in the first of the last 16
    rows that has room for it, which fills rows well without searching all of them.
    """
    starts = np.zeros_like(lengths)
    used: list[int] = []  # number of tokens in each row
    open_rows: list[int] = []  # indices of the last rows, which may have room
    for sequence, size in enumerate(lengths):
        row = next((row for row in open_rows if used[row] + size <= length), None)
        if row is None:
            row = len(used)
            used.append(0)
            open_rows = [*open_rows[-15:], row]
        starts[sequence] = row * length + used[row]
        used[row] += int(size)
    return starts, len(used)


class BlockShapes:
    """Shapes of the blocks for which one pass was compiled, as (number of rows, tokens per row).

    The first micro-batch determines the shapes. `longest` is the number of tokens of the longest
    sequence of the run, or None if it is not known; rows have room for it. If the sequences of the
    first micro-batch are much shorter, two shapes are chosen: one for short sequences, and one for
    all sequences.

    A new shape is chosen if a sequence is longer than all rows, and for a micro-batch that would
    need more than `MAX_BLOCKS` blocks.
    """

    def __init__(self, longest: int | None, decoder: DecoderSettings) -> None:
        self.known: list[tuple[int, int]] = []  # sorted by the number of tokens per row
        self._longest = longest or 0
        self._has_single_sequences = decoder.attention == "cudnn"  # one sequence in each row
        self._multiple = 1
        if decoder.row_sharding is not None:
            self._multiple = count_row_parts(decoder.row_sharding)

    def choose(self, lengths: Index) -> tuple[tuple[int, int], Index, list[tuple[int, int]]]:
        """Choose the shape of the blocks; return (shape, starts, new shapes).

        `lengths`, int64 [S], are the numbers of tokens of the sequences. `starts`, int64 [S], are
        the indices of their first tokens in flattened rows of the chosen length. The new shapes are
        those for which nothing has been compiled yet; they can include the chosen shape.
        """
        # Use the shortest known rows that fit.
        longest = int(lengths.max())
        for shape in self.known:
            if longest <= shape[1]:
                starts, count = self._place(lengths, shape[1])
                if count <= MAX_BLOCKS * shape[0]:
                    return shape, starts, []
        # Choose new shapes: for the sequences of this micro-batch if they are short, and for all.
        needed = round_up(longest, MIN_LENGTH)
        limit = round_up(max(longest, self._longest), MIN_LENGTH)
        new_lengths = [2 * needed, limit] if limit > MAX_WASTE * needed else [limit]
        new_shapes = []
        for length in new_lengths:
            _, count = self._place(lengths, length)
            min_rows = max(MIN_TOKENS * self._multiple // length, 1)
            num_blocks = min(max(count // min_rows, 1), MAX_BLOCKS_AT_FIRST)
            num_rows = -(-count // (num_blocks * self._multiple)) * self._multiple
            new_shapes.append((num_rows, length))
        # They replace known shapes with rows of the same length.
        other_shapes = [shape for shape in self.known if shape[1] not in new_lengths]
        self.known = sorted([*other_shapes, *new_shapes], key=lambda shape: shape[1])
        starts, _ = self._place(lengths, new_shapes[0][1])
        return new_shapes[0], starts, new_shapes

    def _place(self, lengths: Index, length: int) -> tuple[Index, int]:
        if self._has_single_sequences:
            return np.arange(len(lengths)) * length, len(lengths)
        return place_sequences(lengths, length)


@dataclass(frozen=True)
class RowBlock:
    """Input of one pass.

    Attributes:
        rows: Tokens of the block.
        reads: Inputs of the head.
        outputs: Index in the micro-batch of each of the pass's used outputs, which come first,
            int64 [n].
        sequences: Index in the micro-batch of each of the block's sequences, int64 [s].
    """

    rows: TokenRows
    reads: HeadInputs
    outputs: Index
    sequences: Index


def pack_blocks(
    x: Packed,
    decoder: DecoderSettings,
    padding: int | None,
    shapes: BlockShapes,
    support: SamplingSupport | None = None,
) -> list[RowBlock]:
    """Divide a pack into blocks of rows, with the inputs of the head for each block.

    The arrays in `HeadInputs` have one element per token of the block; elements at the end are
    unused. `padding` is a token at which scores are not read, or None. `support` has the ids that
    sampling kept. For each other new shape, the result ends with an empty block, so that passes for
    this shape are compiled now.
    """
    config = decoder.config
    _check_indices(x, decoder)
    lengths = to_numpy(x.attention.dense.lengths)
    shape, starts, new_shapes = shapes.choose(lengths)
    block_size = shape[0] * shape[1]
    # Compute the index of each token in the flattened rows of all blocks.
    sequences = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(len(sequences)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    indices = starts[sequences] + positions
    # Find the tokens whose hidden states the head reads.
    averages = decoder.head == "score" and decoder.pooling == "mean"
    if averages:
        read_tokens = np.arange(len(sequences))
    elif decoder.head == "score":
        read_tokens = to_numpy(find_score_rows(x, padding))
    else:
        read_tokens = to_numpy(x.rows)
    # Collect the values of each token, and the columns of each read.
    columns: dict[str, npt.NDArray[Any]] = {}
    if decoder.head == "lm":
        columns["labels"] = to_numpy(x.labels)
        if isinstance(x.ids, torch.Tensor):
            columns["ids"] = to_numpy(x.ids)
        if support is not None:
            columns["support"] = _pack_support(support, config.vocab_size)
    tokens = {"tokens": to_numpy(x.tokens), "positions": to_numpy(x.positions)}
    if config.rope is not None:
        wide = torch.float64 if np.dtype(decoder.dtype) == np.float64 else torch.float32
        rotation = rope.compute_rotation(
            config.rope, x.positions.cpu(), x.attention.token_lengths.cpu(), wide
        )
        for name, values in zip(("cos", "sin"), rotation, strict=True):
            tokens[name] = to_numpy(values)[:, 0].astype(decoder.dtype)

    def build(number: int, shape: tuple[int, int]) -> RowBlock:
        """Return the block with this number, which is empty if it contains no token."""
        # Place the block's tokens in its rows.
        block_tokens = np.flatnonzero(indices // block_size == number)
        local_indices = indices[block_tokens] - number * block_size
        place_tokens = partial(_place_values, local_indices, shape)
        block_sequences, numbers = np.unique(sequences[block_tokens], return_inverse=True)
        rows = TokenRows(
            segments=place_tokens(numbers + 1),
            **{name: place_tokens(values[block_tokens]) for name, values in tokens.items()},
        )
        if decoder.attention == "cudnn":
            check_single_sequences(rows.segments)
        # Select the reads of these tokens, and pad them to the number of tokens.
        reads = np.flatnonzero(indices[read_tokens] // block_size == number)
        num_cells = shape[0] * shape[1]
        pad = partial(_place_values, np.arange(len(reads)), (num_cells,))
        head_values = {name: pad(column[reads]) for name, column in columns.items()}
        if averages:
            head_values["labels"] = pad(numbers, fill=num_cells)
        read_indices = indices[read_tokens[reads]] - number * block_size
        inputs = HeadInputs(pad(read_indices), np.int32(len(reads)), **head_values)
        return RowBlock(rows, inputs, block_sequences if averages else reads, block_sequences)

    count = int(indices.max()) // block_size + 1
    blocks = [build(number, shape) for number in range(count)]
    return blocks + [build(count, other) for other in new_shapes if other != shape]


def _place_values(
    indices: Index, shape: tuple[int, ...], values: npt.NDArray[Any], fill: int = 0
) -> npt.NDArray[Any]:
    """Return an array [*shape, ...] with `values` [n, ...] at n of its flattened elements.

    `indices`, int64 [n], are the indices of these elements; all others are `fill`. int64 values are
    converted to int32, JAX's default.
    """
    dtype = np.int32 if values.dtype == np.int64 else values.dtype
    flat = np.full((np.prod(shape), *values.shape[1:]), fill, dtype)
    flat[indices] = values
    return flat.reshape(*shape, *values.shape[1:])


def check_single_sequences(segments: npt.NDArray[np.int32]) -> None:
    """Raise `ValueError` if a row [L] of `segments` [R, L] has tokens of several sequences.

    cuDNN is not given the segments, so tokens would attend to other sequences.
    """
    is_next_sequence = (segments[:, 1:] != segments[:, :-1]) & (segments[:, 1:] > 0)
    if is_next_sequence.any():
        row = int(is_next_sequence.any(axis=1).argmax())
        raise ValueError(f"row {row} has several sequences, which cuDNN's attention would mix")


def _pack_support(support: SamplingSupport, vocab_size: int) -> npt.NDArray[np.uint8]:
    """Return the ids that sampling kept as a bit mask, uint8 [N, V / 8], one bit per id.

    If no ids are listed for a row, all bits of the row are set.
    """
    counts = support.host_counts
    mask = np.zeros((len(counts), -(-vocab_size // 8)), np.uint8)
    ids = to_numpy(support.ids)
    rows = np.repeat(np.arange(len(counts)), counts)
    np.bitwise_or.at(mask, (rows, ids // 8), (1 << ids % 8).astype(np.uint8))
    mask[counts == 0] = 0xFF
    return mask


def _check_indices(x: Packed, decoder: DecoderSettings) -> None:
    """Raise `IndexError` for tokens or positions without an embedding; JAX does not check them."""
    config = decoder.config
    if int(x.tokens.max()) >= config.vocab_size or int(x.tokens.min()) < 0:
        raise IndexError(f"a token is not in the vocabulary of {config.vocab_size:,} tokens")
    if config.learned_positions is not None:
        num_positions = config.learned_positions - config.position_offset
        if int(x.positions.max()) >= num_positions:
            raise IndexError(
                f"a sequence is longer than the {num_positions:,} positions of the network"
            )
