"""What a network keeps for its backward pass."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.common import sequences, tiny
from weft.models.network.block import Attention, BlockContext
from weft.models.network.packed import pack


def kept_bytes(network: Any, x: Any) -> int:
    """Bytes of the distinct memory, parameters aside, that the forward pass keeps for the backward
    pass.
    """
    seen: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        alive = network.compute_hidden(x)
    assert alive.requires_grad
    own = {p.untyped_storage().data_ptr() for p in network.parameters()}
    return sum(size for place, size in seen.items() if place not in own)


def gradients(network: Any, x: Any) -> list[Tensor]:
    network.zero_grad()
    network.compute_hidden(x).square().sum().backward()
    return [p.grad.clone() for p in network.parameters() if p.grad is not None]


def test_recomputed_layers_keep_less_and_change_no_bit() -> None:
    network, x = tiny(num_hidden_layers=4), pack(sequences([33, 17, 5]))
    kept, found = [], []
    for every in (0, 3, 2, 1):
        network.recompute_every = every
        kept.append(kept_bytes(network, x))
        found.append(gradients(network, x))
    assert kept == sorted(kept, reverse=True) and kept[-1] < 0.25 * kept[0]
    one_layer = kept[0] - kept[1]
    assert [kept[0] - kept[n] for n in (2, 3)] == pytest.approx(
        [2 * one_layer, 4 * one_layer], rel=0.01
    )
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_block_keeps_what_its_products_need() -> None:
    """Per token and layer: the stream twice, both norms' results, q, k, v, attention's result
    (twice where it was copied into order); gate and up.
    """
    lengths = [32, 32]
    x, config = pack(sequences(lengths)), tiny().config
    per_layer = kept_bytes(tiny(num_hidden_layers=3), x) - kept_bytes(tiny(num_hidden_layers=2), x)
    heads, shared = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    wanted = 4 * config.hidden_size + 2 * heads + 2 * shared + 2 * config.intermediate_size
    small = 2 + config.num_heads  # a number a token of each norm and each head's softmax
    assert 4 * sum(lengths) * wanted < per_layer <= 4 * sum(lengths) * (wanted + heads + small)


def test_queries_keys_and_values_are_freed_before_the_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pass without gradients, which keeps nothing for a backward pass."""
    attend = Attention.attend
    attended: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def watch(self: Attention, heads: Tensor, context: BlockContext) -> Tensor:
        attended.append(weakref.ref(heads))
        return attend(self, heads, context)

    monkeypatch.setattr(Attention, "attend", watch)
    network: Any = tiny()
    for block in network.blocks:
        block.mlp.register_forward_pre_hook(lambda *_: alive.append(attended[-1]() is not None))
    with torch.no_grad():
        network.compute_hidden(pack(sequences([9, 4])))
    assert alive == [False] * network.config.num_layers
