"""What the host has made, on the device, without waiting for what the device does."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def put(values: npt.NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """An array, or a tensor that need not be on the host, as a tensor on the device.

    From ordinary memory a copy would wait until the device has done all it was given, so a GPU's is
    made from pinned memory; on a CPU the memory is shared.
    """
    if isinstance(values, np.ndarray):
        tensor = torch.from_numpy(values)
    else:
        tensor = values
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def address(tensor: Tensor) -> int:
    """Where a tensor's values begin; another place once it has moved."""
    return tensor.data_ptr()


def storage_of(tensor: Tensor) -> tuple[int, int]:
    """(address, bytes) of the memory that a tensor's values lie in, which views share."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def resize_storage(tensor: Tensor, size: int) -> None:
    """Have a tensor, and all that share its memory, let go of it (0 bytes) or get other memory, of
    which nothing is known.
    """
    tensor.untyped_storage().resize_(size)
