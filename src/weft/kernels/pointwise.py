"""Pointwise operations of a block as memory-saving autograd functions, and softmax statistics.

For the backward pass, the RMS norm saves its input and one number per token. The activation of an
MLP saves only its input, and is computed again in the backward pass. For the same formulas, torch's
autograd saves two to three times as much. On a GPU, each function is one kernel, which is compiled
from the formulas in `weft.kernels.formulas`, if kernels can be compiled. Under torch's compiler,
the plain formulas are used.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.kernels import compiling, formulas
from weft.kernels.cpu import library
from weft.kernels.cpu import rows as native
from weft.kernels.formulas import activate, compute_activation_gradient
from weft.kernels.products import GradientSum, compute_weight_gradient, product
from weft.kernels.types import Activation, SoftmaxStatistics


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (offset + weight), the RMS norm over the last dimension.

    Statistics are in float32 (Zhang and Sennrich 2019, arXiv:1910.07467). `offset` is 1 for Gemma,
    because its checkpoints store each weight minus 1. With this offset, the result is rounded to
    the dtype of x after scaling. Without an offset, values are rounded before scaling, except in
    torch's own kernel, which rounds only once.
    """
    if torch.compiler.is_compiling():
        return formulas.rms_norm(x, weight, eps, offset)[0]
    if x.device.type in ("cuda", "meta") and offset == 0.0 and x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    if not torch.is_grad_enabled():
        return _compute_rms_norm(x, weight, eps, offset)[0]
    return _RMSNorm.apply(x, weight, eps, offset)


def _compute_rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """Return the result of `rms_norm`, and the inverse RMS 1 / sqrt(mean(x^2) + eps) [..., 1]."""
    if library.serves(x, weight):
        return native.rms_norm(x, weight, eps, offset)
    if compiling.serves(x, weight):
        return compiling.compile_as_one_kernel(formulas.rms_norm)(x, weight, eps, offset)
    wide, inverse = _normalize(x, eps)
    return _scale(wide, inverse, weight, offset, x.dtype), inverse


def _normalize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x in float32 or wider, its inverse RMS).

    The inverse RMS is 1 / sqrt(mean(x^2) + eps), with the mean over the last dimension; its shape
    is [..., 1].
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
    return wide, squares.div_(x.shape[-1]).add_(eps).rsqrt_()


def _scale(
    wide: Tensor, inverse: Tensor, weight: Tensor, offset: float, dtype: torch.dtype
) -> Tensor:
    normed = wide * inverse
    if offset:
        return normed.mul_(weight.to(wide.dtype) + offset).to(dtype)
    return normed.to(dtype).mul_(weight)


class _RMSNorm(torch.autograd.Function):
    """Autograd function behind `rms_norm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        out, inverse = _compute_rms_norm(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset = offset
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Return the gradients with respect to x and weight.

        With r = 1 / rms, n = x r and g = dy (offset + weight), where dy is the gradient of the
        result, the gradients are dx = r (g - n mean(g n)) and dweight = sum of dy n.
        """
        x, weight, inverse = ctx.saved_tensors
        if library.serves(x, weight, gradients[0]):
            needs_x, needs_weight = ctx.needs_input_grad[:2]
            native_gradients = native.compute_rms_norm_gradients(
                x,
                weight,
                inverse,
                gradients[0],
                ctx.offset,
                needs_x=needs_x,
                needs_weight=needs_weight,
            )
            return *native_gradients, None, None
        if compiling.serves(x, weight):
            arguments = (x, weight, inverse, gradients[0], ctx.offset, *ctx.needs_input_grad[:2])
            compute = compiling.compile_as_one_kernel(formulas.compute_rms_norm_gradients)
            return *compute(*arguments), None, None
        wide = x.to(inverse.dtype)
        grad_y = gradients[0].to(inverse.dtype)
        if ctx.offset:
            scale = weight.to(wide.dtype) + ctx.offset
        else:
            scale = weight.to(wide.dtype)
        products = grad_y * wide
        flat = products.flatten(0, -2)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (inverse.flatten() @ flat).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None, None
        projection = (flat @ scale).view_as(inverse)
        coefficient = projection * inverse.pow(3) / -x.shape[-1]
        grad_x = torch.mul(grad_y, scale, out=products).mul_(inverse).addcmul_(wide, coefficient)
        return grad_x.to(x.dtype), grad_weight, None, None


def activated(gate_up: Tensor, gated: bool, activation: Activation) -> Tensor:
    """Return activation(gate_up) or, if `gated`, activation(gate) * up.

    The result is [T, n]. `gate_up` is [T, n] or, if `gated`, [T, 2 n]; each row then contains gate
    and up side by side.
    """
    if torch.compiler.is_compiling():
        return formulas.activated(gate_up, gated, activation)
    if not torch.is_grad_enabled():
        return _compute_activated(gate_up, gated, activation)
    return _ActivatedFunction.apply(gate_up, gated, activation)


