"""Update rules as torch optimizers: torch's AdamW and SGD, and Lion.

torch decorates optimizers for `torch.compile`, and the decorators load the compiler at the first
call, which takes a second. Optimizers are never compiled here, so the classes call the undecorated
functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import unwrap

import torch
from torch import nn


class EagerOptimizer(torch.optim.Optimizer):
    """Base class of optimizers that are never compiled, so that torch's compiler is not loaded."""

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(EagerOptimizer, torch.optim.AdamW):
    """AdamW of torch, without the decorators for `torch.compile`."""

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


class SGD(EagerOptimizer, torch.optim.SGD):
    """PyTorch's SGD optimizer, without the decorators for `torch.compile`."""

    step = torch.no_grad()(unwrap(torch.optim.SGD.step))


class Lion(EagerOptimizer):
    """Optimizer that moves each element by the sign of an interpolated momentum.

    Implements algorithm 2 of Chen et al. 2023, arXiv:2302.06675.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, betas: tuple[float, float]
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters, and return the result of `closure`, if given.

        For a parameter p with gradient g, momentum m, learning rate lr and betas b1 and b2, p
        becomes p - lr sign(b1 m + (1 - b1) g), and then m becomes b2 m + (1 - b2) g.
        """
        loss = closure() if closure else None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.add_(momentum.lerp(p.grad, 1.0 - beta1).sign_(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 1.0 - beta2)
        return loss
