"""Products of 8-bit floats: refused where they cannot be, and by emulation near the wide ones,
where torchao is installed.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.bounds import assert_within, kernel_product_bound
from tests.models.common import sequences, tiny
from weft import kernels
from weft.engine.spec import FP8_RECIPES
from weft.kernels.products import FP8_SIZE_MULTIPLE
from weft.models.network.linear import Linear
from weft.models.network.packed import pack
from weft.models.network.transformer import compile_blocks

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
# The relative error of a number that is rounded to so many binary digits after the first, in the mean
# of squares: evenly distributed over the last digit, and so at most this, of the least number with
# its exponent. It is 1.5 times as much as of numbers that are evenly distributed themselves, which
# leaves room for chance.
E4M3, E5M2 = (2.0 ** -(digits + 1) / 3**0.5 for digits in (3, 2))


def off(made: Tensor, right: Tensor) -> float:
    made, right = made.detach().double(), right.detach().double()
    return float((made - right).norm() / right.norm())


def emulated(recipe: str = "tensorwise") -> kernels.Fp8Product:
    pytest.importorskip("torchao.float8")
    return kernels.Fp8Product(recipe, emulate=True)


def test_which_devices_and_matrices_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cpu has no fp8 matrix products" in str(kernels.fp8_obstacle(torch.device("cpu")))
    for capability, has in (((8, 9), False), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, found=capability: found
        )
        assert (kernels.fp8_obstacle(torch.device("cuda", 0)) is None) == has
    assert kernels.Fp8Product.supports(torch.empty(FP8_SIZE_MULTIPLE, 3 * FP8_SIZE_MULTIPLE))
    assert not kernels.Fp8Product.supports(torch.empty(FP8_SIZE_MULTIPLE, FP8_SIZE_MULTIPLE + 8))


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_product_and_its_gradients_are_near_the_wide_ones(recipe: str) -> None:
    product, generator = emulated(recipe), torch.Generator().manual_seed(3)
    x = torch.randn(37, 64, generator=generator).requires_grad_()
    weight = torch.randn(32, 64, generator=generator).mul_(0.1).requires_grad_()
    by = torch.randn(37, 32, generator=generator)
    made = product(x, weight)
    by_x, by_weight = torch.autograd.grad(made, (x, weight), by)
    assert made.dtype == by_weight.dtype == torch.float32
    # Errors of terms of either sign add up as the terms do: by squares. Those of both factors too.
    forward = math.hypot(E4M3, E4M3)
    backward = math.hypot(E5M2 if recipe == "tensorwise" else E4M3, E4M3)
    assert 1e-3 < off(made, x @ weight.T) < forward and 1e-3 < off(by_x, by @ weight) < backward
    if recipe == "rowwise_with_gw_hp":
        exact = by.T.double() @ x.detach().double()
        assert_within(by_weight, exact, kernel_product_bound(by.T, x))
    else:
        assert 1e-3 < off(by_weight, by.T @ x) < backward


@pytest.mark.slow
def test_compiled_blocks_multiply_by_them_and_others_do_not() -> None:
    fp8 = emulated()
    plain, narrow = (tiny(**SIZES) for _ in range(2))
    compile_blocks(narrow, "aot_eager", fp8)
    assert all(layer.narrow is fp8 for layer in narrow.modules() if isinstance(layer, Linear))
    found, packed = [], pack(sequences([40, 23]))
    with torch.no_grad():
        spread = float(plain.next_token_logits(plain.compute_hidden(packed)).std())
    for network in (plain, narrow):
        loss = -network(packed, frozenset({"logprobs"}))["logprobs"].mean()
        loss.backward()
        found.append(
            (
                loss.item(),
                torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]),
            )
        )
    (loss, gradient), (near, roughly) = found
    # Four products a block on the way there and as many on the way back are each this wrong, with
    # signs of their own, and norms keep what is added from growing. A logit is wrong by that share of
    # the logits' spread; the sum of exponentials averages over all of them and is less so. Of the
    # mean over 61 tokens six deviations are allowed.
    products = 4 * SIZES["num_hidden_layers"]
    states = products * (E4M3**2 + E4M3**2)
    deviation = states**0.5 * spread / len(packed.rows) ** 0.5
    assert loss != near and abs(near - loss) < 6 * deviation
    # A gradient also has the error of its own product. An error at right angles to it, and of this
    # share of its length, turns it by so much.
    apart = states + (products + 1) * (E5M2**2 + E4M3**2)
    cosine = torch.nn.functional.cosine_similarity(gradient, roughly, dim=0)
    assert cosine > (1 + apart) ** -0.5
