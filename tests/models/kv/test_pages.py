"""The paged cache: whatever rows share, copy and give back, what is computed stays what the whole
pass computes.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from tests.models.common import LastStates, sequences, tiny
from weft.kernels import flex
from weft.models.kv.pages import Paged, PagedCache, PagePool
from weft.models.network.transformer import Transformer

NETWORKS = ["llama", "mistral", "gemma2", "gpt2"]
PAGE = 16


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    # unfused, it is traced with sizes that vary; other tests' sizes would make more of them vary
    torch._dynamo.reset()
    monkeypatch.setattr(torch_flex, "_warn_once", lambda *_, **__: None)


def network_of(name: str = "llama") -> Transformer:
    """In float64: unfused, FlexAttention computes as it does in float32."""
    return tiny(name, dtype=torch.float64)


def pool_of(network: Transformer) -> PagePool:
    return PagePool(network.config, "cpu", torch.float64, page=PAGE)


@torch.no_grad()
@pytest.mark.parametrize("name", NETWORKS)
def test_sequences_come_and_go(name: str) -> None:
    """Prefill some, decode over a page's end, release one in the middle, admit another, decode on."""
    network = network_of(name)
    pool = pool_of(network)
    cache = PagedCache(pool)
    texts = sequences([15, 3, 40, 5])
    slots = cache.allocate(3)
    packed, states = cache.extend(slots, texts[:3]), LastStates(network)
    states.add(network.compute_hidden(packed)[packed.rows], texts[:3])
    held = dict(zip(slots, texts[:3], strict=True))

    def step(seed: int) -> None:
        order = sorted(held)
        tokens = sequences([len(order)], seed=seed)[0]
        packed = cache.extend(order, tokens)
        assert isinstance(packed.attention, Paged) and packed.attention.is_decode_step
        for slot, token in zip(order, tokens, strict=True):
            held[slot] = torch.cat([held[slot], token[None]])
        assert packed.positions.tolist() == [len(held[slot]) - 1 for slot in order]
        states.add(network.compute_hidden(packed)[packed.rows], [held[s] for s in order])

    step(1)
    step(2)
    moved = cache.release(0)
    assert moved == 2
    held[0] = held.pop(moved)
    (new,) = cache.allocate()
    packed = cache.extend([new], [texts[3]])
    network.compute_hidden(packed)
    held[new] = texts[3]
    step(3)
    states.check()
    cache.close()
    assert pool.pages.num_used == 0


@torch.no_grad()
def test_samples_share_pages_until_they_write() -> None:
    network = network_of()
    pool = pool_of(network)
    cache = PagedCache(pool)
    (prompt,) = sequences([2 * PAGE + 9])
    (slot,) = cache.allocate()
    network.compute_hidden(cache.extend([slot], [prompt]))
    slots = [slot, *cache.fork(slot, 3)]
    assert slots == [0, 1, 2, 3] and pool.pages.num_used == 3
    tokens = torch.tensor([3, 50, 7, 99])
    packed = cache.extend(slots, tokens)
    assert pool.pages.num_used == 3 + 3, "the partly full page is copied for all but one"
    states = LastStates(network)
    states.add(
        network.compute_hidden(packed)[packed.rows],
        [torch.cat([prompt, t[None]]) for t in tokens],
    )
    states.check()


@torch.no_grad()
def test_a_prefix_of_its_own_precedes_what_rows_hold() -> None:
    """A prefix computed in two parts, cut back as the generator does, then gone on from by two rows
    and taken over by one.
    """
    network = network_of()
    pool = pool_of(network)
    prefix, cache = PagedCache(pool), PagedCache(pool)
    text, *rests = sequences([PAGE + 5, 4, 11])
    prefix.allocate()
    network.compute_hidden(prefix.extend([0], [text[:7]]))
    network.compute_hidden(prefix.extend([0], [torch.cat([text[7:], text[:3]])]))
    prefix.truncate(0, len(text))
    slots = cache.allocate(2)
    cache.link(slots, prefix)
    assert cache.before[:2].tolist() == [len(text)] * 2 and pool.pages.num_used == 2
    packed = cache.extend(slots, rests)
    whole = [torch.cat([text, rest]) for rest in rests]
    assert packed.positions.tolist() == [*range(21, 25), *range(21, 32)]
    states = LastStates(network)
    states.add(network.compute_hidden(packed)[packed.rows], whole)
    taken = cache.take(prefix)
    assert taken == 2
    prefix.close()
    tokens = torch.tensor([8, 9, 10])
    packed = cache.extend([0, 1, taken], tokens)
    expected = [
        torch.cat([row, token[None]]) for row, token in zip([*whole, text], tokens, strict=True)
    ]
    states.add(network.compute_hidden(packed)[packed.rows], expected)
    cache.truncate(1, 2)
    packed = cache.extend([1], [rests[1][2:6]])
    states.add(network.compute_hidden(packed)[-1:], [torch.cat([text, rests[1][:6]])])
    states.check()


