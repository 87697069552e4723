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
