"""Sizes that the speed or the rounding of a CPU's kernels depends on.

They are set here alone; others ask for them by name.
"""

from __future__ import annotations

import torch

# floats that the widest CPUs add at once; sums over whole vectors do not depend on what follows
# them
VECTOR = 16
LEAST_QUERIES = 4  # query rows that torch multiplies at once; it adds fewer up in another order
LEAST_SPARED_KEYS = 256  # keys that a merged prefix must spare in a step to pay for its merge
HOLES = 1.2  # what live tensors take, holes between them included, as measured


def in_vectors(length: int, device: torch.device) -> int:
    """`length` keys as attention on this device reads them: a CPU reads whole vectors."""
    return -(-length // VECTOR) * VECTOR if device.type == "cpu" else length
