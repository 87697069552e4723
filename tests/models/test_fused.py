"""Fused parts of a block equal the written-out formulas, forward and backward, and keep less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.common import sequences, tiny
from weft.models import rope
from weft.models.activations import activate
from weft.models.config import Activation, Rope
from weft.models.fused import activated, activated_linear, rms_norm
from weft.models.packed import pack

ACTIVATIONS: list[Activation] = ["silu", "gelu", "gelu_tanh", "relu"]


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()


def plain_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (offset + weight)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(5, 8), (4, 3, 8)])
def test_rms_norm_is_its_formula_and_its_gradient(offset: float, shape: tuple[int, ...]) -> None:
    x, weight = rows(*shape), rows(8, seed=1)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, offset=offset), plain_norm(x, weight, 1e-5, offset))
    assert torch.autograd.gradcheck(lambda *t: rms_norm(*t, 1e-5, offset=offset), (x, weight))


def test_rms_norm_in_bfloat16_has_float32_statistics() -> None:
    x = (rows(3, 64).detach() * 50).bfloat16().requires_grad_()
    weight = rows(64, seed=1).detach().bfloat16().requires_grad_()
    for offset in (0.0, 1.0):
        wide, scale = x.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
        wanted, found = plain_norm(wide, scale, 1e-5, offset), rms_norm(x, weight, 1e-5, offset=offset)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, wanted.bfloat16(), rtol=1.6e-2, atol=1e-5)
        grads = torch.autograd.grad(found.sum(), (x, weight))
        for grad, want in zip(grads, torch.autograd.grad(wanted.sum(), (wide, scale)), strict=True):
            torch.testing.assert_close(grad, want.bfloat16(), rtol=1.6e-2, atol=1e-3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_activated_linear_is_its_formula_and_its_gradient(activation: Activation, gated: bool, bias: bool) -> None:
    down = nn.Linear(6, 4, bias=bias, dtype=torch.float64)
    joined = rows(5, 12 if gated else 6)
    inner = activate(joined[:, :6], activation) * (joined[:, 6:] if gated else 1.0)
    torch.testing.assert_close(activated(joined, gated, activation), inner)
    torch.testing.assert_close(activated_linear(joined, gated, down, activation), down(inner))
    assert torch.autograd.gradcheck(lambda x: activated(x, gated, activation), (joined,))
    inputs = (joined, *down.parameters())
    assert torch.autograd.gradcheck(lambda *_: activated_linear(joined, gated, down, activation), inputs)


@pytest.mark.parametrize("dim", [8, 4])
def test_a_rotation_is_its_formula_and_its_gradient(dim: int) -> None:
    cos, sin = rope.rotation(Rope(dim=dim, theta=100.0), torch.arange(5), torch.full((5,), 5), torch.float64)
    x = rows(5, 3, 8)
    first, second = x[..., : dim // 2], x[..., dim // 2 : dim]
    wanted = torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., dim:]], dim=-1)
    torch.testing.assert_close(rope.rotate(x, cos, sin), wanted)
    assert torch.autograd.gradcheck(lambda x: rope.rotate(x, cos, sin), (x,))


def kept_bytes(network: Any, x: Any) -> int:
    """Bytes of the distinct memory, parameters aside, that the forward pass keeps for the backward pass."""
    seen: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        alive = network.hidden(x)
    assert alive.requires_grad
    own = {p.untyped_storage().data_ptr() for p in network.parameters()}
    return sum(size for place, size in seen.items() if place not in own)


def gradients(network: Any, x: Any) -> list[Tensor]:
    network.zero_grad()
    network.hidden(x).square().sum().backward()
    return [p.grad.clone() for p in network.parameters() if p.grad is not None]


def test_recomputed_layers_keep_less_and_change_no_bit() -> None:
    network, x = tiny(num_hidden_layers=4), pack(sequences([33, 17, 5]))
    kept, found = [], []
    for every in (0, 3, 2, 1):
        network.checkpointing = every
        kept.append(kept_bytes(network, x))
        found.append(gradients(network, x))
    assert kept == sorted(kept, reverse=True) and kept[-1] < 0.25 * kept[0]
    one_layer = kept[0] - kept[1]
    assert [kept[0] - kept[n] for n in (2, 3)] == pytest.approx([2 * one_layer, 4 * one_layer], rel=0.01)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_block_keeps_what_its_products_need() -> None:
    """Per token and layer: the stream twice, both norms' results, q, k, v, attention's result (twice where it was copied into
    order); gate and up."""
    lengths = [32, 32]
    x, config = pack(sequences(lengths)), tiny().config
    per_layer = kept_bytes(tiny(num_hidden_layers=3), x) - kept_bytes(tiny(num_hidden_layers=2), x)
    heads, shared = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    wanted = 4 * config.hidden_size + 2 * heads + 2 * shared + 2 * config.intermediate_size
    small = 2 + config.num_heads  # a number a token of each norm and each head's softmax
    assert 4 * sum(lengths) * wanted < per_layer <= 4 * sum(lengths) * (wanted + heads + small)
