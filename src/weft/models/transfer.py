"""Host arrays on the device, without waiting for what the device does."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def put(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on the device. From ordinary memory a copy would wait until the device has done all it was given,
    so a GPU's is made from pinned memory; on a CPU the tensor shares the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
