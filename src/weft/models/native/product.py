"""Products of few rows, and gradients of weight matrices, by weft's own kernels, which read matrices as they lie."""

from __future__ import annotations

from torch import Tensor

from weft.models.native import library

MOST_ROWS = 128  # with more, oneDNN's blocked copy of the matrix pays


def serves(left: Tensor, right: Tensor) -> bool:
    """Whether the kernel takes left [rows, n] times right [m, n] transposed."""
    few = left.dim() == right.dim() == 2 and 0 < left.shape[0] <= MOST_ROWS and left.shape[1] == right.shape[1]
    return few and right.dtype == left.dtype and right.is_contiguous() and library.serves(left)


def product(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """left [rows, n] times right [m, n] transposed, plus bias [m] -> [rows, m]. A row does not depend on the others."""
    x, whole = left.contiguous(), None if bias is None else bias.to(right.dtype).contiguous()
    out = x.new_empty(len(x), len(right))
    library.call("weft_product", x, right, whole, out, len(right), len(x), len(right), x.shape[1])
    return out


def serves_gradient(by_out: Tensor, x: Tensor) -> bool:
    """Whether the kernel takes by_out [T, m] transposed times x [T, n]."""
    return by_out.dim() == x.dim() == 2 and len(x) > 0 and by_out.dtype == x.dtype and library.serves(x)


def weight_gradient(by_out: Tensor, x: Tensor, total: Tensor | None = None) -> Tensor:
    """by_out [T, m] transposed times x [T, n] -> [m, n]; added to `total`, contiguous, where one is given."""
    by_out, x = (y if y.stride(1) == 1 else y.contiguous() for y in (by_out, x))
    out = x.new_empty(by_out.shape[1], x.shape[1]) if total is None else total
    sizes = (by_out.stride(0), x.stride(0), by_out.shape[1], len(x), x.shape[1], int(total is not None))
    library.call("weft_weight_gradient", by_out, x, out, *sizes)
    return out
