"""What a block does between its products, against torch in float64 up to what its arithmetic may
lose, at sizes that fill no vector.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.bounds import assert_within, gamma, rms_norm_bounds
from weft.kernels.cpu import rows
from weft.kernels.formulas import activate


@pytest.mark.parametrize("shape", [(5, 3), (2, 7, 37), (3, 256), (150, 40)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(shape: tuple[int, ...], offset: float) -> None:
    torch.manual_seed(shape[-1])
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    made, inverse = rows.rms_norm(x, weight, 1e-5, offset)
    wide, scale = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    normed = wide * expected * (scale + offset)
    grad_y = torch.randn(shape)
    of_inverse, of_normed, *of_gradients = rms_norm_bounds(x, weight, 1e-5, offset, grad_y)
    assert_within(inverse, expected, of_inverse)
    assert_within(made, normed, of_normed)
    wanted = torch.autograd.grad(normed, (wide, scale), grad_y.double())
    for want_x, want_weight in [(True, True), (True, False), (False, True)]:
        found = rows.compute_rms_norm_gradients(
            x, weight, inverse, grad_y, offset, needs_x=want_x, needs_weight=want_weight
        )
        for one, other, there, bound in zip(
            found, wanted, (want_x, want_weight), of_gradients, strict=True
        ):
            assert (one is not None) == there
            if one is not None:
                assert_within(one, other, bound)


@pytest.mark.parametrize("half", [2, 5, 16])
def test_rotations_go_there_and_back(half: int) -> None:
    whole = torch.randn(6, 5, 33)
    x, angles = whole[:, 1:4], torch.randn(6, 1, half)
    first, second = x.double()[..., :half], x.double()[..., half : 2 * half]
    rotated = rows.rotate(x, angles.cos(), angles.sin(), 1.0)
    as_complex = torch.complex(first, second) * torch.polar(
        torch.ones_like(angles).double(), angles.double()
    )
    # Cosine and sine are right within two roundings; two products of them and their sum are rounded.
    # No sum of them is larger than both parts together, and on the way back the same is lost again.
    lost = gamma(5) * (first.abs() + second.abs())
    assert_within(
        rotated[..., : 2 * half],
        torch.cat([as_complex.real, as_complex.imag], -1),
        torch.cat([lost, lost], -1),
    )
    assert torch.equal(rotated[..., 2 * half :], x[..., 2 * half :])
    both = torch.cat([4 * lost, 4 * lost, torch.zeros_like(x[..., 2 * half :]).double()], -1)
    assert_within(rows.rotate(rotated, angles.cos(), angles.sin(), -1.0), x, both)
    part = rows.rotate(x, angles.cos(), angles.sin(), 1.0, num_rotated=2)
    assert torch.equal(part[:, :2], rotated[:, :2]) and torch.equal(part[:, 2], x[:, 2])
    rows.rotate_back(part, angles.cos(), angles.sin(), 2)
    assert_within(part, x, both)
    assert torch.equal(part[:, 2], x[:, 2])


@pytest.mark.parametrize("gated", [True, False])
def test_silu(gated: bool) -> None:
    gate_up = torch.cat([torch.linspace(-120, 120, 2 * 37).view(2, 37), torch.randn(2, 37)], dim=1)
    gate_up[0, :2] = torch.tensor([-1e20, torch.nan])
    wide = gate_up.double().requires_grad_()
    gate, up = wide.chunk(2, dim=1) if gated else (wide, 1.0)
    expected = activate(gate, "silu") * up
    made = rows.compute_silu(gate_up, gated)
    grad_out = torch.randn(made.shape)
    (wanted,) = torch.autograd.grad(expected, wide, grad_out.double())
    # 1 / (1 + exp(-x)) is right within 8 roundings: 4 u of exp, two of its own, and two to spare. The
    # value multiplies it twice. The gradient by x, share + x share (1 - share), has it three times, in
    # terms no larger than share (1 + |x|), and rounds five more. Below -87 all is 0, where |x|
    # exp(x), which only falls from there, and the factors' other parts are up to 88 exp(-87).
    one, by = gate.detach().nan_to_num(), grad_out.double().abs()
    other, share = up.detach().abs() if gated else torch.ones_like(one), one.sigmoid()
    vanished = 88 * math.exp(-87)
    of_value = (gamma(10) * one.abs() * share + vanished) * other
    of_gate = (gamma(3 * 8 + 5) * share * (1 + one.abs()) + vanished) * other * by
    of_up = (gamma(10) * one.abs() * share + vanished) * by
    of_both = torch.cat([of_gate, of_up], dim=1) if gated else of_gate

    def check(found: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
        assert torch.equal(found.isnan(), exact.isnan())
        assert_within(found.nan_to_num(), exact.nan_to_num(), bound)

    check(made, expected, of_value)
    for again in (True, False):
        grad_gate_up, value = rows.compute_silu_gradients(gate_up, gated, grad_out, recompute=again)
        check(grad_gate_up, wanted, of_both)
        assert value is None if not again else torch.equal(value.nan_to_num(7), made.nan_to_num(7))


def test_keys_and_values_come_to_their_places() -> None:
    made = torch.randn(4, 9, 6)
    k, v = made[:, 2:5], made[:, 5:8]
    keys, values = torch.zeros(3, 3, 10, 6), torch.zeros(3, 3, 10, 6)
    where = [(2, 0), (0, 9), (0, 3), (1, 4)]
    rows.store(k, v, keys, values, torch.tensor([slot * 30 + place for slot, place in where]))
    for token, (slot, place) in enumerate(where):
        assert torch.equal(keys[slot, :, place], k[token]) and torch.equal(
            values[slot, :, place], v[token]
        )
    assert (keys != 0).sum() == k.numel()
