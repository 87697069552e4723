"""Transfer of data to a device without waiting for the device, and access to tensors' memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def put(values: npt.NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """Return `values` as a tensor on the device.

    A copy from ordinary host memory would wait until the device has finished its queued work, so
    copies to a GPU are made from pinned memory. On a CPU, the result shares the memory of `values`.
    """
    if isinstance(values, np.ndarray):
        tensor = torch.from_numpy(values)
    else:
        tensor = values
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def get_address(tensor: Tensor) -> int:
    """Return the memory address of a tensor's values, which changes if the tensor is moved."""
    return tensor.data_ptr()


def get_storage(tensor: Tensor) -> tuple[int, int]:
    """Return the address and the size in bytes of a tensor's storage, which its views share."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def resize_storage(tensor: Tensor, size: int) -> None:
    """Resize a tensor's storage to `size` bytes, where 0 frees it.

    This affects all tensors that share the storage. New storage is uninitialized.
    """
    tensor.untyped_storage().resize_(size)
