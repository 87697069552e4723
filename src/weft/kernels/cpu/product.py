"""Matrix products by weft's own CPU kernels.

A kernel for products of few rows reads the matrix in place, and a second kernel computes all other
products.
"""

from __future__ import annotations

from torch import Tensor

from weft.kernels.cpu import library

MOST_ROWS = 128  # most rows for the few-row kernel


def serves(left: Tensor, right: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether the kernels can compute left [..., n] times right [m, n] transposed.

    An optional `bias` [m], in any dtype, is added to the product.
    """
    of_left = left.shape
    of_right = right.shape
    fit = len(of_left) > 0 and len(of_right) == 2 and of_left[-1] == of_right[1]
    filled = fit and 0 not in of_left and 0 not in of_right
    return filled and library.serves(left, right) and (bias is None or library.is_plain(bias))


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply `left` [..., n] by the transpose of `right` [m, n], and add `bias` [m] if given.

    The result is [..., m]. A row of the result does not depend on the other rows of `left`.
    """
    assert bias is None or bias.shape == right.shape[:1], "one number a column"
    flat = left.dim() == 2
    x = left if flat else left.reshape(-1, left.shape[-1])
    whole = None if bias is None else bias.to(right.dtype).contiguous()
    (rows, terms), size = x.shape, right.shape[0]
    out = x.new_empty(rows, size)
    if rows <= MOST_ROWS and right.is_contiguous():
        library.call("weft_product", x.contiguous(), right, whole, out, size, rows, size, terms)
    else:
        _multiply(x, right, whole, out, adds=False)
    return out if flat else out.view(*left.shape[:-1], size)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of left [rows, n] and the transpose of right [m, n] to total [rows, m].

    `total` must be contiguous.
    """
    _multiply(left, right, None, total, adds=True)


def _multiply(left: Tensor, right: Tensor, bias: Tensor | None, out: Tensor, *, adds: bool) -> None:
    assert left.dim() == 2 and out.shape == (len(left), len(right)) and out.is_contiguous()
    left, right = (x if 1 in x.stride() else x.contiguous() for x in (left, right))
    strides = (*left.stride(), *reversed(right.stride()))
    library.call(
        "weft_matmul",
        left,
        right,
        bias,
        out,
        *strides,
        len(left),
        left.shape[1],
        len(right),
        int(adds),
    )
