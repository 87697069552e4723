"""States of some rows alone: the last block computes no others, and every row is what it is among
all.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.models.common import sequences, tiny
from weft.models.network.dropout import DropoutKeys
from weft.models.network.moe import MoEAuxLoss
from weft.models.network.packed import Packed, pack
from weft.models.network.transformer import Transformer
from weft.registry import families

ROWS = torch.tensor([25, 3, 4, 11, 3, 17, 26])  # in any order; one of them twice


def packed() -> Packed:
    return pack(sequences([9, 3, 14, 1]))


def gradients(network: Transformer, states: Tensor) -> list[Tensor]:
    weights = torch.randn(
        states.shape, generator=torch.Generator().manual_seed(0), dtype=states.dtype
    )
    return list(
        torch.autograd.grad((states * weights).sum(), list(network.parameters()), allow_unused=True)
    )


@pytest.mark.parametrize("name", families.list_names())
def test_rows_are_what_they_are_among_all(name: str) -> None:
    with torch.no_grad():
        network = tiny(name)
        assert torch.equal(
            network.compute_hidden(packed(), ROWS), network.compute_hidden(packed())[ROWS]
        )
    wide = tiny(name, dtype=torch.float64)
    alone, among = wide.compute_hidden(packed(), ROWS), wide.compute_hidden(packed())[ROWS]
    for one, other in zip(gradients(wide, alone), gradients(wide, among), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", families.list_names())
def test_no_rows_at_all(name: str) -> None:
    network = tiny(name)
    assert network.compute_hidden(packed(), ROWS[:0]).shape == (0, network.config.hidden_size)


def test_the_last_block_feeds_no_others() -> None:
    network, fed = tiny(), []
    for block in network.blocks:
        block.mlp.register_forward_pre_hook(lambda _, given: fed.append(len(given[0])))
    network.compute_hidden(packed(), ROWS)
    assert fed == [27] * (network.config.num_layers - 1) + [len(ROWS)]


@pytest.mark.parametrize("every", [1, 2])
def test_with_recomputation(every: int) -> None:
    network = tiny(dtype=torch.float64)
    expected = gradients(network, network.compute_hidden(packed(), ROWS))
    network.recompute_every = every
    for one, other in zip(
        gradients(network, network.compute_hidden(packed(), ROWS)), expected, strict=True
    ):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_with_dropout() -> None:
    rates = {"resid_pdrop": 0.3, "attn_pdrop": 0.2, "embd_pdrop": 0.1}
    network = tiny("gpt2", dtype=torch.float64, **rates)
    noisy = replace(packed(), dropout=DropoutKeys.from_sequences(0, 1, [(id, 0) for id in "abcd"]))
    assert_close(
        network.compute_hidden(noisy, ROWS),
        network.compute_hidden(noisy)[ROWS],
        rtol=1e-12,
        atol=1e-12,
    )
    assert not torch.equal(
        network.compute_hidden(noisy, ROWS), network.compute_hidden(packed(), ROWS)
    )


def test_experts_are_balanced_over_all_tokens() -> None:
    network = tiny("mixtral")
    whole, some = (
        replace(packed(), aux_loss=MoEAuxLoss(torch.tensor([9, 3, 14, 1]))) for _ in range(2)
    )
    assert torch.equal(network.compute_hidden(some, ROWS), network.compute_hidden(whole)[ROWS])
    assert some.aux_loss is not None and whole.aux_loss is not None
    assert torch.equal(some.aux_loss.compute_by_sequence(), whole.aux_loss.compute_by_sequence())
