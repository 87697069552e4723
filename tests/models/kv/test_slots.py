"""The slot cache: growing, forking, releasing, going back; what is computed stays what the whole
pass computes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.models.common import LastStates, sequences, tiny
from tests.roundings import assert_computed
from weft.engine.generation.passes import DecoderPasses, has_slot_kernel
from weft.errors import ConfigError
from weft.models.kv.slots import Cached, KVCache
from weft.models.network.packed import pack
from weft.models.network.transformer import Transformer

NETWORKS = ["llama", "mistral", "gemma2", "gpt2"]


Hidden = Callable[..., torch.Tensor]


@pytest.fixture(params=["modules", "passes"])
def by(request: pytest.FixtureRequest) -> Callable[[Transformer], Hidden]:
    """A network's passes module by module; or those of a generator, in one call where a kernel
    serves it.
    """
    return (
        (lambda network: network.compute_hidden)
        if request.param == "modules"
        else (lambda network: DecoderPasses(network).compute_hidden)
    )


def cache_of(network: Transformer, rectangle: bool, *, slots: int = 1, room: int = 2) -> KVCache:
    """Where it is no `rectangle` it holds no numbers where no token was written."""
    if not rectangle and not has_slot_kernel(network):
        pytest.skip("this network's attention reads all slots as one rectangle")
    cache = KVCache(
        network.config, "cpu", torch.float32, slots=slots, room=room, rectangle=rectangle
    )
    if not rectangle:
        for stored in (*cache.keys, *cache.values):
            stored.fill_(torch.nan)
        cache._create_tensor = lambda *given, **how: torch.full(*given, torch.nan, **how)
    return cache


def lie_elsewhere(cache: KVCache, rectangle: bool) -> None:
    """Slots 0 and 1 are active and hold nothing; where they may lie anywhere, they do not lie in
    order.
    """
    assert cache.allocate(4) == [0, 1, 2, 3]
    for _ in range(2):
        cache.release(0)
    assert (cache.places[:4].tolist() == [0, 1, 2, 3]) == rectangle


@torch.no_grad()
@pytest.mark.parametrize("rectangle", [True, False], ids=["rectangle", "anywhere"])
@pytest.mark.parametrize("name", NETWORKS)
def test_sequences_come_and_go(
    name: str, rectangle: bool, by: Callable[[Transformer], Hidden]
) -> None:
    """Prefill some, decode, release one in the middle, admit others, decode on: always the states
    of the whole pass.
    """
    network = tiny(name)
    hidden = by(network)
    states, cache = LastStates(network), cache_of(network, rectangle)
    texts = sequences([7, 3, 12, 5])
    slots = cache.allocate(3)
    hidden(cache.extend(slots, texts[:3]))
    held = dict(zip(slots, texts[:3], strict=True))

    def step(seed: int) -> None:
        order = sorted(held)
        tokens = sequences([len(order)], seed=seed)[0]
        packed = cache.extend(order, tokens)
        for slot, token in zip(order, tokens, strict=True):
            held[slot] = torch.cat([held[slot], token[None]])
        states.add(hidden(packed)[packed.rows], [held[s] for s in order])

    step(1)
    moved = cache.release(0)
    assert moved == 2
    held[0] = held.pop(moved)
    step(2)
    (new,) = cache.allocate()
    assert new == 2
    packed = cache.extend([new], [texts[3]])
    states.add(hidden(packed)[packed.rows], [texts[3]])
    held[new] = texts[3]
    step(3)
    step(4)
    states.check()


@torch.no_grad()
@pytest.mark.parametrize("rectangle", [True, False], ids=["rectangle", "anywhere"])
def test_one_prompt_many_samples(rectangle: bool, by: Callable[[Transformer], Hidden]) -> None:
    network = tiny()
    hidden = by(network)
    cache = cache_of(network, rectangle, slots=8, room=32)
    prompt, other = sequences([9, 5])
    lie_elsewhere(cache, rectangle)
    hidden(cache.extend([0, 1], [prompt, other]))
    slots = [0, *cache.fork(0, 3)]
    assert slots == [0, 2, 3, 4] and cache.num_slots == 8 and cache.used[slots].tolist() == [9] * 4
    tokens = torch.tensor([3, 50, 7, 99, 20])
    packed = cache.extend([*slots, 1], tokens)
    expected = [
        torch.cat([text, t[None]]) for text, t in zip([*[prompt] * 4, other], tokens, strict=True)
    ]
    states = LastStates(network)
    states.add(hidden(packed)[packed.rows], expected)
    states.check()


@torch.no_grad()
@pytest.mark.parametrize("rectangle", [True, False], ids=["rectangle", "anywhere"])
def test_what_another_cache_holds_is_taken(
    rectangle: bool, by: Callable[[Transformer], Hidden]
) -> None:
    network, (prompt, own) = tiny(), sequences([9, 6])
    hidden = by(network)
    cache, other = (cache_of(network, rectangle, slots=8, room=32) for _ in range(2))
    lie_elsewhere(cache, rectangle)
    lie_elsewhere(other, rectangle)
    hidden(other.extend([0], [prompt]))
    hidden(cache.extend([0, 1], [own, own]))
    assert cache.take(other) == 2
    packed = cache.extend([0, 2], torch.tensor([8, 9]))
    expected = [torch.cat([own, torch.tensor([8])]), torch.cat([prompt, torch.tensor([9])])]
    states = LastStates(network)
    states.add(hidden(packed)[packed.rows], expected)
    states.check()


@torch.no_grad()
@pytest.mark.parametrize(
    "size", [(12, 32), (8, 64), (2, 32)], ids=["more slots", "more room", "fewer slots"]
)
@pytest.mark.parametrize("rectangle", [True, False], ids=["rectangle", "anywhere"])
def test_another_size_keeps_what_is_held(
    rectangle: bool, size: tuple[int, int], by: Callable[[Transformer], Hidden]
) -> None:
    network, texts = tiny(), sequences([9, 6])
    hidden = by(network)
    cache = cache_of(network, rectangle, slots=8, room=32)
    lie_elsewhere(cache, rectangle)
    hidden(cache.extend([0, 1], texts))
    cache.resize(*size)
    assert (cache.num_slots, cache.capacity) == size and cache.places.tolist() == list(
        range(size[0])
    )
    packed = cache.extend([0, 1], torch.tensor([8, 9]))
    expected = [torch.cat([text, torch.tensor([t])]) for text, t in zip(texts, (8, 9), strict=True)]
    states = LastStates(network)
    states.add(hidden(packed)[packed.rows], expected)
    states.check()


@pytest.mark.parametrize("rectangle", [True, False], ids=["rectangle", "anywhere"])
def test_a_slot_that_is_given_back_moves_no_keys_where_slots_may_lie_anywhere(
    rectangle: bool,
) -> None:
    cache = KVCache(tiny().config, "cpu", torch.float32, slots=4, rectangle=rectangle)
    slots = cache.allocate(3)
    cache.extend(slots, [torch.arange(3 + slot) for slot in slots])
    cache.keys[0][:] = torch.arange(4.0)[:, None, None, None]
    assert cache.release(0) == 2 and cache.used.tolist() == [5, 4, 0, 0]
    assert cache.keys[0][:, 0, 4, 0].tolist() == ([2, 1, 2, 3] if rectangle else [0, 1, 2, 3])
    packed = cache.extend([0, 1], torch.tensor([1, 2]))
    assert isinstance(packed.attention, Cached) and packed.attention.slots.tolist() == (
        [0, 1] if rectangle else [2, 1]
    )


@torch.no_grad()
def test_going_back(by: Callable[[Transformer], Hidden]) -> None:
    network = tiny()
    hidden = by(network)
    cache = KVCache(network.config, "cpu", torch.float32)
    (row,) = sequences([12])
    (slot,) = cache.allocate()
    hidden(cache.extend([slot], [row]))
    cache.truncate(slot, 5)
    packed = cache.extend([slot], [row[5:9]])
    assert packed.positions.tolist() == [5, 6, 7, 8]
    found, whole, wide = hidden(packed), pack([row[:9]]), copy.deepcopy(network).double()
    assert_computed(found, lambda: wide.compute_hidden(whole)[5:])


@torch.no_grad()
def test_slots_in_any_order_and_with_gaps(by: Callable[[Transformer], Hidden]) -> None:
    network = tiny()
    hidden = by(network)
    cache = KVCache(network.config, "cpu", torch.float32)
    rows = sequences([4, 9, 6])
    slots = cache.allocate(3)
    hidden(cache.extend(slots, rows))
    tokens = torch.tensor([8, 9])
    packed = cache.extend([2, 0], tokens)
    assert isinstance(packed.attention, Cached) and packed.attention.span is None
    states = LastStates(network)
    states.add(
        hidden(packed)[packed.rows],
        [torch.cat([rows[2], tokens[:1]]), torch.cat([rows[0], tokens[1:]])],
    )
    states.check()


def test_room_grows_by_doubling() -> None:
    config = tiny().config
    cache = KVCache(config, "cpu", torch.float32, slots=2, room=4)
    slots = cache.allocate(3)
    assert cache.num_slots == 4 and cache.num_active == 3
    cache.extend(slots, [torch.arange(n) for n in (1, 5, 2)])
    assert cache.capacity == 16 and cache.used[:3].tolist() == [1, 5, 2]
    cache.extend([1], [torch.arange(20)])
    assert cache.capacity == 32
    cache.extend([1], [torch.arange(50)])
    assert cache.capacity == 80, "whole vectors, and no more than is needed beyond twice the room"
    assert (
        cache.num_bytes
        == 2 * config.num_layers * 4 * config.num_kv_heads * 80 * config.head_dim * 4
    )


def test_a_decode_step_reads_consecutive_slots_without_a_copy() -> None:
    cache = KVCache(tiny().config, "cpu", torch.float32)
    slots = cache.allocate(4)
    cache.extend(slots, [torch.arange(3)] * 4)
    packed = cache.extend(slots[1:], torch.zeros(3, dtype=torch.int64))
    assert isinstance(packed.attention, Cached)
    keys, _ = cache.read(0, packed.attention)
    assert keys.shape == (3, 2, 16, 8) and keys.data_ptr() == cache.keys[0][1].data_ptr()
    assert np.array_equal(packed.attention.used, [3, 3, 3])


def test_frequencies_that_would_change_under_cached_keys_are_refused() -> None:
    """phi3 with LongRoPE, trained length 16: a prompt beyond it is fine, growing past it is not."""
    network = tiny("phi3")
    cache = KVCache(network.config, "cpu", torch.float32)
    short, long = cache.allocate(2)
    with torch.no_grad():
        network.compute_hidden(cache.extend([short, long], sequences([15, 20])))
        packed = cache.extend([long], torch.tensor([4]))
        states = LastStates(network)
        states.add(
            network.compute_hidden(packed),
            [torch.cat([sequences([15, 20])[1], torch.tensor([4])])],
        )
        states.check()
    cache.extend([short], torch.tensor([4]))
    with pytest.raises(ConfigError, match=r"past 16 tokens.*longrope"):
        cache.extend([short], torch.tensor([4]))


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_prefix_is_stored_once_and_joined(name: str, by: Callable[[Transformer], Hidden]) -> None:
    """Two slots after one prefix, one after another, one after none: prefilled, decoded, moved and
    forked.
    """
    network = tiny(name)
    hidden = by(network)
    first, second, *rests = sequences([21, 9, 5, 2, 1, 7])
    prefixes = []
    for tokens in (first, second):
        prefix = KVCache(network.config, "cpu", torch.float32, slots=1, room=32)
        hidden(prefix.extend(prefix.allocate(), [tokens]))
        prefixes.append(prefix)
    cache = KVCache(network.config, "cpu", torch.float32, slots=1, room=2)
    slots = cache.allocate(4)
    cache.link(slots[:2], prefixes[0])
    cache.link(slots[2:3], prefixes[1])
    held = [
        torch.cat([head, rest])
        for head, rest in zip([first, first, second, rests[3][:0]], rests, strict=True)
    ]
    packed, states = cache.extend(slots, rests), LastStates(network)
    states.add(hidden(packed)[packed.rows], [*held])

    def step(seed: int) -> None:
        tokens = sequences([len(held)], seed=seed)[0]
        for row, token in enumerate(tokens):
            held[row] = torch.cat([held[row], token[None]])
        packed = cache.extend(range(len(held)), tokens)
        states.add(hidden(packed), [*held])

    step(1)
    step(2)
    held += [held[1]] * 2
    cache.fork(1, 2)
    step(3)
    cache.release(0)
    held[0] = held.pop()
    step(4)
    part = KVCache(network.config, "cpu", torch.float32, slots=1, room=16)
    part.link(part.allocate(), prefixes[0])
    hidden(part.extend([0], [rests[0]]))
    assert cache.take(part) == len(held)
    held.append(torch.cat([first, rests[0]]))
    step(5)
    states.check()