def activated_linear(
    gate_up: Tensor,
    gated: bool,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    gradient_sum: GradientSum | None = None,
) -> Tensor:
    """Return `activated(gate_up) @ weight.T + bias`, a tensor [T, hidden].

    `gate_up` is [T, n], or [T, 2 n] if `gated`, and `weight` is [hidden, n]. See
    `formulas.activated` for the activation. If there is a `gradient_sum`, the gradient of the
    weight is added to it.
    """
    if torch.compiler.is_compiling():
        return F.linear(formulas.activated(gate_up, gated, activation), weight, bias)
    if not torch.is_grad_enabled():
        return product(_compute_activated(gate_up, gated, activation), weight, bias)
    return _ActivatedLinear.apply(gate_up, gated, weight, bias, activation, gradient_sum)


def _compute_activated(gate_up: Tensor, gated: bool, activation: Activation) -> Tensor:
    """Compute `activated` by the fastest available kernel, without a gradient."""
    if activation == "silu" and library.serves(gate_up):
        return native.compute_silu(gate_up, gated)
    if compiling.serves(gate_up):
        return compiling.compile_as_one_kernel(formulas.activated)(gate_up, gated, activation)
    if not gated:
        return activate(gate_up, activation)
    gate, up = gate_up.chunk(2, dim=1)
    return activate(gate, activation).mul_(up)


