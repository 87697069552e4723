"""Activation functions of the model families and their gradients, computed by torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.types import Activation


def activate(x: Tensor, name: Activation) -> Tensor:
    """Apply the activation function `name` to every element of x."""
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
    """Return the gradient of `activate(x, name)` with respect to x.

    `grad_y` is the gradient with respect to the result of `activate`.
    """
    match name:
        case "silu":
            return torch.ops.aten.silu_backward(grad_y, x)
        case "gelu":
            return torch.ops.aten.gelu_backward(grad_y, x)
        case "gelu_tanh":
            return torch.ops.aten.gelu_backward(grad_y, x, approximate="tanh")
        case "relu":
            return torch.ops.aten.threshold_backward(grad_y, x, 0)
