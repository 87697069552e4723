"""Sums of residual connections that are left to the norm after them, for one kernel that does both.

A norm is often in another module than the sum before it: the last sum of a block comes before the
first norm of the next. The block therefore returns a `PendingSum`, which the next norm computes.
`Transformer` decides for each pass whether it does.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from weft import kernels


@dataclass(frozen=True)
class PendingSum:
    """Hidden states x + delta, each [T, hidden], whose sum is not computed yet."""

    x: Tensor
    delta: Tensor

    def compute(self) -> Tensor:
        """Return the sum."""
        return self.x + self.delta

    def normalize(self, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        """Return the sum and its RMS norm; `can_normalize_sums` must be True for the norm."""
        assert weight is not None
        return kernels.fused.add_rms_norm(self.x, self.delta, weight, eps, offset)


def can_normalize_sums(norm: nn.Module, x: Tensor) -> bool:
    """Return whether one kernel can compute the norm with a sum like x [T, hidden] before it.

    The norm must be an RMS norm. Its hooks would not be called, so there must be none.
    """
    if norm.kind == "layer" or has_hooks(norm):
        return False
    return isinstance(norm.weight, Tensor) and kernels.fused.serves_add_norm(x, norm.weight)


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks run before or after the module's `forward`."""
    return bool(module._forward_pre_hooks or module._forward_hooks)
