"""Products of few rows by weft's own kernel, which reads a matrix once and as it lies."""

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
