"""What a block does between its products, against torch in float64, at sizes that fill no vector."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from weft.kernels.activations import activate
from weft.kernels.cpu import rows


@pytest.mark.parametrize("shape", [(5, 3), (2, 7, 37), (3, 256), (150, 40)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(shape: tuple[int, ...], offset: float) -> None:
    torch.manual_seed(shape[-1])
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    made, inverse = rows.rms_norm(x, weight, 1e-5, offset)
    wide, scale = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert_close(inverse.double(), expected, atol=0, rtol=1e-6)
    normed = wide * expected * (scale + offset)
    assert_close(made.double(), normed, atol=1e-6, rtol=1e-6)
    grad_y = torch.randn(shape)
    wanted = torch.autograd.grad(normed, (wide, scale), grad_y.double())
    for want_x, want_weight in [(True, True), (True, False), (False, True)]:
        found = rows.compute_rms_norm_gradients(
            x, weight, inverse, grad_y, offset, want_x=want_x, want_weight=want_weight
        )
        for one, other, there in zip(found, wanted, (want_x, want_weight), strict=True):
            assert (one is not None) == there
            if one is not None:
                assert_close(one.double(), other, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("half", [2, 5, 16])
def test_rotations_go_there_and_back(half: int) -> None:
    whole = torch.randn(6, 5, 33)
    x, angles = whole[:, 1:4], torch.randn(6, 1, half)
    rotated = rows.rotate(x, angles.cos(), angles.sin(), 1.0)
    as_complex = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(
        torch.ones_like(angles), angles
    )
    assert_close(
        rotated[..., : 2 * half],
        torch.cat([as_complex.real, as_complex.imag], -1),
        atol=1e-6,
        rtol=1e-6,
    )
    assert torch.equal(rotated[..., 2 * half :], x[..., 2 * half :])
    assert_close(rows.rotate(rotated, angles.cos(), angles.sin(), -1.0), x, atol=1e-6, rtol=1e-6)
    part = rows.rotate(x, angles.cos(), angles.sin(), 1.0, rotated=2)
    assert torch.equal(part[:, :2], rotated[:, :2]) and torch.equal(part[:, 2], x[:, 2])
    rows.rotate_back(part, angles.cos(), angles.sin(), 2)
    assert_close(part, x, atol=1e-6, rtol=1e-6)
    assert torch.equal(part[:, 2], x[:, 2])


@pytest.mark.parametrize("gated", [True, False])
def test_silu(gated: bool) -> None:
    gate_up = torch.cat([torch.linspace(-120, 120, 2 * 37).view(2, 37), torch.randn(2, 37)], dim=1)
    gate_up[0, :2] = torch.tensor([-1e20, torch.nan])
    wide = gate_up.double().requires_grad_()
    gate, up = wide.chunk(2, dim=1) if gated else (wide, 1.0)
    expected = activate(gate, "silu") * up
    made = rows.compute_silu(gate_up, gated)
    assert_close(made.double(), expected, atol=1e-30, rtol=1e-6, equal_nan=True)
    grad_out = torch.randn(made.shape)
    (wanted,) = torch.autograd.grad(expected, wide, grad_out.double())
    for again in (True, False):
        grad_gate_up, value = rows.compute_silu_gradients(gate_up, gated, grad_out, again=again)
        assert_close(grad_gate_up.double(), wanted, atol=1e-6, rtol=1e-5, equal_nan=True)
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
