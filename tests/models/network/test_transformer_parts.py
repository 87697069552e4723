"""Ranges of blocks, chained, are the whole network: the same bits, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.common import sequences, tiny
from weft.algorithms.base import Output
from weft.models.kv.slots import KVCache
from weft.models.network.dropout import DropoutKeys
from weft.models.network.linear import find_canonical_parameters, find_canonical_values
from weft.models.network.packed import Packed, pack
from weft.models.network.transformer import Transformer

CUTS = [[1], [2], [1, 2]]  # where one part ends and the next begins
NAMES = ["llama", "gpt2", "gemma2", "mixtral"]
WANT: frozenset[Output] = frozenset({"logprobs", "entropy"})


def ranges(whole: Transformer, cuts: list[int]) -> list[range]:
    return [range(*ends) for ends in pairwise([0, *cuts, whole.config.num_layers])]


def parts_of(whole: Transformer, cuts: list[int]) -> list[Transformer]:
    made = []
    for layers in ranges(whole, cuts):
        part = Transformer.build_empty(whole.config, whole.kind, whole.pooling, layers=layers)
        part.recompute_every = whole.recompute_every
        for name, value in find_canonical_values(part).items():
            value.copy_(find_canonical_values(whole)[name])
        made.append(part)
    return made


def chained(parts: list[Transformer], x: Packed, want: frozenset[Output]) -> dict[Output, Tensor]:
    states: Any = None
    for part in parts:
        states = part(x, want, states=states)
    assert isinstance(states, dict)
    return states


def gradients(networks: list[Transformer]) -> dict[str, Tensor]:
    """By canonical name; a matrix that two parts hold has the sum."""
    found: dict[str, Tensor] = {}
    for network in networks:
        for name, at in find_canonical_parameters(network).items():
            if at.grad is not None:
                found[name] = found[name] + at.grad if name in found else at.grad
    return found


def check(whole: Transformer, cuts: list[int], x: Packed, want: frozenset[Output]) -> None:
    parts = parts_of(whole, cuts)
    assert [len(part.blocks) for part in parts] == [*map(len, ranges(whole, cuts))]
    ours, theirs = chained(parts, x, want), whole(x, want)
    assert isinstance(theirs, dict) and ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    for out in (ours, theirs):
        torch.stack(
            [(value * torch.cos(torch.arange(len(value)))).sum() for value in out.values()]
        ).sum().backward()
    one, other = gradients(parts), gradients([whole])
    assert one.keys() == other.keys() == find_canonical_parameters(whole).keys()
    for key, grad in other.items():
        assert torch.equal(one[key], grad), key


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_log_probs_and_gradients(name: str, cuts: list[int]) -> None:
    check(tiny(name), cuts, pack(sequences([9, 30, 1, 17])), WANT)


@pytest.mark.parametrize("name", NAMES)
def test_with_recomputation_and_dropout(name: str) -> None:
    """Blocks are counted in the whole network: what is dropped depends on their numbers."""
    network = tiny(name)
    wide = Transformer.build_empty(network.config.with_dropout(0.3))
    wide.load_state_dict(network.state_dict())
    wide.recompute_every = 2
    keys = DropoutKeys.from_sequences(0, 1, [(id, 0) for id in "abc"])
    check(wide, [1], replace(pack(sequences([9, 30, 17])), dropout=keys), WANT)


def test_the_same_blocks_are_computed_again() -> None:
    whole = tiny(num_hidden_layers=4)
    whole.recompute_every = 2

    def passes(networks: list[Transformer]) -> list[int]:
        """How often each block computes in a training step."""
        blocks = [block for network in networks for block in network.blocks]
        counts, places = [0] * len(blocks), {id(block): place for place, block in enumerate(blocks)}

        def count(block: Any, _: Any) -> None:
            counts[places[id(block)]] += 1

        for block in blocks:
            block.register_forward_pre_hook(count)
        chained(networks, pack(sequences([9])), WANT)["logprobs"].sum().backward()
        return counts

    assert passes(parts_of(whole, [1])) == passes([whole]) == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("head", "pooling"), [("value", "last"), ("score", "last"), ("score", "mean")]
)
def test_other_heads(head: Any, pooling: Any) -> None:
    network = tiny("llama", head)
    network.pooling = pooling
    check(
        network,
        [2],
        pack(sequences([9, 30])),
        frozenset({"values" if head == "value" else "scores"}),
    )


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_over_caches_of_their_own(name: str) -> None:
    whole, cuts = tiny(name), [1]
    parts, config = parts_of(whole, cuts), whole.config
    cache = KVCache(config, "cpu", torch.float32)
    caches = [
        KVCache(replace(config, num_layers=len(layers)), "cpu", torch.float32, layers=layers)
        for layers in ranges(whole, cuts)
    ]
    slots = cache.allocate(2)
    for part in caches:
        part.allocate(2)
    for tokens in (sequences([9, 14]), torch.tensor([3, 5]), torch.tensor([8, 1])):
        expected, states = whole.compute_hidden(cache.extend(slots, tokens)), None
        for network, own in zip(parts, caches, strict=True):
            states = network.compute_hidden(own.extend(slots, tokens), states=states)
        assert states is not None and torch.equal(states, expected)


def test_states_are_given_where_there_is_no_embedding() -> None:
    first, second = parts_of(tiny(), [1])
    x = pack(sequences([9]))
    with pytest.raises(AssertionError, match="all stages except the first, and only these"):
        second(x, WANT)
    with pytest.raises(AssertionError, match="all stages except the first, and only these"):
        first(x, WANT, states=torch.zeros(9, first.config.hidden_size))
    names = (
        {name.split(".")[0] for name in find_canonical_parameters(first)},
        {name.split(".")[0] for name in find_canonical_parameters(second)},
    )
    assert names == ({"embed", "blocks"}, {"blocks", "norm", "head"})
