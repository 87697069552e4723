"""Losses that other ranks wait for."""

from __future__ import annotations

import torch

from weft.parallel.collectives import connect_outputs


def test_a_loss_that_no_output_counts_in_has_gradients_of_zero() -> None:
    x = torch.tensor([1.0, float("-inf"), 2.0], requires_grad=True)
    loss = connect_outputs(torch.tensor(3.0), [x, 2 * x])
    loss.backward()
    assert loss.item() == 3.0 and x.grad is not None and x.grad.tolist() == [0.0, 0.0, 0.0]