def _compute_gate_up_gradient(
    grad_out: Tensor, gate_up: Tensor, gated: bool, activation: Activation, *, recompute: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient with respect to `gate_up`, and the recomputed result of `activated`.

    `grad_out` is the gradient with respect to the result of `activated`. The recomputed result is
    None if `recompute` is False.
    """
    if activation == "silu" and library.serves(gate_up, grad_out):
        return native.compute_silu_gradients(gate_up, gated, grad_out, recompute=recompute)
    if compiling.serves(gate_up, grad_out):
        return compiling.compile_as_one_kernel(formulas.compute_activated_gradients)(
            grad_out, gate_up, gated, activation, recompute
        )
    if not gated:
        grad_x = compute_activation_gradient(grad_out, gate_up, activation)
        return grad_x, activate(gate_up, activation) if recompute else None
    gate, up = gate_up.chunk(2, dim=1)
    grad_gate_up = torch.empty_like(gate_up)
    value = activate(gate, activation)
    grad_gate, grad_up = grad_gate_up.chunk(2, dim=1)
    torch.mul(grad_out, value, out=grad_up)
    grad_gate.copy_(compute_activation_gradient(grad_out * up, gate, activation))
    return grad_gate_up, value.mul_(up) if recompute else None


class _ActivatedFunction(torch.autograd.Function):
    """Autograd function behind `activated`."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, gated: bool, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.gated = gated
        ctx.activation = activation
        return _compute_activated(gate_up, gated, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gate_up,) = ctx.saved_tensors
        grad_gate_up, _ = _compute_gate_up_gradient(
            gradients[0], gate_up, ctx.gated, ctx.activation, recompute=False
        )
        return grad_gate_up, None, None


class _ActivatedLinear(torch.autograd.Function):
    """Autograd function behind `activated_linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,
        gated: bool,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation,
        gradient_sum: GradientSum | None,
    ) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        ctx.gated = gated
        ctx.activation = activation
        ctx.gradient_sum = gradient_sum
        return product(_compute_activated(gate_up, gated, activation), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weight = ctx.saved_tensors
        grad_y = gradients[0]
        needed = ctx.needs_input_grad
        grad_inner = product(grad_y, weight.T)
        grad_gate_up, inner = _compute_gate_up_gradient(
            grad_inner, gate_up, ctx.gated, ctx.activation, recompute=needed[2]
        )
        if inner is None:
            grad_weight = None
        else:
            grad_weight = compute_weight_gradient(grad_y.T, inner.T, ctx.gradient_sum)
        return grad_gate_up, None, grad_weight, grad_y.sum(0) if needed[3] else None, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [T, heads, head_dim] with the first `2 * cos.shape[-1]` dimensions rotated.

    Dimension i is rotated with dimension i + cos.shape[-1].
    """
    if torch.is_grad_enabled():
        return _RotateFunction.apply(x, cos, sin)
    return _rotate(x, cos, sin, 1.0)


class _RotateFunction(torch.autograd.Function):
    """Autograd function behind `rotate`.

    Saves only the angles for the backward pass, which rotates the gradient in the opposite
    direction.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(gradients[0], cos, sin, -1.0), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    if library.serves(x, cos, sin):
        return native.rotate(x, cos, sin, direction)
    if compiling.serves(x, cos, sin):
        return compiling.compile_as_one_kernel(formulas.rotate)(x, cos, sin, direction < 0.0)
    return _rotate_to(
        torch.empty_like(x, memory_format=torch.contiguous_format), x, cos, sin, direction
    )


def _rotate_to(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    """Write the rotated x to `out`, and return `out`; `direction` is 1, or -1 for the inverse."""
    half = cos.shape[-1]
    first = x[..., :half]
    second = x[..., half : 2 * half]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin, value=direction)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def rotate_heads(
    heads: Tensor, kv_heads: int, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Split `heads` into q, k and v, and rotate q and k as `rotate` does.

    `heads` is [T, n + 2 kv_heads, head_dim], with n query heads. The results are views of one new
    tensor. Only `cos` and `sin` are saved for the backward pass.
    """
    counts = [heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads]
    if torch.is_grad_enabled():
        q, k, v = _RotatedHeads.apply(heads, counts, cos, sin)
    else:
        q, k, v = _rotate_head_groups(heads, counts, cos, sin)
    return q, k, v


class _RotatedHeads(torch.autograd.Function):
    """Autograd function behind `rotate_heads`."""

    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, counts: list[int], cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotate_head_groups(heads, counts, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        grad_q, grad_k, grad_v = gradients
        if compiling.serves(*gradients, cos, sin):
            compute = compiling.compile_as_one_kernel(formulas.compute_heads_gradient)
            return compute(grad_q, grad_k, grad_v, cos, sin), None, None, None
        counts = [gradient.shape[1] for gradient in gradients]
        grad_heads = grad_q.new_empty(len(grad_q), sum(counts), grad_q.shape[2])
        q_part, k_part, v_part = grad_heads.split(counts, dim=1)
        _rotate_to(q_part, grad_q, cos, sin, -1.0)
        _rotate_to(k_part, grad_k, cos, sin, -1.0)
        v_part.copy_(grad_v)
        return grad_heads, None, None, None


def _rotate_head_groups(
    heads: Tensor, counts: list[int], cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate q and k, and return q, k and v; `counts` are their numbers of heads."""
    num_rotated = counts[0] + counts[1]
    if compiling.serves(heads, cos, sin):
        rotated_heads = compiling.compile_as_one_kernel(formulas.rotate_heads)(
            heads, num_rotated, cos, sin
        )
    else:
        rotated_heads = torch.empty_like(heads, memory_format=torch.contiguous_format)
        _rotate_to(rotated_heads[:, :num_rotated], heads[:, :num_rotated], cos, sin, 1.0)
        rotated_heads[:, num_rotated:].copy_(heads[:, num_rotated:])
    q, k, v = rotated_heads.split(counts, dim=1)
    return q, k, v


def statistics(logits: Tensor, *, entropy: bool = False, best: bool = False) -> SoftmaxStatistics:
    """Return the softmax statistics of logits [R, V].

    The entropy of each row is computed only if `entropy` is True, and the most likely id only if
    `best` is True. If all logits of a row are minus infinity, the row's log-sum-exp is minus
    infinity and its entropy is 0.
    """
    if library.serves(logits):
        return native.statistics(logits, entropy=entropy, best=best)
    lse = torch.logsumexp(logits, dim=-1)
    entropies = None
    if entropy:
        z = torch.where(logits > -torch.inf, logits - lse[:, None], 0.0)
        entropies = -(torch.where(logits > -torch.inf, z.exp(), 0.0) * z).sum(-1)
    return SoftmaxStatistics(lse, entropies, logits.argmax(-1) if best else None)


def to_gradients(
    logits: Tensor,
    stats: SoftmaxStatistics,
    labels: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """Overwrite `logits` [R, V] with the gradient with respect to the logits.

    `grad_logprob` and `grad_entropy`, each [R], are the gradients with respect to the log-prob of
    each row's label and to each row's entropy. With p = softmax(logits), the result is grad_logprob
    * (onehot(label) - p) - grad_entropy * p * (log p + entropy).

    If the vocabulary is split over ranks, `logits` are those of this rank's ids, `stats` are those
    of the whole vocabulary, and a label below 0 is an id of another rank.
    """
    floats = [
        x for x in (logits, stats.lse, stats.entropy, grad_logprob, grad_entropy) if x is not None
    ]
    # The kernel writes to the logits, so they must be contiguous.
    if library.serves(*floats) and library.is_plain(labels) and logits.is_contiguous():
        native.to_gradients(logits, stats, labels, grad_logprob, grad_entropy)
        return
    z = logits - stats.lse[:, None]
    p = z.exp()
    grad_logits = p * -grad_logprob[:, None]
    if grad_entropy is not None:
        assert stats.entropy is not None
        grad_logits -= torch.where(
            p > 0.0, p * (grad_entropy[:, None] * (z + stats.entropy[:, None])), 0.0
        )
    label_gradients = torch.where(labels >= 0, grad_logprob, torch.zeros_like(grad_logprob))
    logits.copy_(
        grad_logits.scatter_add_(1, labels.clamp_min(0)[:, None], label_gradients[:, None])
    )
