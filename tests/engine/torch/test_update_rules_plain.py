"""The rules are torch's own to the last bit, in its form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from weft.engine.torch import update_rules

RULES = [
    ("AdamW", {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.0, "fused": True}),
    ("AdamW", {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    ("SGD", {"lr": 0.1}),
]


def trained(kind: type[torch.optim.Optimizer], options: dict[str, object]) -> list[Tensor]:
    """Parameters after three steps and what the optimizer keeps of them."""
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.randn(5, 3, generator=generator)) for _ in range(2)]
    optimizer = kind(parameters, **options)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(5, 3, generator=generator)
        optimizer.step()
        assert torch.is_grad_enabled()
        optimizer.zero_grad(set_to_none=True)
        assert all(parameter.grad is None for parameter in parameters)
    kept = [
        value
        for parameter in parameters
        for value in optimizer.state[parameter].values()
        if value is not None
    ]
    return [*(parameter.detach() for parameter in parameters), *kept]


@pytest.mark.parametrize(("name", "options"), RULES)
def test_a_rule_is_torchs_own(name: str, options: dict[str, object]) -> None:
    ours, theirs = (
        trained(getattr(update_rules, name), options),
        trained(getattr(torch.optim, name), options),
    )
    assert len(ours) == len(theirs) and all(
        torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_rule_is_an_optimizer_of_torch(name: str) -> None:
    rule = getattr(update_rules, name)([nn.Parameter(torch.zeros(2))], lr=0.1)
    assert isinstance(rule, getattr(torch.optim, name)) and rule.param_groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match="more than one parameter group"):
        rule.add_param_group({"params": rule.param_groups[0]["params"]})
