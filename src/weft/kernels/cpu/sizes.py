"""Sizes that the speed or the rounding of a CPU's kernels depends on. They are set here alone; others ask for them by name."""

from __future__ import annotations

import torch

from weft.kernels.cpu import library

VECTOR = 16  # floats that the widest CPUs add at once; sums over whole vectors do not depend on what follows them
LEAST_QUERIES = 4  # query rows that torch multiplies at once; it adds fewer up in another order
LEAST_SPARED_KEYS = 256  # keys that a merged prefix must spare in a step to pay for its merge
# What live tensors take, holes between them included, as measured; and what the kernels themselves hold.
HOLES = 1.2
KERNEL_BYTES, KERNEL_BYTES_IN_TILES = 40 * 2**20, 8 * 2**20


def in_vectors(length: int, device: torch.device) -> int:
    """`length` keys as attention on this device reads them: a CPU reads whole vectors."""
    return -(-length // VECTOR) * VECTOR if device.type == "cpu" else length


def kernel_bytes() -> int:
    """Memory that the kernels of a run take beside its tensors."""
    return KERNEL_BYTES_IN_TILES if library.in_tiles() else KERNEL_BYTES
