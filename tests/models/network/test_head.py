"""Values and scores are float32, not rounded on the way."""

from __future__ import annotations

import torch

from weft.models.network.head import ValueHead, row_values


def test_two_thousand_rewards_have_as_many_values() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(2000, 64).bfloat16(), torch.randn(1, 64).bfloat16()
    values = row_values(hidden, weight)
    assert values.dtype == torch.float32 and len(values.unique()) > 1990
    torch.testing.assert_close(values, (hidden.double() @ weight[0].double()).float(), rtol=1e-5, atol=1e-5)


def test_gradients_reach_states_and_weight_in_their_dtype() -> None:
    head = ValueHead(8).bfloat16()
    torch.nn.init.ones_(head.weight)
    states = torch.randn(5, 8).bfloat16().requires_grad_()
    head(states).sum().backward()
    assert states.grad is not None and states.grad.dtype == torch.bfloat16 and bool((states.grad == 1).all())
    assert head.weight.grad is not None and head.weight.grad.dtype == torch.bfloat16
