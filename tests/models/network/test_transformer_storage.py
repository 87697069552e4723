"""No pass moves a parameter, changes what it carries, or leaves anything behind in a module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.common import adapted, sequences, tiny
from weft.engine.generation.passes import DecoderPasses
from weft.models.kv.slots import KVCache
from weft.models.network.dropout import DropoutKeys
from weft.models.network.packed import pack
from weft.models.network.transformer import Transformer

WANT = frozenset({"logprobs"})


def recomputed(name: str) -> Transformer:
    network = tiny(name)
    network.recompute_every = 1
    return network


def in_float64(name: str) -> Transformer:
    """Which torch computes."""
    return tiny(name, dtype=torch.float64)


def dropping(name: str) -> Transformer:
    return adapted(name, dropout=0.5)


def state(network: Transformer) -> dict[str, Any]:
    """Where every parameter lies and what it carries, gradients aside, and what every module holds."""
    found: dict[str, Any] = {}
    for name, p in network.named_parameters():
        place = p.untyped_storage().data_ptr(), p.data_ptr(), p.shape, p.stride()
        found[name] = (
            id(p),
            *place,
            p._version,
            p.requires_grad,
            {key: id(value) for key, value in vars(p).items()},
        )
    for name, module in network.named_modules():
        held = {key: id(value) for key, value in vars(module).items()}
        inside = {
            key: [*map(id, value.values())]
            for key, value in vars(module).items()
            if isinstance(value, dict)
        }
        found[f"module {name}"] = held, inside
    return found


def train(network: Transformer) -> None:
    keys = DropoutKeys.from_sequences(0, 1, [("a", 0), ("b", 0)])
    for _ in range(2):
        x = replace(pack(sequences([9, 30])), dropout=keys)
        network(x, WANT)["logprobs"].sum().backward()


@torch.no_grad()
def generate(network: Transformer) -> None:
    dtype = next(network.parameters()).dtype
    passes, first, second = DecoderPasses(network), sequences([9, 4]), torch.tensor([3, 5])
    by: list[Callable[..., Tensor]] = [network.compute_hidden, passes.compute_hidden]
    for hidden in by:
        cache = KVCache(network.config, "cpu", dtype)
        slots = cache.allocate(2)
        hidden(cache.extend(slots, first))
        network.next_token_logits(hidden(cache.extend(slots, second)))


@pytest.mark.parametrize("run", [train, generate])
@pytest.mark.parametrize("make", [tiny, recomputed, adapted, dropping, in_float64])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral"])
def test_a_pass_leaves_everything_where_it_was(
    name: str, make: Callable[[str], Transformer], run: Callable[[Transformer], None]
) -> None:
    network = make(name)
    before = state(network)
    run(network)
    after = state(network)
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert after[key] == value, key
