"""Memory in pages of 2 MB: a processor keeps the addresses of few pages at hand, and a matrix of many that every step reads
whole comes a fifth faster from fewer."""

from __future__ import annotations

import ctypes
import functools

from torch import Tensor

SIZE = 1 << 21  # bytes
LEAST = 2 * SIZE  # of what is worth it
MADV_COLLAPSE = 25  # of Linux's mman.h, since 6.1: at once, whatever the system does by itself


def collapse(x: Tensor) -> bool:
    """Ask that `x`, contiguous, on the host and written to, lie in large pages; whether the system did it. Where it cannot,
    nothing changes. An address is asked for once: a second answer is the first."""
    first, end = -(-x.data_ptr() // SIZE) * SIZE, (x.data_ptr() + x.nbytes) // SIZE * SIZE
    return end - first >= LEAST and _collapse(first, end - first)


@functools.lru_cache(maxsize=256)
def _collapse(first: int, size: int) -> bool:
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None:
        return False
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(advise(first, size, MADV_COLLAPSE) == 0)
