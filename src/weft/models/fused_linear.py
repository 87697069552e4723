"""Linear layers that read the same input, as one product: q, k and v; gate and up.

The layers keep their parameters under their own names. These lie side by side in memory, where one view covers them all; a
pass that finds them apart (after the network was read, or moved to another device) brings them together first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.models.products import product


def fused_linear(x: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """What each of the layers makes of x [T, in], side by side: [T, sum of out]; differentiable once.

    All layers have a bias, or none has.
    """
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    weight, bias = side_by_side(weights), side_by_side(biases) if biases else None
    if not torch.is_grad_enabled():
        return product(x, weight, bias)
    return _FusedLinear.apply(x, weight, bias, *weights, *biases)


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """One tensor over parameters that differ in their first size alone; it is the memory that they use, from now on."""
    first, rows = parts[0].detach(), [part.shape[0] for part in parts]
    end = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end:
            break
        end += part.nbytes
    else:
        storage = first.untyped_storage()
        if end <= storage.data_ptr() + storage.nbytes():
            return first.as_strided((sum(rows), *first.shape[1:]), first.stride())
    whole = torch.cat([part.detach() for part in parts])
    for part, own in zip(parts, whole.split(rows), strict=True):
        part.data = own
    return whole


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows = [len(part) for part in (parts if bias is None else parts[: len(parts) // 2])]
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), by_out, needed = ctx.saved_tensors, gradients[0], ctx.needs_input_grad
        layers = len(ctx.rows)
        to_x = product(by_out, weight.T) if needed[0] else None
        none = (None,) * layers
        to_weights = product(by_out.T, x.T).split(ctx.rows) if any(needed[3 : 3 + layers]) else none
        if len(needed) == 3 + layers:
            return to_x, None, None, *to_weights
        return to_x, None, None, *to_weights, *(by_out.sum(0).split(ctx.rows) if any(needed[3 + layers :]) else none)
