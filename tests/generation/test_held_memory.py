"""What the generator holds: no more than is counted, nothing that nobody can use, and no more than a container may."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generation.common import CPU, build, drain, opened
from weft.engine.base import Request
from weft.engine.device import cgroup_limits, memory_bytes
from weft.engine.generation.blocks import Slots
from weft.engine.generation.generate import BatchGenerator, default_budget
from weft.engine.generation.scheduler import Budget
from weft.engine.spec import GenerationSpec
from weft.models.kv_cache import KVCache
from weft.models.packed import VECTOR

LONG = [7 + i % 50 for i in range(100)]


def held_tokens(generator: BatchGenerator) -> int:
    caches = [cache for cache in (generator._cache, *generator._held.values()) if cache is not None]
    return sum(cache.num_slots * cache.capacity for cache in caches if isinstance(cache, KVCache) and cache.keys)


@pytest.mark.parametrize("count", [33, 40])
def test_slots_for_sequences_to_come_stay_within_the_budget(count: int) -> None:
    budget = Budget(max_sequences=count, max_tokens=64 * (count + 3))
    with opened(build(), GenerationSpec(max_new_tokens=70, min_new_tokens=70), budget) as generator:
        generator.submit([Request(f"p{i}", 0, [6 + i % 50] * (1 + i % 5)) for i in range(count)])
        running = []
        while not generator.idle:
            generator.step()
            running.append(len(generator._rows))
            assert held_tokens(generator) < budget.max_tokens + VECTOR
    assert running[0] == count > running[66], "all of them run at first; as they grow some wait again"


def test_few_long_sequences_do_not_keep_the_slots_of_many_short_ones() -> None:
    budget = Budget(max_sequences=32, max_tokens=32 * 64)
    with opened(build(), GenerationSpec(max_new_tokens=400, min_new_tokens=400), budget) as generator:
        generator.submit([Request(f"p{i}", 0, [6 + i], max_new_tokens=400 if i < 4 else 3) for i in range(32)])
        while not generator.idle:
            generator.step()
            assert held_tokens(generator) < budget.max_tokens + VECTOR


@settings(max_examples=150, deadline=None)
@given(
    most=st.integers(1, 20), tokens=st.integers(200, 1500),
    todo=st.lists(st.tuples(st.sampled_from("arps"), st.integers(1, 190)), max_size=60),
)  # fmt: skip
def test_slots_held_are_enough_and_within_the_limits(most: int, tokens: int, todo: list[tuple[str, int]]) -> None:
    slots, apart, here = Slots(most, tokens), {}, []
    for number, (what, length) in enumerate(todo):
        if what == "a" and slots.admit(number, length):
            here.append(number)
            slots.start(number)
        elif what == "p" and slots.admit_prefix(-number - 1, length):
            apart[-number - 1] = length
        elif what == "s":
            slots.advance()
        elif what == "r" and here:
            slots.release(here.pop(length % len(here)))
        elif what == "r" and apart:
            apart.pop(key := next(iter(apart)))
            slots.release(key)
        assert len(slots) <= slots.num_held <= most
        assert slots.num_held * slots.capacity + sum(apart.values()) <= tokens


def test_slots_are_as_large_as_they_will_be_where_that_is_half_the_limit() -> None:
    slots = Slots(8, 2000, unit=16, ahead=True)
    slots.expect(5, 110)
    assert slots.admit("a", 10) and (slots.num_held, slots.capacity) == (5, 112)
    slots.expect(20, 100)
    assert all(slots.admit(key, 10) for key in "bcdef") and (slots.num_held, slots.capacity) == (8, 112)
    for longest, ahead in ((150, True), (110, False)):
        slots = Slots(8, 2000, unit=16, ahead=ahead)
        slots.expect(5, longest)
        assert slots.admit("a", 10) and (slots.num_held, slots.capacity) == (8, 64), "they grow by doubling"


@pytest.mark.parametrize("longest", [100, 1900])
def test_those_that_come_later_find_room(longest: int) -> None:
    """One long sequence, then one more a step: as many run together as without looking ahead, and few copies are made."""
    sizes = {}
    for ahead in (True, False):
        slots, held = Slots(32, 8000, unit=16, ahead=ahead), set()
        for key in range(32):
            slots.expect(key + 1, longest)
            assert slots.admit(key, 5)
            slots.start(key)
            assert slots.advance()
            held.add((slots.num_held, slots.capacity))
        sizes[ahead] = len(held)
    assert sizes[True] <= sizes[False] + 3


def test_a_batch_that_fits_is_never_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    monkeypatch.setattr(KVCache, "_reshape", lambda *given: moved.append(1))
    with opened(build(dtype=torch.float32), GenerationSpec(max_new_tokens=90, min_new_tokens=90)) as generator:
        if not generator._scheduler.blocks.ahead:
            pytest.skip("weft's kernels were not compiled, and a cache is zeroed")
        generator.submit([Request(f"p{i}", 0, [6 + i] * (3 + 20 * i)) for i in range(5)])
        drain(generator)
    assert not moved


def test_a_cache_is_resized_both_ways() -> None:
    cache = KVCache(build().config, "cpu", torch.float64, slots=2, room=VECTOR)
    cache.allocate(2)
    for stored in (*cache.keys, *cache.values):
        stored.copy_(torch.randn_like(stored))
    before, cache.used[:] = [t[:, :, :5].clone() for t in cache.keys], 5
    cache.resize(7, 2 * VECTOR)
    assert (cache.num_slots, cache.capacity, cache.used.tolist()) == (7, 2 * VECTOR, [5, 5, 0, 0, 0, 0, 0])
    cache.resize(2, VECTOR)
    assert (cache.num_slots, cache.capacity, cache.used.tolist()) == (2, 2 * VECTOR, [5, 5])
    assert all(torch.equal(now[:, :, :5], old) for now, old in zip(cache.keys, before, strict=True))
    with pytest.raises(AssertionError, match="2 slots are active, 1 are too few"):
        cache.resize(1, VECTOR)


def test_prefixes_go_with_the_last_that_could_use_them() -> None:
    with opened(build(), GenerationSpec(max_new_tokens=3, min_new_tokens=3)) as generator:
        generator.submit([Request("a", k, LONG) for k in range(6)])
        generator.step()
        assert len(generator._held) == 1
        drain(generator)
        assert not generator._held and not generator._scheduler.prefixes
        assert held_tokens(generator) == 0

        generator.submit([Request("b", k, LONG) for k in range(6)])
        generator.step()
        generator.abort(["b"])
        assert not generator._held and held_tokens(generator) == 0


def test_a_prefix_stays_for_those_that_wait() -> None:
    """Two run, and end in one step; those that wait begin in the next one without computing the prefix again."""
    budget = Budget(max_sequences=2)
    with opened(build(), GenerationSpec(max_new_tokens=2, min_new_tokens=2), budget) as generator:
        generator.submit([Request("a", k, LONG) for k in range(6)])
        generator.step()
        [first] = generator._held
        generator.step()
        assert not len(generator._rows) and not generator.idle
        assert list(generator._held) == [first]
        generator.step()
        assert list(generator._held) == [first]


def test_a_closed_generator_holds_nothing() -> None:
    with opened(
        build(), GenerationSpec(max_new_tokens=30, min_new_tokens=30), Budget(max_prefill_tokens=120)
    ) as generator:
        generator.submit([Request("a", k, LONG) for k in range(6)])
        generator.step()
        generator.submit([Request("b", 0, np.random.default_rng(0).integers(6, 60, 400).tolist())])
        generator.step()
        caches = [generator._cache, *generator._held.values()]
        assert len(caches) == 3 and held_tokens(generator) > 500
    assert held_tokens(generator) == 0 and generator._cache is None and not generator._held
    assert all(isinstance(cache, KVCache) and not cache.keys for cache in caches)


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "700", "a/memory.max": "500", "memory.max": "max"}, [700, 500]),
        ("0::/\n", {"memory.max": "300\n"}, [300]),  # as a container sees its own group
        ("0::/elsewhere\n", {"memory.max": "300\n", "memory/memory.limit_in_bytes": "1"}, [300]),
        ("3:cpu,cpuacct:/x\n5:memory:/x\n", {"memory/x/memory.limit_in_bytes": "90", "cpu/x/memory.max": "1"}, [90]),
        ("0::/a\n", {}, []),
    ],
)
def test_limits_of_control_groups(tmp_path: Path, groups: str, files: dict[str, str], expected: list[int]) -> None:
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    assert cgroup_limits(tmp_path / "fs", tmp_path / "groups") == expected
    assert cgroup_limits(tmp_path / "fs", tmp_path / "none") == []


def test_the_default_budget_heeds_a_containers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = build().config
    free = default_budget(config, CPU, torch.float32).max_tokens
    limit = memory_bytes(CPU) // 8
    monkeypatch.setattr("weft.engine.device.cgroup_limits", lambda: [limit, 1 << 62])
    assert memory_bytes(CPU) == limit
    assert default_budget(config, CPU, torch.float32).max_tokens == pytest.approx(free / 8, abs=1)
