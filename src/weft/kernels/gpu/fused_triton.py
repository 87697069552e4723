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
