"""Triton source of the kernels in `weft.kernels.gpu.fused`, which describes their arguments.

Triton reads the source of these functions. They call only functions of `triton.language`, and their
arguments in capitals are constants, for each value of which a kernel is compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store(k, v, keys, values, indices, k_stride, v_stride, width, BLOCK: tl.constexpr):
    """Copy `BLOCK` elements of one token's keys and values to the token's row in the cache.

    The grid is (tokens, blocks of a row). `width` is the number of elements of a row.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    target = tl.load(indices + token) * width + columns
    tl.store(keys + target, tl.load(k + token * k_stride + columns, mask=mask), mask=mask)
    tl.store(values + target, tl.load(v + token * v_stride + columns, mask=mask), mask=mask)


@triton.jit
def add_rms_norm(
    x,
    delta,
    weight,
    total,
    normed,
    width,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the sum and the norm of one row of `width` elements; the grid is (rows,).

    `WIDE` is the dtype of the statistics, and `BLOCK` a power of two that is at least `width`.
    """
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    added = tl.load(x + row + columns, mask=mask, other=0.0).to(WIDE)
    added += tl.load(delta + row + columns, mask=mask, other=0.0).to(WIDE)
    # The norm is that of the sum after rounding, which the next layers read.
    rounded = added.to(total.dtype.element_ty)
    tl.store(total + row + columns, rounded, mask=mask)
    wide = rounded.to(WIDE)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / width + EPS)
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(WIDE) + OFFSET
    result = (wide * inverse * scale).to(normed.dtype.element_ty)
    tl.store(normed + row + columns, result, mask=mask)


@triton.jit
def draw(
    logits,
    uniforms,
    temperatures,
    tokens,
    logprobs,
    logits_stride,
    uniforms_stride,
    temperatures_stride,
    vocab,
    GREEDY: tl.constexpr,
    WIDE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LANES: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw the token of one row of `vocab` logits; the grid is (rows,).

    The row is divided into `SEGMENTS` segments of `LENGTH` ids. One pass over the row adds the
    weights of each segment, in `LANES` sums per segment, each in units of its own running maximum.
    The sums of the segments are then searched, and the ids of the segment in which the uniform
    number falls are read again, as a block of `BLOCK` ids. `WIDE` is the dtype of the weights, whose
    sums are float64.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    temperature = tl.full([], 1.0, WIDE)
    if not GREEDY:
        given = tl.load(temperatures + row * temperatures_stride)
        temperature = tl.where(given > 0.0, given, 1.0).to(WIDE)
    # Add the weights of each lane, relative to the largest score of the lane.
    segments = tl.arange(0, SEGMENTS)
    first = segments[:, None] * LENGTH + tl.arange(0, LANES)[None, :]
    largest = tl.full([SEGMENTS, LANES], float("-inf"), WIDE)
    sums = tl.zeros([SEGMENTS, LANES], tl.float64)
    best = first
    for start in range(0, LENGTH, LANES):
        ids = first + start
        scores = _load_scores(logits, ids, ids < vocab, temperature, GREEDY)
        is_larger = scores > largest
        least = tl.where(is_larger, largest, scores)  # unlike a minimum, NaN if the score is
        best = tl.where(is_larger, ids, best)
        largest = tl.maximum(scores, largest)
        # The exponential is the new id's weight, or the factor by which a larger maximum divides.
        factor = _compute_weights(least, largest).to(tl.float64)
        sums = tl.where(is_larger, sums * factor + 1.0, sums + factor)
    # Convert all sums to units of the largest score of the row.
    top = tl.max(tl.max(largest, 1), 0)
    sums *= _compute_weights(largest, top).to(tl.float64)
    weights = tl.sum(sums, 1)
    if GREEDY:
        total = tl.sum(weights, 0)
        token = tl.min(tl.min(tl.where(largest == top, best, vocab - 1), 1), 0)
    else:
        # Find the segment: the first whose cumulative weight exceeds the target.
        ends = tl.cumsum(weights, 0)
        total = tl.sum(tl.where(segments == SEGMENTS - 1, ends, 0.0), 0)
        target = tl.load(uniforms + row * uniforms_stride) * total
        segment = _find_first_above(segments, ends, weights, target)
        target -= tl.sum(tl.where(segments == segment - 1, ends, 0.0), 0)
        # Find the id in the segment in the same way.
        places = tl.arange(0, BLOCK)
        ids = segment * LENGTH + places
        mask = (places < LENGTH) & (ids < vocab)
        scores = _load_scores(logits, ids, mask, temperature, GREEDY)
        inside = _compute_weights(scores, top).to(tl.float64)
        place = _find_first_above(places, tl.cumsum(inside, 0), inside, target)
        token = tl.minimum(segment * LENGTH + place, vocab - 1)
    score = _load_scores(logits, token, token < vocab, temperature, GREEDY)
    logprob = (score - top) - tl.log(total.to(WIDE))
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, logprob.to(tl.float32))


@triton.jit
def _load_scores(logits, ids, mask, temperature, GREEDY: tl.constexpr):
    """Return the logits of `ids` divided by the temperature; minus infinity where masked."""
    scores = tl.load(logits + ids, mask=mask, other=float("-inf")).to(temperature.dtype)
    if not GREEDY:
        if temperature.dtype == tl.float64:
            scores = scores / temperature
        else:
            scores = tl.div_rn(scores, temperature)  # `/` rounds less accurately in float32
    return scores


@triton.jit
def _compute_weights(scores, top):
    """Return exp(scores - top), which is 0 for a score of minus infinity, whatever `top` is."""
    return tl.exp(scores - tl.where(top > float("-inf"), top, 0.0))


@triton.jit
def _find_first_above(indices, ends, weights, target):
    """Return the first index with a positive weight at which the running sums exceed the target.

    Rounding can leave all sums too small. The result is then the last index with a positive weight.
    """
    last = tl.max(tl.where(weights > 0.0, indices, 0), 0)
    return tl.min(tl.where((ends > target) & (weights > 0.0), indices, last), 0)
