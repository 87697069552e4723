"""What floating-point arithmetic may lose, bounded by the lengths and the magnitudes of what is
computed.

A comparison in float32 takes its tolerance from here, not from what one processor gave: the bounds
hold for every order of summation, with and without fused multiply-adds (Higham 2002, "Accuracy and
Stability of Numerical Algorithms", chapters 3, 4). `exact` is computed in float64 from the same
inputs. Its own error is counted too, so float64 results have bounds as well.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
