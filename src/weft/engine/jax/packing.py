"""Micro-batches in blocks of rows, all of one shape, and the hidden states that a head reads.

A pass is compiled for a number of rows and their length. A micro-batch is computed in as many
passes as it needs, so that longer and larger batches need no other shapes.
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
LEAST_LENGTH = 32  # tokens of a row
LEAST_TOKENS = 2048  # of a block on each device, if the first micro-batch has so many
MOST_BLOCKS_AT_FIRST = 4  # of the first micro-batch
MOST_BLOCKS = 32  # of a later one; with more, larger blocks are compiled for
MOST_WASTE = 4  # how much longer than its longest sequence a row may be


def place_sequences(lengths: Index, length: int) -> tuple[Index, int]:
    """Return the place of each sequence's first token in rows of `length` tokens, and their number.

    Sequences keep their order. Each is put into the first of the last rows that has room for it, so
    that rows are well filled without a search over all of them.
    """
    places = np.zeros_like(lengths)
    used: list[int] = []  # tokens in each row
    open_rows: list[int] = []  # rows that may have room
    for number, size in enumerate(lengths):
        row = next((row for row in open_rows if used[row] + size <= length), None)
        if row is None:
            row = len(used)
            used.append(0)
            open_rows = [*open_rows[-15:], row]
        places[number] = row * length + used[row]
        used[row] += int(size)
    return places, len(used)


class BlockShapes:
    """Numbers of rows and tokens per row of the blocks that one pass was compiled for.

    They are chosen for the first micro-batch. `longest` is the number of tokens of the longest
    sequence of the run, so that later ones fit, or None if it is not known. If the first sequences
    are much shorter, there are two shapes from the start: one for short sequences, and one for all.

    Longer sequences than `longest`, and much larger micro-batches, get new shapes.
    """

    def __init__(self, longest: int | None, decoder: DecoderSettings) -> None:
        self.known: list[tuple[int, int]] = []  # by length
        self._longest = longest or 0
        self._alone = decoder.attention == "cudnn"  # one sequence in each row
        self._multiple = 1
        if decoder.row_sharding is not None:
            self._multiple = count_row_parts(decoder.row_sharding)

    def choose(self, lengths: Index) -> tuple[tuple[int, int], Index, list[tuple[int, int]]]:
        """Return a shape, the place of each sequence in rows of this length, and new shapes.

        `lengths` [S] are the tokens of each sequence. New shapes, among which the chosen one may be,
        are those that nothing was compiled for yet.
        """
        longest = int(lengths.max())
        for shape in self.known:
            if longest <= shape[1]:
                places, count = self._place(lengths, shape[1])
                if count <= MOST_BLOCKS * shape[0]:
                    return shape, places, []
        own = round_up(longest, LEAST_LENGTH)
        limit = round_up(max(longest, self._longest), LEAST_LENGTH)
        new = []
        for length in [2 * own, limit] if limit > MOST_WASTE * own else [limit]:
            _, count = self._place(lengths, length)
            least = max(LEAST_TOKENS * self._multiple // length, 1)
            blocks = min(max(count // least, 1), MOST_BLOCKS_AT_FIRST)
            rows = -(-count // (blocks * self._multiple)) * self._multiple
            new.append((rows, length))
        lengths_of_new = [length for _, length in new]
        self.known = [shape for shape in self.known if shape[1] not in lengths_of_new]
        self.known = sorted([*self.known, *new], key=lambda shape: shape[1])
        return new[0], self._place(lengths, new[0][1])[0], new

    def _place(self, lengths: Index, length: int) -> tuple[Index, int]:
        if self._alone:
            return np.arange(len(lengths)) * length, len(lengths)
        return place_sequences(lengths, length)


@dataclass(frozen=True)
class RowBlock:
    """Input of one pass.

    Attributes:
        rows: The tokens.
        reads: What the head reads.
        outputs: Index of each output in those of the micro-batch; the pass computes more.
        sequences: Index of each sequence in the micro-batch.
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
    """Return a pack in blocks, with what the head reads of them.

    The arrays in `HeadInputs` have as many elements as the block has tokens, and those at the end
    are not used. `padding` is the token that scores are not read at. `support` has the ids that
    sampling kept. There is an empty block of each new shape, so that it is compiled now.
    """
    config = decoder.config
    _check_indices(x, decoder)
    lengths = to_numpy(x.attention.dense.lengths)
    shape, starts, new = shapes.choose(lengths)
    size = shape[0] * shape[1]
    # Place of each token in the rows of all blocks.
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    within = np.arange(len(sequence)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    place = starts[sequence] + within
    # Hidden states that the head reads: the token, and the output that it belongs to.
    averages = decoder.head == "score" and decoder.pooling == "mean"
    if averages:
        read = np.arange(len(sequence))
    elif decoder.head == "score":
        read = to_numpy(find_score_rows(x, padding))
    else:
        read = to_numpy(x.rows)
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
        for name, each in zip(("cos", "sin"), rotation, strict=True):
            tokens[name] = to_numpy(each)[:, 0].astype(decoder.dtype)

    def build(number: int, shape: tuple[int, int]) -> RowBlock:
        """Return the block of this number, which is empty if no token is in it."""
        own = np.flatnonzero(place // size == number)
        at = place[own] - number * size
        spread = partial(_spread, at, shape)
        sequences, local = np.unique(sequence[own], return_inverse=True)
        cells = shape[0] * shape[1]
        rows = TokenRows(
            segments=spread(local + 1),
            **{name: spread(values[own]) for name, values in tokens.items()},
        )
        if decoder.attention == "cudnn":
            check_single_sequences(rows.segments)
        reads = np.flatnonzero(place[read] // size == number)
        first = partial(_spread, np.arange(len(reads)), (cells,))
        values = {name: first(column[reads]) for name, column in columns.items()}
        if averages:
            values["labels"] = first(local, fill=cells)
        at_block = place[read[reads]] - number * size
        inputs = HeadInputs(first(at_block), np.int32(len(reads)), **values)
        return RowBlock(rows, inputs, sequences if averages else reads, sequences)

    count = int(place.max()) // size + 1
    blocks = [build(number, shape) for number in range(count)]
    return blocks + [build(count, other) for other in new if other != shape]


def _spread(
    at: Index, shape: tuple[int, ...], values: npt.NDArray[Any], fill: int = 0
) -> npt.NDArray[Any]:
    """Return an array of a shape with `values` at the places `at` of its flattened elements.

    Further dimensions of the values stay. Integers become int32, as JAX has them.
    """
    dtype = np.int32 if values.dtype == np.int64 else values.dtype
    spread = np.full((np.prod(shape), *values.shape[1:]), fill, dtype)
    spread[at] = values
    return spread.reshape(*shape, *values.shape[1:])


def check_single_sequences(segments: npt.NDArray[np.int32]) -> None:
    """Raise `ValueError` if a row [L] of `segments` [R, L] has tokens of several sequences.

    cuDNN does not read segments: tokens would attend to other sequences.
    """
    several = (segments[:, 1:] != segments[:, :-1]) & (segments[:, 1:] > 0)
    if several.any():
        row = int(several.any(axis=1).argmax())
        raise ValueError(f"row {row} has several sequences, which cuDNN's attention would mix")


def _pack_support(support: SamplingSupport, vocab_size: int) -> npt.NDArray[np.uint8]:
    """Return the ids that sampling kept, one bit for each id of the vocabulary, [N, V / 8].

    A row without ids has no limit: all of its bits are set.
    """
    counts = support.host_counts
    table = np.zeros((len(counts), -(-vocab_size // 8)), np.uint8)
    ids = to_numpy(support.ids)
    rows = np.repeat(np.arange(len(counts)), counts)
    np.bitwise_or.at(table, (rows, ids // 8), (1 << ids % 8).astype(np.uint8))
    table[counts == 0] = 0xFF
    return table


def _check_indices(x: Packed, decoder: DecoderSettings) -> None:
    """Raise `IndexError` for tokens or positions without an embedding, which JAX would not notice."""
    config = decoder.config
    if int(x.tokens.max()) >= config.vocab_size or int(x.tokens.min()) < 0:
        raise IndexError(f"a token is not in the vocabulary of {config.vocab_size:,} tokens")
    if config.learned_positions is not None:
        most = config.learned_positions - config.position_offset
        if int(x.positions.max()) >= most:
            raise IndexError(f"a sequence is longer than the {most:,} positions of the network")
