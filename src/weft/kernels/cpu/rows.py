"""A block's operations by weft's own CPU kernels: products, softmax and pointwise operations.

Each pointwise operation makes one pass over memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.cpu import library
from weft.kernels.types import SoftmaxStatistics


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Return the RMS norm over the last dimension of x, and the inverse RMS [..., 1].

    The norm is x / rms * (offset + weight) with rms = sqrt(mean(x^2) + eps).
    """
    x = x.contiguous()
    weight = weight.contiguous()
    out = x.new_empty(x.shape)
    inverse = x.new_empty(*x.shape[:-1], 1)
    size = x.shape[-1]
    library.call(
        "weft_rms_norm", x, weight, out, inverse, inverse.numel(), size, float(eps), float(offset)
    )
    return out, inverse


def compute_rms_norm_gradients(
    x: Tensor,
    weight: Tensor,
    inverse: Tensor,
    grad_y: Tensor,
    offset: float,
    *,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of `rms_norm` with respect to x and weight, each None if not requested.

    `inverse` is the second result of `rms_norm`, and `grad_y` is the gradient with respect to the
    first result.
    """
    x = x.contiguous()
    weight = weight.contiguous()
    grad_y = grad_y.contiguous()
    grad_x = torch.empty_like(x) if needs_x else None
    grad_weight = torch.empty_like(weight) if needs_weight else None
    sizes = inverse.numel(), x.shape[-1]
    library.call(
        "weft_rms_norm_backward",
        x,
        weight,
        inverse,
        grad_y,
        grad_x,
        grad_weight,
        *sizes,
        float(offset),
    )
    return grad_x, grad_weight


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, direction: float, *, num_rotated: int | None = None
) -> Tensor:
    """Return a contiguous copy of x [T, heads, dim] with the first `num_rotated` heads rotated.

    If `num_rotated` is None, all heads are rotated. Dimension i is rotated with dimension i + half,
    by the angles whose cosines and sines are `cos` and `sin` [T, 1, half]. `direction` is 1, or -1
    for the opposite rotation.
    """
    x = x if x.stride(2) == 1 else x.contiguous()
    out = x.new_empty(x.shape)
    _rotate(x, cos, sin, out, x.shape[1] if num_rotated is None else num_rotated, direction)
    return out


def rotate_back(x: Tensor, cos: Tensor, sin: Tensor, num_rotated: int) -> None:
    """Undo `rotate` for the first `num_rotated` heads of x, in place; x must be contiguous."""
    assert x.is_contiguous()
    _rotate(x, cos, sin, x, num_rotated, -1.0)


def _rotate(
    x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, num_rotated: int, direction: float
) -> None:
    """Write x with its first `num_rotated` heads rotated to `out`, which may be x itself."""
    tokens, heads, dim = x.shape
    half = cos.shape[-1]
    angles = cos.contiguous(), sin.contiguous()
    library.call(
        "weft_rotate",
        x,
        *angles,
        out,
        *x.stride()[:2],
        tokens,
        heads,
        num_rotated,
        dim,
        half,
        direction,
    )


def compute_silu(gate_up: Tensor, gated: bool) -> Tensor:
    """Return silu(gate_up), or silu(gate) * up if `gated`, [T, n].

    `gate_up` is [T, n]. If `gated`, it is [T, 2 n], and each row contains gate and up side by side.
    """
    gate_up = gate_up.contiguous()
    gate, up = _split_halves(gate_up, gated)
    rows, row_stride = gate_up.shape
    out = gate_up.new_empty(gate.shape)
    library.call("weft_silu", gate, up, out, row_stride, rows, gate.shape[1])
    return out


def compute_silu_gradients(
    gate_up: Tensor, gated: bool, grad_out: Tensor, *, recompute: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient with respect to `gate_up`, and the recomputed result of `compute_silu`.

    `grad_out` is the gradient with respect to the result of `compute_silu`. The recomputed result
    is None if `recompute` is False.
    """
    gate_up = gate_up.contiguous()
    grad_out = grad_out.contiguous()
    grad_gate_up = torch.empty_like(gate_up)
    out = torch.empty_like(grad_out) if recompute else None
    gate, up = _split_halves(gate_up, gated)
    grad_gate, grad_up = _split_halves(grad_gate_up, gated)
    sizes = gate_up.shape[1], *gate.shape
    library.call("weft_silu_backward", gate, up, grad_out, out, grad_gate, grad_up, *sizes)
    return grad_gate_up, out


def _split_halves(gate_up: Tensor, gated: bool) -> tuple[Tensor, Tensor | None]:
    if not gated:
        return gate_up, None
    gate, up = gate_up.chunk(2, dim=1)
    return gate, up


def store(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, indices: Tensor) -> None:
    """Write k and v [T, heads, dim] into caches [slots, heads, room, dim].

    `indices`, int64 [T], are the indices at which the first head of each token is written. An index
    counts rows of `dim` floats from the start of the cache.
    """
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    strides = (*k.stride()[:2], *v.stride()[:2])
    library.call("weft_store", k, v, keys, values, indices, *strides, *k.shape, keys.shape[2])


MAX_ROWS = 128  # most rows of a product that `weft_product` computes


def serves(left: Tensor, right: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether the kernels can compute left [..., n] times right [m, n] transposed.

    An optional `bias` [m], in any dtype, is added to the product.
    """
    left_shape = left.shape
    right_shape = right.shape
    shapes_match = (
        len(left_shape) > 0 and len(right_shape) == 2 and left_shape[-1] == right_shape[1]
    )
    has_elements = 0 not in left_shape and 0 not in right_shape
    return (
        shapes_match
        and has_elements
        and library.serves(left, right)
        and (bias is None or library.is_plain(bias))
    )


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply `left` [..., n] by the transpose of `right` [m, n], and add `bias` [m] if given.

    The result is [..., m]. A row of the result does not depend on the other rows of `left`.
    """
    assert bias is None or bias.shape == right.shape[:1], (
        "bias must have one element per row of right"
    )
    is_matrix = left.dim() == 2
    x = left if is_matrix else left.reshape(-1, left.shape[-1])
    prepared_bias = None if bias is None else bias.to(right.dtype).contiguous()
    (rows, inner_size), size = x.shape, right.shape[0]
    out = x.new_empty(rows, size)
    if rows <= MAX_ROWS and right.is_contiguous():
        library.call(
            "weft_product", x.contiguous(), right, prepared_bias, out, size, rows, size, inner_size
        )
    else:
        _multiply(x, right, prepared_bias, out, accumulate=False)
    return out if is_matrix else out.view(*left.shape[:-1], size)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of left [rows, n] and the transpose of right [m, n] to total [rows, m].

    `total` must be contiguous.
    """
    _multiply(left, right, None, total, accumulate=True)


def _multiply(
    left: Tensor, right: Tensor, bias: Tensor | None, out: Tensor, *, accumulate: bool
) -> None:
    """Write left times right transposed, plus `bias`, to `out`; add it to `out` if `accumulate`."""
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
        int(accumulate),
    )


def statistics(logits: Tensor, *, entropy: bool = False, best: bool = False) -> SoftmaxStatistics:
    """Return the softmax statistics of float32 logits [R, V].

    The entropy of each row is computed only if `entropy` is True, and the most likely id only if
    `best` is True.
    """
    logits, (rows, size) = logits.contiguous(), logits.shape
    lse = logits.new_empty(rows)
    entropies = logits.new_empty(rows) if entropy else None
    ids = logits.new_empty(rows, dtype=torch.int64) if best else None
    library.call("weft_statistics", logits, lse, entropies, ids, rows, size)
    return SoftmaxStatistics(lse, entropies, ids)


def draw(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one id per row of float32 logits [R, V]; return ids int64 [R] and log-probs float32 [R].

    The id is the first, in vocabulary order, whose cumulative probability exceeds the row's random
    number in `uniforms` [R]. To limit rounding errors, the sums of blocks of consecutive ids are
    added in float64.
    """
    x, (rows, size) = logits.contiguous(), logits.shape
    ids = torch.empty(rows, dtype=torch.int64)
    logprobs = torch.empty(rows)
    library.call("weft_draw", x, uniforms.double().contiguous(), ids, logprobs, rows, size)
    return ids, logprobs


def to_gradients(
    logits: Tensor,
    stats: SoftmaxStatistics,
    labels: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """Overwrite `logits` [R, V] with the gradient with respect to the logits.

    `grad_logprob` and `grad_entropy`, each [R], are the gradients with respect to the log-prob of
    each row's label and to each row's entropy.
    """
    assert grad_entropy is None or stats.entropy is not None
    assert (
        all(x is None or x.dtype == logits.dtype for x in (grad_logprob, grad_entropy))
        and labels.dtype == torch.int64
    )
    row_values = (
        labels.contiguous(),
        grad_logprob.contiguous(),
        None if grad_entropy is None else grad_entropy.contiguous(),
    )
    library.call(
        "weft_logit_gradients", logits, stats.lse, stats.entropy, *row_values, *logits.shape
    )
