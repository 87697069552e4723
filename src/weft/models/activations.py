"""The activations of the families, by the names of `weft.models.config.Activation`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from weft.models.config import Activation


def activate(x: Tensor, name: Activation) -> Tensor:
    match name:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
