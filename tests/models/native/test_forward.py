"""A pass over cached sequences in one call is the one that goes block by block, to the bit."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.models.common import last_states, sequences, tiny
from weft.engine.spec import LoRASpec
from weft.models import lora
from weft.models.config import Rope
from weft.models.kv_cache import KVCache
from weft.models.native import forward
from weft.models.transformer import Transformer


def five_slots(network: Transformer, shared: bool) -> tuple[KVCache, list[int]]:
    """Empty ones, three of which go on from a prefix where it is `shared`."""
    cache = KVCache(network.config, "cpu", torch.float32, slots=6, room=32)
    slots = cache.allocate(5)
    if shared:
        prefix = KVCache(network.config, "cpu", torch.float32, slots=1, room=32)
        network.hidden(prefix.extend(prefix.allocate(), sequences([21])))
        cache.link(slots[1:4], prefix)
    return cache, slots


def held(cache: KVCache) -> list[torch.Tensor]:
    """The keys and values of every slot."""
    lengths = cache.used[: cache.num_active].tolist()
    return [stored[slot, :, :length] for stored in (*cache.keys, *cache.values) for slot, length in enumerate(lengths)]


def steps(network: Transformer, shared: bool) -> tuple[torch.Tensor, ...]:
    """Hidden states of a prefill in two parts and of some steps; and what the cache then holds."""
    cache, slots = five_slots(network, shared)
    made = [network.hidden(cache.extend(slots, sequences([1] * 5 if shared else [3, 9, 1, 17, 30])))]
    made.append(network.hidden(cache.extend(slots, sequences([2, 1, 4, 1, 3], seed=6))))
    for seed in range(4):
        made.append(network.hidden(cache.extend(slots, torch.cat(sequences([1] * 5, seed=seed)))))
    return (*made, *held(cache))


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


# Ends; in any order, one twice; the first alone; none; more than there are.
WANTED = [[2, 92, 93, 150, 180], [180, 7, 7, 40], [0], [], [5, 4] * 91]


def prefill(network: Transformer, shared: bool, wanted: list[int]) -> tuple[torch.Tensor, ...]:
    """Hidden states of some of many tokens, and what the cache then holds."""
    cache, slots = five_slots(network, shared)
    packed = cache.extend(slots, sequences([3, 90, 1, 57, 30]))
    made = network.hidden(packed, torch.tensor(wanted, dtype=torch.int64))
    return (made, *held(cache))


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


FORMS: dict[str, dict[str, Any]] = {
    "no rotation": {"rope": None},
    "half rotated": {"rope": Rope(theta=10000.0, dim=4)},
    "wide heads": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 12, "rope": Rope(theta=10000.0, dim=12)},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "one key head": {"num_kv_heads": 1},
}


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_networks_of_other_sizes(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Transformer(dataclasses.replace(tiny("llama").config, **FORMS[form])).eval()
    torch.manual_seed(0)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ran: list[int] = []
    run = forward.run
    monkeypatch.setattr(forward, "run", lambda *given: ran.append(1) or run(*given))
    at_once = (*prefill(network, True, WANTED[1]), *steps(network, True))
    assert len(ran) >= 8
    monkeypatch.setattr(forward, "prepared", lambda *given: None)
    block_by_block = (*prefill(network, True, WANTED[1]), *steps(network, True))
    assert all(torch.equal(one, other) for one, other in zip(at_once, block_by_block, strict=True))


@torch.no_grad()
def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    network = tiny("llama")
    cache = KVCache(network.config, "cpu", torch.float32)
    packed = cache.extend(cache.allocate(), [torch.tensor([5, 3, 6])])
    monkeypatch.setattr(forward.library, "call", lambda *given: forward.NO_MEMORY)
    with pytest.raises(MemoryError, match="a pass over 3 tokens"):
        network.hidden(packed)


@torch.no_grad()
def test_the_kernel_survives_that_it_gets_no_memory() -> None:
    """In a process of its own, with a prompt whose states alone are more than it may have."""
    code = """
import resource, torch
from tests.models.common import tiny
from weft.models.kv_cache import KVCache
torch.set_num_threads(1)
network, count = tiny("llama"), 100_000
with torch.no_grad():
    cache = KVCache(network.config, "cpu", torch.float32, slots=1, room=count)
    network.hidden(cache.extend(cache.allocate(), [torch.ones(8, dtype=torch.int64)]))
    cache.truncate(0, 0)
    packed = cache.extend([0], [torch.ones(count, dtype=torch.int64)])
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20),) * 2)
    try:
        network.hidden(packed, torch.tensor([count - 1]))
    except MemoryError as error:
        print("said:", error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout == "said: not enough memory for a pass over 100000 tokens\n", found.stderr


@pytest.mark.parametrize("row", [3, -1, 1 << 40])
@torch.no_grad()
def test_rows_that_are_not_there(row: int) -> None:
    network = tiny("llama")
    cache = KVCache(network.config, "cpu", torch.float32)
    with pytest.raises(IndexError, match=f"there is no row {row} in 3"):
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
    with pytest.raises(IndexError, match=f"token {token} is outside the vocabulary"):
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
