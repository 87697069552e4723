"""Constants on which the speed or the rounding of CPU kernels depends."""

from __future__ import annotations

import torch

# Floats per vector of the widest CPUs. Sums over whole vectors do not depend on the values after
# them.
VECTOR = 16
LEAST_QUERIES = 4  # torch sums over fewer query rows in another order
LEAST_SPARED_KEYS = 256  # keys that a merged prefix must save per step to pay off
HOLES = 1.2  # measured ratio of occupied memory to live tensors, due to fragmentation


def in_vectors(length: int, device: torch.device) -> int:
    """Return the number of keys to which `length` keys are padded for attention.

    On a CPU, this is `length` rounded up to a multiple of `VECTOR`, the number of floats in a
    vector register. The padding is needed because a sum over an incomplete vector would depend on
    the values that follow in memory. On other devices, `length` is returned.
    """
    return -(-length // VECTOR) * VECTOR if device.type == "cpu" else length
