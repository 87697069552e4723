"""The parts of a block between its products are the written-out formulas, forward and backward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.bounds import assert_within, gamma, rms_norm_bounds, unit
from weft.kernels import Activation, activate, activated, activated_linear, rms_norm, rotate

ACTIVATIONS: list[Activation] = ["silu", "gelu", "gelu_tanh", "relu"]
assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)  # of float64


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()


def plain_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (offset + weight)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(5, 8), (4, 3, 8)])
def test_rms_norm_is_its_formula_and_its_gradient(offset: float, shape: tuple[int, ...]) -> None:
    x, weight = rows(*shape), rows(8, seed=1)
    assert_close(rms_norm(x, weight, 1e-5, offset=offset), plain_norm(x, weight, 1e-5, offset))
    assert torch.autograd.gradcheck(lambda *t: rms_norm(*t, 1e-5, offset=offset), (x, weight))


def test_rms_norm_in_bfloat16_has_float32_statistics() -> None:
    x = (rows(3, 64).detach() * 50).bfloat16().requires_grad_()
    weight = rows(64, seed=1).detach().bfloat16().requires_grad_()
    for offset in (0.0, 1.0):
        wide, scale = (each.detach().double().requires_grad_() for each in (x, weight))
        wanted, found = (
            plain_norm(wide, scale, 1e-5, offset),
            rms_norm(x, weight, 1e-5, offset=offset),
        )
        assert found.dtype == torch.bfloat16
        # What is between is float32. Without an offset, the value is rounded before and after it is
        # scaled; else once, as gradients are.
        _, of_value, *of_gradients = rms_norm_bounds(x, weight, 1e-5, offset, torch.ones_like(x))
        of_value = of_value + gamma(1 if offset else 2, torch.bfloat16) * wanted.detach().abs()
        assert_within(found, wanted, 1.01 * of_value)
        grads = torch.autograd.grad(found.sum(), (x, weight))
        for grad, want, bound in zip(
            grads, torch.autograd.grad(wanted.sum(), (wide, scale)), of_gradients, strict=True
        ):
            assert grad.dtype == torch.bfloat16
            assert_within(grad, want, 1.01 * (bound + unit(torch.bfloat16) * want.abs()))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_activated_linear_is_its_formula_and_its_gradient(
    activation: Activation, gated: bool, bias: bool
) -> None:
    down = nn.Linear(6, 4, bias=bias, dtype=torch.float64)
    gate_up = rows(5, 12 if gated else 6)
    inner = activate(gate_up[:, :6], activation) * (gate_up[:, 6:] if gated else 1.0)
    assert_close(activated(gate_up, gated, activation), inner)
    assert_close(activated_linear(gate_up, gated, down.weight, down.bias, activation), down(inner))
    assert torch.autograd.gradcheck(lambda x: activated(x, gated, activation), (gate_up,))
    inputs = (gate_up, *down.parameters())
    assert torch.autograd.gradcheck(
        lambda *_: activated_linear(gate_up, gated, down.weight, down.bias, activation), inputs
    )


@pytest.mark.parametrize("dim", [8, 4])
def test_a_rotation_is_its_formula_and_its_gradient(dim: int) -> None:
    angles = (
        torch.arange(5.0, dtype=torch.float64)[:, None, None]
        * 100.0 ** -torch.linspace(0, 1, dim // 2 + 1)[:-1]
    )
    cos, sin = angles.cos(), angles.sin()
    x = rows(5, 3, 8)
    first, second = x[..., : dim // 2], x[..., dim // 2 : dim]
    wanted = torch.cat(
        [first * cos - second * sin, second * cos + first * sin, x[..., dim:]], dim=-1
    )
    assert_close(rotate(x, cos, sin), wanted)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), (x,))
