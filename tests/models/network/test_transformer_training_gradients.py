"""Gradients that go to float32 masters by themselves are those that autograd would hand over."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.bounds import gamma
from tests.models.common import adapted, sequences, tiny
from weft.models.network import transformer
from weft.models.network.packed import pack

WANT = frozenset({"logprobs"})
# The gradients that autograd hands over are rounded to bfloat16, every number of them; those that go
# to the masters are not. Sums of nineteen products in float32 add less than a hundredth of that.
ROUNDED = 1.01 * gamma(1, torch.bfloat16)


@pytest.mark.parametrize("tied", [False, True])
def test_they_add_up_over_passes(tied: bool) -> None:
    plain, summed = (tiny("llama", tie_word_embeddings=tied).bfloat16() for _ in range(2))
    masters = {name: nn.Parameter(p.detach().float()) for name, p in summed.named_parameters()}
    transformer.add_gradients_to(summed, masters)
    total: dict[str, torch.Tensor] = {}
    size: dict[str, float] = {}
    for seed in range(3):
        packed = pack(sequences([9, 4, 6], seed=seed))
        for network in (plain, summed):
            network(packed, WANT)["logprobs"].sum().backward()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            total[name] = total.get(name, 0.0) + parameter.grad.float()
            size[name] = size.get(name, 0.0) + float(parameter.grad.float().norm())
            parameter.grad = None
    by_products = {
        name
        for name, p in summed.named_parameters()
        if name.endswith("weight") and "norm" not in name
    }
    for name, parameter in summed.named_parameters():
        own = masters[name].grad
        if (
            name not in by_products
            or (tied and name == "embed.weight")
            or (not tied and name == "embed.weight")
        ):
            continue
        assert own is not None and own.dtype == torch.float32 and parameter.grad is None, name
        assert float((own - total[name]).norm()) <= ROUNDED * size[name], name
    # The look-up's gradient comes from autograd, and that of a tied output layer from its products.
    look_up = dict(summed.named_parameters())["embed.weight"].grad
    assert look_up is not None
    if tied:
        assert masters["embed.weight"].grad is not None
        whole = masters["embed.weight"].grad + look_up.float()
        # here the look-up's gradient, too, and its sum with the other
        lost = float((whole - total["embed.weight"]).norm())
        assert lost <= 2 * ROUNDED * (size["embed.weight"] + float(look_up.float().norm()))
    assert_close(look_up.isfinite().all(), torch.tensor(True))


def test_those_of_adapters_are_summed_in_float32_too() -> None:
    plain, summed = (adapted().bfloat16() for _ in range(2))
    masters = {
        name: nn.Parameter(p.detach().float())
        for name, p in summed.named_parameters()
        if p.requires_grad
    }
    transformer.add_gradients_to(summed, masters)
    total: dict[str, torch.Tensor] = {}
    size: dict[str, float] = {}
    for seed in range(3):
        packed = pack(sequences([9, 4, 6], seed=seed))
        for network in (plain, summed):
            network(packed, WANT)["logprobs"].sum().backward()
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                total[name] = total.get(name, 0.0) + parameter.grad.float()
                size[name] = size.get(name, 0.0) + float(parameter.grad.float().norm())
                parameter.grad = None
    assert total.keys() == masters.keys() and any(name.endswith("lora_a") for name in total)
    own = dict(summed.named_parameters())
    for name, master in masters.items():
        assert (
            master.grad is not None
            and master.grad.dtype == torch.float32
            and own[name].grad is None
        ), name
        assert float((master.grad - total[name]).norm()) <= ROUNDED * size[name], name
