"""Products of 8-bit floats: refused where they cannot be, and by emulation near the wide ones,
where torchao is installed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.models.common import sequences, tiny
from weft import kernels
from weft.kernels.fp8 import MULTIPLE, RECIPES
from weft.models.network.linear import Linear
from weft.models.network.packed import pack
from weft.models.network.training import compile_blocks

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
}


def off(made: Tensor, right: Tensor) -> float:
    made, right = made.detach().double(), right.detach().double()
    return float((made - right).norm() / right.norm())


def emulated(recipe: str = "tensorwise") -> kernels.Fp8Product:
    pytest.importorskip("torchao.float8")
    return kernels.Fp8Product(recipe, emulate=True)


def test_which_devices_and_matrices_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cpu has no such products" in str(kernels.fp8_obstacle(torch.device("cpu")))
    for capability, has in (((8, 9), False), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, found=capability: found
        )
        assert (kernels.fp8_obstacle(torch.device("cuda", 0)) is None) == has
    assert kernels.Fp8Product.supports(torch.empty(MULTIPLE, 3 * MULTIPLE))
    assert not kernels.Fp8Product.supports(torch.empty(MULTIPLE, MULTIPLE + 8))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product_and_its_gradients_are_near_the_wide_ones(recipe: str) -> None:
    product, generator = emulated(recipe), torch.Generator().manual_seed(3)
    x = torch.randn(37, 64, generator=generator).requires_grad_()
    weight = torch.randn(32, 64, generator=generator).mul_(0.1).requires_grad_()
    by = torch.randn(37, 32, generator=generator)
    made = product(x, weight)
    by_x, by_weight = torch.autograd.grad(made, (x, weight), by)
    assert made.dtype == by_weight.dtype == torch.float32
    assert 1e-3 < off(made, x @ weight.T) < 0.06 and 1e-3 < off(by_x, by @ weight) < 0.1
    assert off(by_weight, by.T @ x) < (1e-6 if recipe == "rowwise_with_gw_hp" else 0.1)


def test_compiled_blocks_multiply_by_them_and_others_do_not() -> None:
    fp8 = emulated()
    plain, narrow = (tiny(**SIZES) for _ in range(2))
    compile_blocks(narrow, "aot_eager", fp8)
    assert all(layer.narrow is fp8 for layer in narrow.modules() if isinstance(layer, Linear))
    found = []
    for network in (plain, narrow):
        loss = -network(pack(sequences([40, 23])), frozenset({"logprobs"}))["logprobs"].mean()
        loss.backward()
        found.append(
            (
                loss.item(),
                torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]),
            )
        )
    (loss, gradient), (near, roughly) = found
    assert loss != near and near == pytest.approx(loss, rel=0.02)
    assert torch.nn.functional.cosine_similarity(gradient, roughly, dim=0) > 0.98
