"""Dropout: the masks of the one hash, whatever the pack."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.bounds import gamma
from tests.models.common import sequences, tiny
from tests.roundings import assert_computed
from weft import randomness
from weft.models.network import dropout, lora
from weft.models.network.dropout import DropoutKeys, TokenDropout
from weft.models.network.linear import find_canonical_values
from weft.models.network.packed import pack
from weft.models.network.transformer import Transformer

LOGPROBS = frozenset({"logprobs"})


def test_threefry_is_the_hash_of_randomness() -> None:
    random = np.random.default_rng(0)
    keys, counters = (
        random.integers(0, 2**32, (50, 2), dtype=np.uint64).astype(np.uint32) for _ in range(2)
    )
    words = randomness.compute_threefry(keys, counters)
    k, c = (torch.from_numpy(a.view(np.int32)) for a in (keys, counters))
    x, y = dropout.threefry(k[:, 0], k[:, 1], c[:, 0], c[:, 1])
    assert np.array_equal(np.stack([x.numpy(), y.numpy()], -1).view(np.uint32), words)


def test_the_mask_of_an_entry_is_its_number() -> None:
    keys = DropoutKeys.from_sequences(3, 4, [("a", 0), ("b", 2)])
    tokens = TokenDropout.from_lengths(keys, torch.tensor([2, 3]), torch.tensor([0, 1, 0, 1, 2]))
    site, rate, width = dropout.compute_site(5, dropout.MLP_OUT), 0.4, 7
    dropped = tokens.drop(torch.ones(5, width), rate, site)
    words = randomness.derive_key(3, "dropout", 4, "b", 2)
    for position in range(3):
        for channel in range(width):
            counter = np.array([position, site << 20 | channel // 2], dtype=np.uint32)
            word = randomness.compute_threefry(np.array(words), counter)[channel % 2]
            kept = (int(word) >> 8) / 2**24 >= rate
            # 1 - rate and the division round once each
            assert dropped[2 + position, channel] == pytest.approx(
                1 / (1 - rate) if kept else 0.0, rel=gamma(2)
            )


def test_rates_and_independence() -> None:
    keys = DropoutKeys.from_sequences(0, 0, [("a", 0), ("a", 1)])
    tokens = TokenDropout.from_lengths(keys, torch.tensor([400, 400]), torch.arange(400).repeat(2))
    for rate in (0.1, 0.5):
        mask = (tokens.drop(torch.ones(800, 64), rate, 3) > 0).float()
        assert abs(mask.mean() - (1 - rate)) < 0.01
        correlation = torch.corrcoef(torch.stack([mask[:400].flatten(), mask[400:].flatten()]))[
            0, 1
        ]
        assert abs(correlation) < 0.02
    other = tokens.drop(torch.ones(800, 64), 0.5, 4) > 0
    assert (
        abs((other == (tokens.drop(torch.ones(800, 64), 0.5, 3) > 0)).float().mean() - 0.5) < 0.01
    )
    assert tokens.drop(torch.ones(800, 64), 0.0, 3).equal(torch.ones(800, 64))


def noisy(
    network: Transformer, rows: list[Tensor], ids: list[tuple[str, int]], step: int = 1
) -> Tensor:
    packed = replace(pack(rows), dropout=DropoutKeys.from_sequences(7, step, ids))
    return network(packed, LOGPROBS)["logprobs"]


@pytest.mark.default_cases("gemma2", "gpt2")
@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode", "opt", "mistral", "gemma2"])
def test_packing_changes_no_mask(name: str) -> None:
    network = tiny(name, dtype=torch.float64)
    network = Transformer.build_empty(network.config.with_dropout(0.3), dtype=torch.float64)
    network.load_state_dict(tiny(name, dtype=torch.float64).state_dict())
    rows, ids = sequences([9, 30, 17, 30]), [("a", 0), ("a", 1), ("b", 0), ("c", 0)]
    together = noisy(network, rows, ids)
    apart = torch.cat([noisy(network, [row], [id]) for row, id in zip(rows, ids, strict=True)])
    assert_computed(apart, lambda: noisy(network, rows, ids), torch.float64)
    reverse = torch.cat(noisy(network, rows[::-1], ids[::-1]).split([29, 16, 29, 8])[::-1])
    assert_computed(reverse, lambda: noisy(network, rows, ids), torch.float64)
    assert not torch.allclose(together, noisy(network, rows, ids, step=2))
    assert not torch.allclose(together, network(pack(rows), LOGPROBS)["logprobs"])
    network.recompute_every = 1
    gradient = torch.autograd.grad(noisy(network, rows, ids).sum(), list(network.parameters()))
    network.recompute_every = 0
    for one, other in zip(
        gradient, torch.autograd.grad(together.sum(), list(network.parameters())), strict=True
    ):
        assert torch.equal(one, other)


def test_without_keys_nothing_is_dropped() -> None:
    network = tiny("gpt2")
    assert network.config.hidden_dropout == 0.1
    network.train()
    packed = pack(sequences([9, 30]))
    assert torch.equal(network(packed, LOGPROBS)["logprobs"], network(packed, LOGPROBS)["logprobs"])


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_adapters_drop_their_input(name: str) -> None:
    network = tiny(name, dtype=torch.float64)
    lora.attach(network, r=2, dropout=0.5)
    with torch.no_grad():
        for n, value in find_canonical_values(network).items():
            if n.endswith(lora.B):
                value.fill_(0.1)
    rows, ids = sequences([9, 14]), [("a", 0), ("b", 0)]
    together = noisy(network, rows, ids)
    apart = torch.cat([noisy(network, [r], [i]) for r, i in zip(rows, ids, strict=True)])
    assert_computed(apart, lambda: noisy(network, rows, ids), torch.float64)
    assert not torch.allclose(together, network(pack(rows), LOGPROBS)["logprobs"])
    with lora.disable_adapters(network):
        assert torch.equal(noisy(network, rows, ids), network(pack(rows), LOGPROBS)["logprobs"])