@torch.no_grad()
def test_a_row_after_one_with_a_prefix_begins_at_its_first_token() -> None:
    network = network_of()
    pool = pool_of(network)
    prefix, cache = PagedCache(pool), PagedCache(pool)
    text, rest, alone = sequences([PAGE + 5, 4, 11])
    prefix.allocate()
    network.compute_hidden(prefix.extend([0], [text]))
    (slot,) = cache.allocate()
    cache.link([slot], prefix)
    network.compute_hidden(cache.extend([slot], [rest]))
    cache.release(slot)
    assert cache.allocate() == [slot]
    packed = cache.extend([slot], [alone])
    assert packed.positions.tolist() == list(range(11))
    states = LastStates(network)
    states.add(network.compute_hidden(packed)[packed.rows], [alone])
    states.check()


@torch.no_grad()
def test_rows_that_fill_a_step_up_disturb_nobody() -> None:
    network = network_of()
    cache = PagedCache(pool_of(network))
    texts = sequences([20, 7])
    slots = cache.allocate(2)
    network.compute_hidden(cache.extend(slots, texts))
    (tokens,) = sequences([2])
    step = torch.from_numpy(cache.step(slots, tokens.numpy()))
    filled = torch.nn.functional.pad(step, (0, 0, 0, 3))
    states = network.compute_hidden(cache.pool.build_packed(filled))
    assert torch.isfinite(states).all()
    expected = LastStates(network)
    for found in (states[:2], network.compute_hidden(cache.pool.build_packed(step))):
        expected.add(
            found, [torch.cat([row, t[None]]) for row, t in zip(texts, tokens, strict=True)]
        )
    expected.check()


@torch.no_grad()
def test_the_pool_grows_and_keeps_what_it_holds() -> None:
    network = network_of()
    pool = pool_of(network)
    cache = PagedCache(pool)
    before = pool.num_bytes
    texts = sequences([PAGE] * 70)
    slots = cache.allocate(70)
    network.compute_hidden(cache.extend(slots[:60], texts[:60]))
    network.compute_hidden(cache.extend(slots[60:], texts[60:]))
    assert pool.num_bytes == 2 * before
    packed = cache.extend([0, 69], torch.tensor([1, 2]))
    expected = [torch.cat([texts[0], torch.tensor([1])]), torch.cat([texts[69], torch.tensor([2])])]
    states = LastStates(network)
    states.add(network.compute_hidden(packed)[packed.rows], expected)
    states.check()


@pytest.mark.parametrize("window", [None, 20])
def test_listed_blocks_hold_every_visible_key(window: int | None) -> None:
    """The fused kernel reads the listed pages alone; the unfused form, which the other tests run,
    all of them.
    """
    table = torch.tensor([[3, 5, 0], [1, 0, 0], [4, 2, 6], [0, 0, 0]], dtype=torch.int32)
    used = torch.tensor([20, 16, 33, 1], dtype=torch.int32)
    mask = flex.build_page_mask(table, used, (7, PAGE), window)
    row, key = torch.arange(4)[:, None], torch.arange(7 * PAGE)[None]
    seen = mask.mask_mod(row, None, None, key)
    for r in range(4):
        pages = table[r, : -(-int(used[r]) // PAGE)]
        own = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[: used[r]]
        expected = torch.zeros(7 * PAGE, dtype=torch.bool)
        expected[own if window is None else own[-window:]] = True
        assert torch.equal(seen[r], expected)
        listed = mask.kv_indices[r, 0, 0, : mask.kv_num_blocks[r, 0, 0]]
        assert set((seen[r].nonzero().flatten() // PAGE).tolist()) <= set(listed.tolist())
    assert mask.kv_indices.shape == (4, 1, 1, 7)
