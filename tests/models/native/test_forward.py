"""A pass over cached sequences in one call is the one that goes block by block, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.models.common import last_states, sequences, tiny
from weft.engine.spec import LoRASpec
from weft.models import lora
from weft.models.kv_cache import KVCache
from weft.models.native import forward
from weft.models.transformer import Transformer


def steps(network: Transformer, shared: bool) -> tuple[torch.Tensor, ...]:
    """Hidden states of a prefill in two parts and of some steps; and what the cache then holds."""
    cache = KVCache(network.config, "cpu", torch.float32, slots=6, room=32)
    slots = cache.allocate(5)
    if shared:
        prefix = KVCache(network.config, "cpu", torch.float32, slots=1, room=32)
        network.hidden(prefix.extend(prefix.allocate(), sequences([21])))
        cache.link(slots[1:4], prefix)
    made = [network.hidden(cache.extend(slots, sequences([1] * 5 if shared else [3, 9, 1, 17, 30])))]
    made.append(network.hidden(cache.extend(slots, sequences([2, 1, 4, 1, 3], seed=6))))
    for seed in range(4):
        made.append(network.hidden(cache.extend(slots, torch.cat(sequences([1] * 5, seed=seed)))))
    kept = [stored[slot, :, : cache.used[slot]] for stored in (*cache.keys, *cache.values) for slot in slots]
    return (*made, *kept)


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "prefix"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
@torch.no_grad()
def test_the_bits_are_those_of_the_blocks(name: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    network = tiny(name)
    shared = shared and network.shares_prefixes(100)  # not where windows are shorter than the sequences
    calls: list[int] = []
    run = forward.run
    monkeypatch.setattr(forward, "run", lambda *given: calls.append(1) or run(*given))
    at_once = steps(network, shared)
    assert len(calls) >= 5
    monkeypatch.setattr(forward, "prepared", lambda *given: None)
    assert all(torch.equal(one, other) for one, other in zip(at_once, steps(network, shared), strict=True))


WANTED = [
    [2, 92, 93, 150, 180],
    [180, 7, 7, 40],
    [0],
    [],
    [5, 4] * 91,
]  # ends; in any order, one twice; none; more than there are


def prefill(network: Transformer, shared: bool, wanted: list[int]) -> tuple[torch.Tensor, ...]:
    """Hidden states of some of many tokens, and what the cache then holds."""
    cache = KVCache(network.config, "cpu", torch.float32, slots=6, room=32)
    slots = cache.allocate(5)
    if shared:
        prefix = KVCache(network.config, "cpu", torch.float32, slots=1, room=32)
        network.hidden(prefix.extend(prefix.allocate(), sequences([21])))
        cache.link(slots[1:4], prefix)
    packed = cache.extend(slots, sequences([3, 90, 1, 57, 30]))
    made = network.hidden(packed, torch.tensor(wanted, dtype=torch.int64))
    kept = [stored[slot, :, : cache.used[slot]] for stored in (*cache.keys, *cache.values) for slot in slots]
    return (made, *kept)


@pytest.mark.parametrize("wanted", WANTED, ids=["ends", "any", "one", "none", "many"])
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "prefix"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
@torch.no_grad()
def test_the_last_block_computes_what_is_wanted(
    name: str, shared: bool, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = tiny(name)
    shared = shared and network.shares_prefixes(200)
    at_once = prefill(network, shared, wanted)
    assert at_once[0].shape == (len(wanted), network.config.hidden_size)
    monkeypatch.setattr(forward, "prepared", lambda *given: None)
    assert all(torch.equal(one, other) for one, other in zip(at_once, prefill(network, shared, wanted), strict=True))


@pytest.mark.parametrize("row", [3, -1, 1 << 40])
@torch.no_grad()
def test_rows_that_are_not_there(row: int) -> None:
    network = tiny("llama")
    cache = KVCache(network.config, "cpu", torch.float32)
    with pytest.raises(IndexError):
        network.hidden(cache.extend(cache.allocate(), [torch.tensor([5, 3, 6])]), torch.tensor([0, row]))


def replace_parameter(network: Transformer) -> None:
    query = network.blocks[0].attention.q
    query.weight = torch.nn.Parameter(query.weight * 2)


def move_parameter(network: Transformer) -> None:
    weight = network.blocks[1].mlp.down.weight
    weight.data = weight.data * 2


def read_others(network: Transformer) -> None:
    network.load_state_dict({key: value * 1.1 for key, value in network.state_dict().items()}, assign=True)


def adapt(network: Transformer) -> None:
    lora.attach(network, LoRASpec(r=2))
    for name, parameter in network.named_parameters():
        if "lora_b" in name:
            torch.nn.init.ones_(parameter)


@pytest.mark.parametrize("change", [replace_parameter, move_parameter, read_others, adapt])
@torch.no_grad()
def test_a_network_that_changed_is_prepared_again(change: Callable[[Transformer], None]) -> None:
    network, (first, second) = tiny("llama"), sequences([9, 1])
    cache = KVCache(network.config, "cpu", torch.float32)
    network.hidden(cache.extend(cache.allocate(), [first]))
    before = network.hidden(cache.extend([0], second))
    cache.truncate(0, 9)
    change(network)
    cache.moved()
    kept = network.hidden(cache.extend([0], second))
    cache.truncate(0, 9)
    cache.prepared = None
    assert torch.equal(kept, network.hidden(cache.extend([0], second))) and not torch.equal(kept, before)


@torch.no_grad()
def test_another_network_over_the_same_cache() -> None:
    networks, (first, second) = (tiny("llama"), tiny("llama", seed=1)), sequences([9, 1])
    cache = KVCache(networks[0].config, "cpu", torch.float32)
    networks[0].hidden(cache.extend(cache.allocate(), [first]))
    made = []
    for network in networks:
        made.append(network.hidden(cache.extend([0], second)))
        cache.truncate(0, 9)
    assert not torch.equal(*made)


@pytest.mark.parametrize("token", [131, -1, 1 << 40])
@torch.no_grad()
def test_tokens_outside_the_vocabulary(token: int) -> None:
    network = tiny("llama")
    cache = KVCache(network.config, "cpu", torch.float32)
    with pytest.raises(IndexError):
        network.hidden(cache.extend(cache.allocate(), [torch.tensor([5, token, 6])]))


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mixtral", "gpt_neox", "olmo2"])
def test_networks_of_another_form_go_block_by_block(name: str) -> None:
    assert not forward.fits(tiny(name).config)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "mixtral", "gpt2"])
@torch.no_grad()
def test_a_first_token_sees_the_prefix_before_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block by block as in one call: each row's only token, after a prefix, has the state that it has in the whole sequence."""
    monkeypatch.setattr(forward, "prepared", lambda *given: None)
    network, before = tiny(name), sequences([21])[0]
    prefix = KVCache(network.config, "cpu", torch.float32, slots=1, room=32)
    network.hidden(prefix.extend(prefix.allocate(), [before]))
    cache = KVCache(network.config, "cpu", torch.float32, slots=4, room=32)
    slots, first = cache.allocate(4), torch.tensor([3, 7, 11, 2])
    cache.link(slots, prefix)
    whole = last_states(network, [torch.cat([before, token[None]]) for token in first])
    torch.testing.assert_close(network.hidden(cache.extend(slots, first)), whole)
