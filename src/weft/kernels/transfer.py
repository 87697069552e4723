"""What the host has made, on the device, without waiting for what the device does."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def put(values: npt.NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """An array, or a tensor that need not be on the host, as a tensor on the device. From ordinary memory a copy would wait
    until the device has done all it was given, so a GPU's is made from pinned memory; on a CPU the memory is shared."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
