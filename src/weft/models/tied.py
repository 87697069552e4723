"""The matrix that is both embedding and output layer: one gradient where autograd would add up two.

The head's gradient is as large as the matrix, the look-up's has a row for each token. The backward pass reaches the head first,
which leaves its own for the look-up to add to. As two gradients of one parameter they would be added in a third tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Tied:
    """The gradient of one pass's output layer, between the head's backward pass and the look-up's.

    Both belong to one call of `backward`, as they do where the matrix is trained: what the head leaves in a call that asks for
    other gradients alone would join the look-up's next ones.
    """

    def __init__(self) -> None:
        self._by_weight: Tensor | None = None

    def leave(self, by_weight: Tensor | None) -> None:
        """`by_weight` [V, H], which nobody else holds; None where the matrix is not trained."""
        self._by_weight = by_weight

    def take(self, weight: Tensor) -> Tensor:
        """What was left, once; zeros where nothing was, because nothing of the head's outputs was trained on."""
        found, self._by_weight = self._by_weight, None
        return torch.zeros_like(weight) if found is None else found


def may_tie(weight: Tensor) -> bool:
    """Whether a matrix gets one gradient: on a CPU, where its own dtype is wide enough for sums."""
    return weight.is_cpu and weight.dtype in (torch.float32, torch.float64)


def look_up(tokens: Tensor, weight: Tensor, tied: Tied) -> Tensor:
    """weight [V, H] at `tokens` int64 [T] -> [T, H]; its gradient is the whole matrix's, what the head left included."""
    looked_up: Tensor = _LookUp.apply(tokens, weight, tied)
    return looked_up


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, tied: Tied) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        ctx.tied = tied
        return torch.nn.functional.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        tokens, weight = ctx.saved_tensors
        return None, ctx.tied.take(weight).index_add_(0, tokens, gradients[0]), None
