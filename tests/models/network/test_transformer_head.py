"""Values and scores are float32, not rounded on the way."""

from __future__ import annotations

import torch

from tests.bounds import assert_within, product_bound
from tests.models.common import sequences, tiny
from weft.models.network.packed import pack
from weft.models.network.transformer import ValueHead, compute_row_values


def test_two_thousand_rewards_have_as_many_values() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(2000, 64).bfloat16(), torch.randn(1, 64).bfloat16()
    values = compute_row_values(hidden, weight)
    assert values.dtype == torch.float32 and len(values.unique()) > 1990
    assert_within(
        values, hidden.double() @ weight[0].double(), product_bound(hidden, weight.T)[:, 0]
    )


def test_gradients_reach_states_and_weight_in_their_dtype() -> None:
    head = ValueHead(8).bfloat16()
    torch.nn.init.ones_(head.weight)
    states = torch.randn(5, 8).bfloat16().requires_grad_()
    head(states).sum().backward()
    assert (
        states.grad is not None
        and states.grad.dtype == torch.bfloat16
        and bool((states.grad == 1).all())
    )
    assert head.weight.grad is not None and head.weight.grad.dtype == torch.bfloat16


def test_no_output_of_a_network_is_a_view() -> None:
    """FSDP2 warns of wrong gradients where one is."""
    for kind, wanted in (("value", "values"), ("score", "scores"), ("lm", "logprobs")):
        made = tiny("llama", kind)(pack(sequences([5, 3])), frozenset({wanted}))
        assert made[wanted].requires_grad and made[wanted]._base is None, kind


def test_mean_pooling_of_sequences_of_unequal_length() -> None:
    """Open-Assistant's multiplied [B, T, H] by a mask [B, T], an error of shapes (defect 5): here
    the mean of each sequence's states, times the head, by hand.
    """
    rows = sequences([5, 1, 9])
    network = tiny("llama", "score", dtype=torch.float64)
    network.pooling = "mean"
    with torch.no_grad():
        scores = network(pack(rows), frozenset({"scores"}))["scores"]
        wanted = [
            network.compute_hidden(pack([row])).mean(0) @ network.score.weight[0] for row in rows
        ]
    torch.testing.assert_close(scores.double(), torch.stack(wanted), rtol=1e-10, atol=1e-12)
