"""A pass over cached sequences in one call is the one that goes module by module, to the bit."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.bounds import assert_within, probable_gamma
from tests.models.common import last_states, roundings, sequences, tiny
from weft.engine.generation import passes
from weft.engine.generation.passes import DecoderPasses
from weft.kernels.cpu import cached_forward
from weft.models.kv.slots import KVCache
from weft.models.network import lora
from weft.models.network.config import Rope
from weft.models.network.transformer import Transformer

Hidden = Callable[..., torch.Tensor]


class OneCall:
    """Passes of a network by the kernel, counted."""

    def __init__(self, network: Transformer) -> None:
        self._passes, self.count = DecoderPasses(network), 0

    def __call__(self, *given: Any) -> torch.Tensor:
        run = cached_forward.CachedForward.run
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                cached_forward.CachedForward, "run", lambda *all: self._counted(run, *all)
            )
            return self._passes.compute_hidden(*given)

    def _counted(self, run: Hidden, *given: Any) -> torch.Tensor:
        self.count += 1
        return run(*given)


def five_slots(network: Transformer, shared: bool) -> tuple[KVCache, list[int]]:
    """Empty ones, three of which go on from a prefix where it is `shared`."""
    cache = KVCache(network.config, "cpu", torch.float32, slots=6, room=32)
    slots = cache.allocate(5)
    if shared:
        prefix = KVCache(network.config, "cpu", torch.float32, slots=1, room=32)
        network.compute_hidden(prefix.extend(prefix.allocate(), sequences([21])))
        cache.link(slots[1:4], prefix)
    return cache, slots


def held(cache: KVCache) -> list[torch.Tensor]:
    """The keys and values of every slot."""
    lengths = cache.used[: cache.num_active].tolist()
    return [
        stored[slot, :, :length]
        for stored in (*cache.keys, *cache.values)
        for slot, length in enumerate(lengths)
    ]


def steps(network: Transformer, hidden: Hidden, shared: bool) -> tuple[torch.Tensor, ...]:
    """Hidden states of a prefill in two parts and of some steps; and what the cache then holds."""
    cache, slots = five_slots(network, shared)
    made = [hidden(cache.extend(slots, sequences([1] * 5 if shared else [3, 9, 1, 17, 30])))]
    made.append(hidden(cache.extend(slots, sequences([2, 1, 4, 1, 3], seed=6))))
    for seed in range(4):
        made.append(hidden(cache.extend(slots, torch.cat(sequences([1] * 5, seed=seed)))))
    return (*made, *held(cache))


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "prefix"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
@torch.no_grad()
def test_the_bits_are_those_of_the_modules(name: str, shared: bool) -> None:
    network = tiny(name)
    # not where windows are shorter than the sequences
    shared = shared and network.can_share_prefixes(100)
    by_kernel = OneCall(network)
    at_once = steps(network, by_kernel, shared)
    assert by_kernel.count == 6
    by_module = steps(network, network.compute_hidden, shared)
    assert by_kernel.count == 6
    assert all(torch.equal(one, other) for one, other in zip(at_once, by_module, strict=True))


# Ends; in any order, one twice; the first alone; none; more than there are.
WANTED = [[2, 92, 93, 150, 180], [180, 7, 7, 40], [0], [], [5, 4] * 91]


def prefill(
    network: Transformer, hidden: Hidden, shared: bool, wanted: list[int]
) -> tuple[torch.Tensor, ...]:
    """Hidden states of some of many tokens, and what the cache then holds."""
    cache, slots = five_slots(network, shared)
    packed = cache.extend(slots, sequences([3, 90, 1, 57, 30]))
    made = hidden(packed, torch.tensor(wanted, dtype=torch.int64))
    return (made, *held(cache))


@pytest.mark.parametrize("wanted", WANTED, ids=["ends", "any", "one", "none", "many"])
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "prefix"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
@torch.no_grad()
def test_the_last_block_computes_what_is_wanted(name: str, shared: bool, wanted: list[int]) -> None:
    network = tiny(name)
    shared = shared and network.can_share_prefixes(200)
    by_kernel = OneCall(network)
    at_once = prefill(network, by_kernel, shared, wanted)
    assert at_once[0].shape == (len(wanted), network.config.hidden_size) and by_kernel.count
    by_module = prefill(network, network.compute_hidden, shared, wanted)
    assert all(torch.equal(one, other) for one, other in zip(at_once, by_module, strict=True))


FORMS: dict[str, dict[str, Any]] = {
    "no rotation": {"rope": None},
    "half rotated": {"rope": Rope(theta=10000.0, dim=4)},
    "wide heads": {
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 12,
        "rope": Rope(theta=10000.0, dim=12),
    },
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "one key head": {"num_kv_heads": 1},
    "weights from one": {"norm": "rms_plus_one"},
    "odd sizes": {"hidden_size": 37, "intermediate_size": 53},
    "scaled": {"attention_scale": 0.7, "layer_scaled_attention": True},
}


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_networks_of_other_sizes(form: str) -> None:
    network = Transformer(dataclasses.replace(tiny("llama").config, **FORMS[form])).eval()
    torch.manual_seed(0)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    by_kernel, by_module = OneCall(network), network.compute_hidden
    at_once, expected = (
        (*prefill(network, hidden, True, WANTED[1]), *steps(network, hidden, True))
        for hidden in (by_kernel, by_module)
    )
    assert by_kernel.count >= 7
    assert all(torch.equal(one, other) for one, other in zip(at_once, expected, strict=True))


@torch.no_grad()
def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    network = tiny("llama")
    cache = KVCache(network.config, "cpu", torch.float32)
    packed = cache.extend(cache.allocate(), [torch.tensor([5, 3, 6])])
    monkeypatch.setattr(cached_forward.library, "call", lambda *given: cached_forward.NO_MEMORY)
    with pytest.raises(MemoryError, match="a pass over 3 tokens"):
        DecoderPasses(network).compute_hidden(packed)


@torch.no_grad()
def test_the_kernel_survives_that_it_gets_no_memory() -> None:
    """In a process of its own, with a prompt whose states alone are more than it may have."""
    code = """
