"""Micro-batches in rows of equal length, and the rows of hidden states that a head reads.

All sizes are rounded up to a power of two, or three times one, so that few shapes are compiled for.
"""

from __future__ import annotations

from dataclasses import dataclass
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
LEAST_SUPPORT = 16  # ids that sampling kept at a token
LEAST_READS = 32  # hidden states that a head reads
MOST_WASTE = 4  # how much larger than needed a pass may be, to save a compilation


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


class PassSizes:
    """Sizes for which passes were compiled, so that later passes can use them too.

    A pass gets the smallest known sizes that hold it, unless these are more than four times what it
    needs. So a run compiles in its first steps, again for longer sequences or larger batches than
    before, and then never again.
    """

    def __init__(self) -> None:
        self._known: set[tuple[int, int, int]] = set()

    def choose_length(self, longest: int) -> int:
        """Return the number of tokens in a row that can hold a sequence of `longest` tokens.

        Rows hold several sequences, so longer rows than needed are filled as well.
        """
        fitting = [sizes[1] for sizes in self._known if longest <= sizes[1] <= MOST_WASTE * longest]
        return min(fitting, default=round_up(longest, LEAST_LENGTH))

    def choose(self, rows: int, length: int, reads: int) -> tuple[int, int, int]:
        """Return the numbers of rows, of tokens in each, and of hidden states that are read."""
        fitting = []
        for sizes in self._known:
            holds = sizes[0] >= rows and sizes[1] == length and sizes[2] >= reads
            if holds and sizes[0] <= MOST_WASTE * rows and sizes[2] <= MOST_WASTE * reads:
                fitting.append(sizes)
        if fitting:
            return min(fitting)
        # New sizes are not below similar ones, so that they serve the next passes too.
        rows = max([rows, *(known[0] for known in self._known if known[0] <= 2 * rows)])
        reads = max([reads, *(known[2] for known in self._known if known[2] <= 2 * reads)])
        self._known.add((rows, length, reads))
        return rows, length, reads


@dataclass(frozen=True)
class PackedRows:
    """Input of a pass.

    Attributes:
        rows: The tokens.
        reads: What the head reads.
        outputs: Number of outputs that are used; the pass computes more.
        num_scores: Number of scores that are averaged over sequences, and 0 for other heads.
    """

    rows: TokenRows
    reads: HeadInputs
    outputs: int
    num_scores: int


def pack_rows(
    x: Packed,
    decoder: DecoderSettings,
    padding: int | None,
    sizes: PassSizes,
    support: SamplingSupport | None = None,
) -> PackedRows:
    """Return a pack in rows, with what the head reads of them.

    The rows can be divided over the decoder's devices. The arrays in `HeadInputs` have further
    elements at the end, whose outputs are not used. `padding` is the token that scores are not read
    at. `sizes` has the sizes of earlier passes. `support` has the ids that sampling kept.
    """
    config = decoder.config
    _check_indices(x, decoder)
    lengths = to_numpy(x.attention.dense.lengths)
    length = sizes.choose_length(int(lengths.max()))
    if decoder.attention == "cudnn":
        starts, count = np.arange(len(lengths)) * length, len(lengths)
    else:
        starts, count = place_sequences(lengths, length)
    multiple = 1
    if decoder.row_sharding is not None:
        multiple = count_row_parts(decoder.row_sharding)
    # Hidden states that the head reads.
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    outputs = len(x.rows)
    num_scores = 0
    if decoder.head == "score":
        outputs = len(lengths)
    if decoder.head == "lm":
        read, labels = to_numpy(x.rows), to_numpy(x.labels)
    elif decoder.head == "score" and decoder.pooling == "mean":
        read, labels = np.arange(len(sequence)), sequence
        num_scores = round_up(outputs)
    else:
        read = to_numpy(find_score_rows(x, padding) if decoder.head == "score" else x.rows)
        labels = np.zeros_like(read)
    ids = to_numpy(x.ids) if isinstance(x.ids, torch.Tensor) else None
    count, length, total = sizes.choose(
        round_up(-(-count // multiple)) * multiple, length, round_up(len(read), LEAST_READS)
    )
    # Place of each token in the rows.
    within = np.arange(len(sequence)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    place = starts[sequence] + within

    def scatter(values: npt.NDArray[Any], dtype: Any) -> npt.NDArray[Any]:
        spread = np.zeros((count * length, *values.shape[1:]), dtype)
        spread[place] = values
        return spread.reshape(count, length, *values.shape[1:])

    cos = sin = None
    if config.rope is not None:
        wide = torch.float64 if np.dtype(decoder.dtype) == np.float64 else torch.float32
        rotation = rope.compute_rotation(
            config.rope, x.positions.cpu(), x.attention.token_lengths.cpu(), wide
        )
        cos, sin = (scatter(to_numpy(each)[:, 0], decoder.dtype) for each in rotation)
    rows = TokenRows(
        scatter(to_numpy(x.tokens), np.int32),
        scatter(to_numpy(x.positions), np.int32),
        scatter(sequence + 1, np.int32),
        cos,
        sin,
    )
    if decoder.attention == "cudnn":
        check_single_sequences(rows.segments)

    def extend(values: npt.NDArray[Any], value: int = 0) -> npt.NDArray[np.int32]:
        longer = np.full((total, *values.shape[1:]), value, np.int32)
        longer[: len(values)] = values
        return longer

    reads = HeadInputs(
        extend(place[read]),
        extend(labels, num_scores),
        None if ids is None else extend(ids),
        None if support is None else extend(_spread_support(support, config.vocab_size)),
    )
    return PackedRows(rows, reads, outputs, num_scores)


def check_single_sequences(segments: npt.NDArray[np.int32]) -> None:
    """Raise `ValueError` if a row [L] of `segments` [R, L] has tokens of several sequences.

    cuDNN does not read segments: tokens would attend to other sequences.
    """
    several = (segments[:, 1:] != segments[:, :-1]) & (segments[:, 1:] > 0)
    if several.any():
        row = int(several.any(axis=1).argmax())
        raise ValueError(f"row {row} has several sequences, which cuDNN's attention would mix")


def _spread_support(support: SamplingSupport, vocab_size: int) -> npt.NDArray[np.int32]:
    """Return the ids that sampling kept, one row per token, filled up with `vocab_size`."""
    counts = support.host_counts
    width = round_up(int(counts.max(initial=0)), LEAST_SUPPORT)
    table = np.full((len(counts), width), vocab_size, np.int32)
    table[np.arange(width) < counts[:, None]] = to_numpy(support.ids)
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
