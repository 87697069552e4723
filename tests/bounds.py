"""What floating-point arithmetic may lose, bounded by the lengths and the magnitudes of what is
computed.

A comparison in float32 takes its tolerance from here, not from what one processor gave: the bounds
hold for every order of summation, with and without fused multiply-adds (Higham 2002, "Accuracy and
Stability of Numerical Algorithms", chapters 3, 4). `exact` is computed in float64 from the same
inputs. Its own error is counted too, so float64 results have bounds as well.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def unit(dtype: torch.dtype) -> float:
    """u, the largest relative error of one rounding, plus that of the float64 computation it is
    compared with.
    """
    return (torch.finfo(dtype).eps + torch.finfo(torch.float64).eps) / 2


def gamma(roundings: float, dtype: torch.dtype = torch.float32) -> float:
    """Largest relative error of a product of `roundings` factors 1 + d, |d| <= u: n u / (1 - n u)."""
    lost = roundings * unit(dtype)
    assert lost < 0.1, "so many roundings leave no bound"
    return lost / (1 - lost)


def probable_gamma(roundings: float, dtype: torch.dtype = torch.float32) -> float:
    """As `gamma`, for so many roundings that their signs differ: 6 sqrt(n) u + n u^2.

    A product of n factors exceeds it with a probability below 2 exp(-18) (Higham and Mary 2019, "A
    New Approach to Probabilistic Rounding Error Analysis", lambda = 6). For whole networks, where n
    u would allow mistakes.
    """
    return 6 * roundings**0.5 * unit(dtype) + roundings * unit(dtype) ** 2


def product_bound(
    left: Tensor, right: Tensor, dtype: torch.dtype = torch.float32, more: int = 0
) -> Tensor:
    """Largest error of each element of left @ right: gamma(K + more) |left| @ |right|.

    Each of a sum's K products meets at most K roundings whatever the order, and `more` in its
    factors or after the sum.
    """
    terms = left.shape[-1]
    return gamma(terms + more, dtype) * (
        left.detach().double().abs() @ right.detach().double().abs()
    )


def softmax_bound(logits: Tensor, error: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Largest error of each row's log-softmax [N, V], and so the largest relative error of its
    softmax, less a term in u^2: [N, 1], of exact `logits` whose computed values are wrong by up to
    `error` [N, V].

    lse(z) = m + log sum exp(z - m) moves by no more than the largest error of z, and z - lse by
    twice that. Each exp meets the rounding of z - m, which is u |z - m|, and is itself right within
    4 u; its V terms are added up with V roundings; the logarithm, m + log and z - lse round once
    each, at |lse|, |lse| and |z - lse| or less.
    """
    z = logits.detach().double()
    lse = z.logsumexp(-1, keepdim=True)
    spread = z.amax(-1, keepdim=True) - z.amin(-1, keepdim=True)
    widest = (
        spread + lse.abs() + (z - lse).abs().amax(-1, keepdim=True) + z.abs().amax(-1, keepdim=True)
    )
    return 2 * error.amax(-1, keepdim=True) + unit(dtype) * (z.shape[-1] + 8 + 2 * widest)


def assert_within(actual: Tensor, exact: Tensor, bound: Tensor | float, what: str = "") -> None:
    """That every element of `actual` is within `bound` of `exact`."""
    error = (actual.detach().double() - exact.detach().double()).abs()
    most = torch.as_tensor(bound, dtype=torch.float64).expand_as(error)
    assert bool(most.isfinite().all()), f"{what}: its bound is not finite"
    assert bool(exact.isfinite().all()) and bool(error.isfinite().all()), f"{what}: not finite"
    if bool((error <= most).all()):
        return
    share = (error / most.clamp_min(torch.finfo(torch.float64).tiny)).flatten()
    at = int(share.argmax())
    raise AssertionError(
        f"{what or 'result'}: element {at} is {actual.flatten()[at].item():.9g}, exactly "
        f"{exact.flatten()[at].item():.9g}: "
        f"wrong by {error.flatten()[at].item():.3g}, where its arithmetic loses "
        f"{most.flatten()[at].item():.3g} at most"
    )


def sum_gamma(roundings: float, dtype: torch.dtype = torch.float32) -> float:
    """The smaller of `gamma` and `probable_gamma`, for sums that may be short or long."""
    return gamma(roundings, dtype) if roundings < 36 else probable_gamma(roundings, dtype)


def kernel_product_bound(
    left: Tensor, right: Tensor, dtype: torch.dtype = torch.float32, more: int = 0
) -> Tensor:
    """As `product_bound`, by any of weft's and torch's kernels, tiles of bfloat16 among them.

    There each float32 is the sum of three parts, and a term six products of parts, which each round
    the sum. With the sums of pieces, and parts whose sizes add up to at most 1.02 of the number,
    that is less than 7 K roundings. What is left out is 2^-22 of a term: four more.
    """
    terms = left.shape[-1]
    roundings = (7 * terms + 4 if dtype == torch.float32 else terms) + more
    sizes = left.detach().double().abs() @ right.detach().double().abs()
    return sum_gamma(roundings, dtype) * sizes


def rms_norm_bounds(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    grad_y: Tensor,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Largest errors of r = 1 / rms [..., 1], of y = x r (offset + weight) and of its gradients by
    x and weight, computed in `dtype`.

    The N squares and eps lose N + 8 roundings together, of which the root halves what is lost; it
    and the division round a few times more. Then y has four more factors. With g = grad_y (offset +
    weight), the gradient r g - x r^3 mean(x g) has r once and three times, and sums of N terms; that
    of the weight sums a term a row.
    """
    x, weight, grad_y = (each.detach().double() for each in (x, weight, grad_y))
    size, rows = x.shape[-1], x.numel() // x.shape[-1]
    lost = sum_gamma(size + 8, dtype) / 2 + gamma(6, dtype)  # of r, relatively
    r = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    scale = weight.abs() + offset
    g = grad_y.abs() * scale
    along = (x.abs() * g).mean(-1, keepdim=True)
    by_x = r * g * (lost + gamma(6, dtype))
    by_x = by_x + x.abs() * r**3 * along * (3 * lost + sum_gamma(size + 10, dtype))
    by_weight = (grad_y * x * r).abs().flatten(0, -2).sum(0)
    return (
        r * lost,
        (x * r).abs() * scale * (lost + gamma(4, dtype)),
        by_x,
        by_weight * (lost + sum_gamma(rows + 4, dtype)),
    )


class SoftmaxErrors:
    """Largest errors of the statistics of rows of logits [R, V], and of gradients by the logits,
    computed in `dtype` with no more than `additions` in the way of each exponential.

    With m the largest of a row, exp(z - m) meets the rounding of z - m, which is u |z - m|, and is
    itself right within 4 u. The relative error of their sum is the mean of theirs by softmax, and
    that is the error of its logarithm. A logit of minus infinity has no share in anything.
    """

    def __init__(self, logits: Tensor, additions: int, dtype: torch.dtype = torch.float32) -> None:
        self.u, z = unit(dtype), logits.detach().double()
        self.tiny = torch.finfo(dtype).tiny  # kernels' exponentials end at about the least number
        there, most = z > -torch.inf, z.amax(-1, keepdim=True)
        below = torch.where(there, most - z, 0.0)
        lse, self.p = z.logsumexp(-1, keepdim=True), z.softmax(-1)
        self.size = torch.where(there, lse - z, 0.0)  # |log p|
        added = sum_gamma(additions, dtype)
        each = self.u * (below + 5) + added
        total = (self.p * each).sum(-1, keepdim=True)
        log_total = total + 2 * self.u * ((lse - most).abs() + lse.abs())
        # of exp(z - lse), relatively, and of z - lse
        self.lost = log_total + self.u * (self.size + 5)
        self.log_lost = log_total + self.u * self.size
        self.entropy = (self.p * self.size).sum(-1, keepdim=True)
        # As log of the sum + the mean of m - z, or as the mean of lse - z: each term p (m - z) or
        # p (lse - z) has its factors' errors, is rounded itself, and added up.
        by_most = self.p * below * (each + total + 4 * self.u)
        by_lse = self.p * (self.size * (self.lost + 2 * self.u + added) + self.log_lost)
        entropy = (by_most + by_lse).sum(-1, keepdim=True) + log_total
        self._entropy = entropy + 2 * self.u * self.entropy
        self.of_lse, self.of_entropy = log_total[:, 0], self._entropy[:, 0]
        self.of_probabilities = 2 * total[:, 0]  # of sums of exp(z - m) over that of all

    def of_gradients(self, labels: Tensor, by_logprob: Tensor, by_entropy: Tensor | None) -> Tensor:
        """Of g (1 at the label - p) - h p (log p + entropy): what its factors lose, and the three
        roundings of its sum. A label below 0 is none of these.
        """
        g = by_logprob.double()[:, None]
        own = torch.where(labels[:, None] >= 0, g.abs(), 0.0)
        of_label = torch.zeros_like(self.p).scatter_(1, labels.clamp_min(0)[:, None], own)
        size, error = g.abs() * self.p, g.abs() * self.p * (self.lost + 2 * self.u)
        if by_entropy is not None:
            h = by_entropy.double().abs()[:, None]
            factor = self.size + self.entropy
            size = size + h * self.p * factor
            error = error + h * self.p * (
                factor * (self.lost + 4 * self.u) + self.log_lost + self._entropy
            )
        return error + 3 * self.u * (size + of_label) + 4 * self.tiny


def attention_bounds(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    grad_out: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    kept: torch.dtype | None = None,
    softcap: float | None = None,
    sizes: tuple[Tensor, Tensor] | None = None,
    more: int = 0,
    part: int = 16,
) -> list[Tensor]:
    """Largest errors of attention [R, H, D] of q [R, H, D] over k and v [T, kv, D] where `seen`
    [R, T], and of its gradients by q, k and v for `grad_out`, as flash attention makes them in
    `dtype` and in parts of `part` keys or more; first-order in u.

    `kept` is a narrower dtype to which it rounds weights, their gradients, results and those of
    each query head that reads a key head: three roundings, and one for the products of such. `sizes`
    are what the roundings of q and k are measured by, of which a score meets `more`; |q| and |k|
    otherwise.

    Score: D products, the scale, and `more`. Weight: its score's error, the rounding of the
    differences to the largest score of its part and of parts to each other (which add up to the
    difference to the largest of all), 4 u for each exponential and 2 for what it multiplies; of the
    sum of weights the mean of that, by softmax. Parts are merged, and weights made again on the way
    back, by a log-sum-exp, which rounds at its own size and at the size of what it is taken from.
    Sums of n weighted values or keys have n roundings, and n at most from one part to the next.
    """
    u, narrow = unit(dtype), 0.0 if kept is None else 4 * unit(kept)
    dim, group = q.shape[-1], q.shape[1] // k.shape[1]
    q, k, v, g = (x.detach().double().cpu() for x in (q, k, v, grad_out))
    q_size, k_size = (x.double() for x in sizes) if sizes else (q.abs(), k.abs())
    k, k_size, v = (x.repeat_interleave(group, dim=1) for x in (k, k_size, v))

    def dot(left: Tensor, right: Tensor) -> Tensor:
        return torch.einsum("qhd,khd->hqk", left, right)

    dots = sum_gamma(dim + 4 + more, dtype)
    z, error = dot(q, k) * scale, dots * scale * dot(q_size, k_size)
    slope, slope_error = torch.ones(()).double(), torch.zeros(()).double()
    if softcap is not None:
        bent, bent_error = torch.tanh(z / softcap), error / softcap + 6 * u
        slope, slope_error = 1 - bent.square(), 2 * bent.abs() * bent_error + 3 * u
        z, error = softcap * bent, softcap * bent_error
    count = int(seen.sum(-1).max())
    z = z.masked_fill(~seen, -torch.inf)
    most, lse, p = z.amax(-1, keepdim=True), z.logsumexp(-1, keepdim=True), z.softmax(-1)
    below, log_size = (torch.where(seen, x - z, 0.0) for x in (most, lse))
    highest = torch.where(seen, z.abs(), 0.0).amax(-1, keepdim=True)
    each = torch.where(seen, error + u * (below + 4 + 6 * (count / part + 2)), 0.0)
    lost = each + (p * each).sum(-1, keepdim=True) + sum_gamma(count, dtype)
    lost = lost + u * (log_size + 2 * highest + 4 * math.log(count) + 16)

    def summed(
        equation: str, left: Tensor, left_error: Tensor, right: Tensor, terms: int
    ) -> Tensor:
        each = left_error + left.abs() * (sum_gamma(2 * terms + 8, dtype) + narrow)
        return torch.einsum(equation, each, right)

    out = torch.einsum("hqk,khd->qhd", p, v)
    of_out = summed("hqk,khd->qhd", p, p * lost, v.abs(), count)
    by_p = dot(g, v)
    delta, delta_size, delta_error = (
        x.sum(-1).T[..., None] for x in (g * out, (g * out).abs(), g.abs() * of_out)
    )
    s = p * (by_p - delta)
    s_error = (by_p - delta).abs() * (lost + 8 * u) + delta_error
    s_error = s_error + dots * (dot(g.abs(), v.abs()) + delta_size) + 2 * u * by_p.abs()
    s_error = p * s_error * slope + s.abs() * slope_error
    s, rows = s * slope, len(q) * group
    of_q = scale * summed("hqk,khd->qhd", s, s_error, k_size, count)
    of_k = scale * summed("hqk,qhd->khd", s, s_error, q_size, rows)
    of_v = summed("hqk,qhd->khd", p, p * lost, g.abs(), rows)
    of_k, of_v = (x.unflatten(1, (-1, group)).sum(2) for x in (of_k, of_v))
    return [of_out, of_q, of_k, of_v]


# -- computations that stay in float64


PRODUCTS = (Tensor.matmul, Tensor.__matmul__, torch.matmul, torch.bmm)


class Float64Throughout(TorchFunctionMode):
    """Until it is left, `.float()` gives float64, no other cast takes float64 to float32, and a
    product of both is float64.

    Networks of `transformers` normalise and rotate in float32 whatever their dtype, and so do
    weft's rotations. Those roundings alone would forbid a comparison of the two to float64's
    precision: a cosine in float32 may depend on where in a vector of the processor it is.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = args[0] if args else kwargs.get("input")
        if func is Tensor.float:
            return given.double()
        if func in PRODUCTS and {each.dtype for each in args} == {torch.float32, torch.float64}:
            args = [each.double() for each in args]
        if isinstance(given, Tensor) and given.dtype == torch.float64:
            args = [torch.float64 if each is torch.float32 else each for each in args]
            kwargs = {
                key: torch.float64 if each is torch.float32 else each
                for key, each in kwargs.items()
            }
        return func(*args, **kwargs)


# -- numbers by hand


def rounded(
    expected: Any, roundings: float, largest: float = 0.0, dtype: torch.dtype = torch.float32
) -> Any:
    """`expected` (a number, list or dict, as of `pytest.approx`) after `roundings` roundings.

    They are those of factors, quotients and sums of one sign, whose relative errors add up: 1 for a
    key that is computed in float64 and stored in float32. Where terms cancel, an error is relative
    to them: `largest` is the largest sum of their absolute values.
    """
    lost = gamma(roundings, dtype)
    return pytest.approx(expected, rel=lost, abs=lost * largest)