import resource, torch
from tests.models.common import tiny
from weft.engine.generation.passes import DecoderPasses
from weft.models.kv.slots import KVCache
torch.set_num_threads(1)
network, count = tiny("llama"), 100_000
with torch.no_grad():
    cache = KVCache(network.config, "cpu", torch.float32, slots=1, room=count)
    passes = DecoderPasses(network)
    passes.compute_hidden(cache.extend(cache.allocate(), [torch.ones(8, dtype=torch.int64)]))
    cache.truncate(0, 0)
    packed = cache.extend([0], [torch.ones(count, dtype=torch.int64)])
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20),) * 2)
    try:
        passes.compute_hidden(packed, torch.tensor([count - 1]))
    except MemoryError as error:
        print("said:", error)
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert found.stdout == "said: not enough memory for a pass over 100000 tokens\n", found.stderr


@pytest.mark.parametrize("row", [3, -1, 1 << 40])
@torch.no_grad()
def test_rows_that_are_not_there(row: int) -> None:
    network = tiny("llama")
    cache = KVCache(network.config, "cpu", torch.float32)
    with pytest.raises(IndexError, match=f"there is no row {row} in 3"):
        DecoderPasses(network).compute_hidden(
            cache.extend(cache.allocate(), [torch.tensor([5, 3, 6])]), torch.tensor([0, row])
        )


def replace_parameter(network: Transformer) -> None:
    qkv = network.blocks[0].attention.qkv
    qkv.weight = torch.nn.Parameter(qkv.weight * 2)


def move_parameter(network: Transformer) -> None:
    weight = network.blocks[1].mlp.down.weight
    weight.data = weight.data * 2


def read_others(network: Transformer) -> None:
    network.load_state_dict(
        {key: value * 1.1 for key, value in network.state_dict().items()}, assign=True
    )


def adapt(network: Transformer) -> None:
    lora.attach(network, r=2)
    for name, parameter in network.named_parameters():
        if "lora_b" in name:
            torch.nn.init.ones_(parameter)


def cast(network: Transformer) -> None:
    """One norm's weights alone: no kernel reads them, and module by module they are cast."""
    norm = network.blocks[1].norm1
    norm.weight = torch.nn.Parameter((norm.weight * 2).double())


def hook(network: Transformer) -> None:
    network.blocks[0].register_forward_hook(lambda _, __, states: states * 2)


@pytest.mark.parametrize(
    "change", [replace_parameter, move_parameter, read_others, adapt, cast, hook]
)
@torch.no_grad()
def test_a_network_that_changed_is_prepared_again(change: Callable[[Transformer], None]) -> None:
    network, (first, second) = tiny("llama"), sequences([9, 1])
    cache, over = KVCache(network.config, "cpu", torch.float32), DecoderPasses(network)
    over.compute_hidden(cache.extend(cache.allocate(), [first]))
    before = over.compute_hidden(cache.extend([0], second))
    cache.truncate(0, 9)
    assert over.is_ready(cache)
    change(network)
    over.forget()
    assert not over.is_ready(cache)
    after = over.compute_hidden(cache.extend([0], second))
    cache.truncate(0, 9)
    assert torch.equal(
        after, network.compute_hidden(cache.extend([0], second))
    ) and not torch.equal(after, before)


