"""The numbers of `weft.randomness`, by weft's own kernel: a decode step asks for a few, and numpy takes as long for each
operation on a few as on thousands."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from weft import randomness
from weft.models.native import library


def uniforms(keys: npt.NDArray[np.uint32], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """float64 [n] in [0, 1) for `keys` [n, 2] and `positions` [n]: `weft.randomness.uniforms` to the bit."""
    if library.library() is None:
        return randomness.uniforms(keys, positions)
    out = torch.empty(len(keys), dtype=torch.float64)
    words, places = np.ascontiguousarray(keys), positions.astype(np.uint32)
    library.call("weft_uniforms", torch.from_numpy(words), torch.from_numpy(places), out, len(keys))
    return out.numpy()
