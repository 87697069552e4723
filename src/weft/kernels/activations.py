"""Activation functions of the model families and their gradients, computed by torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.types import Activation


def activate(x: Tensor, name: Activation) -> Tensor:
    """Apply the activation of this name to every entry."""
    match name:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)


def compute_activation_gradient(grad_y: Tensor, x: Tensor, name: Activation) -> Tensor:
    """Return the gradient by `x` of `activate(x, name)`, given the gradient by its result."""
    match name:
        case "silu":
            return torch.ops.aten.silu_backward(grad_y, x)
        case "gelu":
            return torch.ops.aten.gelu_backward(grad_y, x)
        case "gelu_tanh":
            return torch.ops.aten.gelu_backward(grad_y, x, approximate="tanh")
        case "relu":
            return torch.ops.aten.threshold_backward(grad_y, x, 0)