@torch.no_grad()
def test_a_cache_that_moved_is_read_where_it_is() -> None:
    network, (first, second) = tiny("llama"), sequences([9, 1])
    cache, over = (
        KVCache(network.config, "cpu", torch.float32, slots=1, room=16),
        DecoderPasses(network),
    )
    over.compute_hidden(cache.extend(cache.allocate(), [first]))
    expected = over.compute_hidden(cache.extend([0], second))
    cache.truncate(0, 9)
    old = [*cache.keys, *cache.values]
    cache.resize(3, 48)
    assert not over.is_ready(cache)
    for stored in old:
        stored.fill_(torch.nan)
    assert torch.equal(over.compute_hidden(cache.extend([0], second)), expected) and over.is_ready(
        cache
    )


@torch.no_grad()
def test_another_network_over_the_same_cache() -> None:
    networks, (first, second) = (tiny("llama"), tiny("llama", seed=1)), sequences([9, 1])
    cache, over = (
        KVCache(networks[0].config, "cpu", torch.float32),
        [DecoderPasses(network) for network in networks],
    )
    over[0].compute_hidden(cache.extend(cache.allocate(), [first]))
    made = []
    for each in over:
        made.append(each.compute_hidden(cache.extend([0], second)))
        cache.truncate(0, 9)
    assert not torch.equal(*made)


@pytest.mark.parametrize("token", [131, -1, 1 << 40])
@torch.no_grad()
def test_tokens_outside_the_vocabulary(token: int) -> None:
    network = tiny("llama")
    cache = KVCache(network.config, "cpu", torch.float32)
    with pytest.raises(IndexError, match=f"token {token} is outside the vocabulary"):
        DecoderPasses(network).compute_hidden(
            cache.extend(cache.allocate(), [torch.tensor([5, token, 6])])
        )


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mixtral", "gpt_neox", "olmo2"])
@torch.no_grad()
def test_networks_of_another_form_go_module_by_module(name: str) -> None:
    network = tiny(name)
    assert not passes.supports_config(network.config)
    cache, by_kernel = KVCache(network.config, "cpu", torch.float32), OneCall(network)
    by_kernel(cache.extend(cache.allocate(), sequences([5])))
    assert not by_kernel.count


def test_a_field_that_nobody_allowed_turns_the_kernel_off(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("llama").config
    assert passes.supports_config(config)
    for field in dataclasses.fields(config):
        if field.name not in passes.FIELD_RULES:
            assert getattr(config, field.name) == field.default
            assert not passes.supports_config(
                dataclasses.replace(config, **{field.name: not field.default})
            ), field.name
    changed = dataclasses.replace(config, qkv_bias=True)
    assert passes.supports_config(changed)
    monkeypatch.setattr(
        passes,
        "FIELD_RULES",
        {key: rule for key, rule in passes.FIELD_RULES.items() if key != "qkv_bias"},
    )
    assert not passes.supports_config(changed) and passes.supports_config(config)


@pytest.mark.parametrize(
    ("by", "dtype"),
    [(OneCall, torch.float32), (lambda network: network.compute_hidden, torch.float64)],
    ids=["kernel", "modules"],
)
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "mixtral", "gpt2"])
@torch.no_grad()
def test_a_first_token_sees_the_prefix_before_it(
    name: str, by: Callable[[Transformer], Hidden], dtype: torch.dtype
) -> None:
    """Each row's only token, after a prefix, has the state that it has in the whole sequence, which
    is computed in float64.
    """
    network, before = tiny(name), sequences([21])[0]
    wide = copy.deepcopy(network).double()
    hidden = by(network if dtype == torch.float32 else wide)
    prefix = KVCache(network.config, "cpu", dtype, slots=1, room=32)
    hidden(prefix.extend(prefix.allocate(), [before]))
    cache = KVCache(network.config, "cpu", dtype, slots=4, room=32)
    slots, first = cache.allocate(4), torch.tensor([3, 7, 11, 2])
    cache.link(slots, prefix)
    whole = last_states(wide, [torch.cat([before, token[None]]) for token in first])
    found = hidden(cache.extend(slots, first))
    assert found.dtype == dtype
    # all blocks, and the last norm, of 22 tokens
    lost = probable_gamma(roundings(network, 22) + network.config.hidden_size, dtype)
    assert_within(found, whole, lost * float(whole.abs().max()))
