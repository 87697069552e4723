"""What the generator holds: no more than is counted, nothing that nobody can use, and no more than
a container may.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.generation.common import CPU, build, drain, opened
from weft.engine.base import Request
from weft.engine.device import read_memory_bytes
from weft.engine.generation.caches import choose_default_budget
from weft.engine.generation.generate import BatchGenerator
from weft.engine.generation.scheduler import GenerationBudget
from weft.engine.spec import GenerationSpec
from weft.kernels import prepare_wide
from weft.kernels.cpu.library import VECTOR
from weft.models.kv.slots import KVCache

LONG = [7 + i % 50 for i in range(100)]


def held_tokens(generator: BatchGenerator) -> int:
    caches = [
        cache
        for cache in (generator._cache, *generator._prefill_caches.values())
        if cache is not None
    ]
    return sum(
        cache.num_slots * cache.capacity
        for cache in caches
        if isinstance(cache, KVCache) and cache.keys
    )


@pytest.mark.parametrize("count", [33, 40])
def test_slots_for_sequences_to_come_stay_within_the_budget(count: int) -> None:
    budget = GenerationBudget(max_sequences=count, max_tokens=64 * (count + 3))
    with opened(build(), GenerationSpec(max_new_tokens=70, min_new_tokens=70), budget) as generator:
        generator.submit([Request(f"p{i}", 0, [6 + i % 50] * (1 + i % 5)) for i in range(count)])
        running = []
        while not generator.idle:
            generator.step()
            running.append(len(generator._batch))
            assert held_tokens(generator) < budget.max_tokens + VECTOR
    assert running[0] == count > running[66], (
        "all of them run at first; as they grow some wait again"
    )


def test_few_long_sequences_do_not_keep_the_slots_of_many_short_ones() -> None:
    budget = GenerationBudget(max_sequences=32, max_tokens=32 * 64)
    with opened(
        build(), GenerationSpec(max_new_tokens=400, min_new_tokens=400), budget
    ) as generator:
        generator.submit(
            [Request(f"p{i}", 0, [6 + i], max_new_tokens=400 if i < 4 else 3) for i in range(32)]
        )
        while not generator.idle:
            generator.step()
            assert held_tokens(generator) < budget.max_tokens + VECTOR


def test_a_batch_that_fits_is_never_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    monkeypatch.setattr(KVCache, "_reshape", lambda *given: moved.append(1))
    with opened(
        build(dtype=torch.float32), GenerationSpec(max_new_tokens=90, min_new_tokens=90)
    ) as generator:
        if not generator._scheduler.blocks.reserves_ahead:
            pytest.skip("weft's kernels were not compiled, and a cache is zeroed")
        generator.submit([Request(f"p{i}", 0, [6 + i] * (3 + 20 * i)) for i in range(5)])
        drain(generator)
    assert not moved


def test_the_output_matrix_is_made_wide_once_for_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 on a CPU, where the logits are a product in float32; with new weights once more."""
    copies: list[int] = []

    def counted(right: torch.Tensor) -> torch.Tensor | None:
        copies.append(right.numel())
        return prepare_wide(right)

    monkeypatch.setattr("weft.engine.generation.generate.prepare_wide", counted)
    monkeypatch.setattr("weft.kernels.products._widen", lambda *_: pytest.fail("a copy in a step"))
    network, spec = (
        build(dtype=torch.bfloat16),
        GenerationSpec(max_new_tokens=20, min_new_tokens=20),
    )
    assert network.output_matrix is not None
    with opened(network, spec) as generator:
        generator.submit([Request("a", 0, [6, 7, 8])])
        for _ in range(5):
            generator.step()
        assert copies == [network.output_matrix.numel()]
        generator.weights_changed(8)
        drain(generator)
    assert len(copies) == 2


def test_a_cache_is_resized_both_ways() -> None:
    cache = KVCache(build().config, "cpu", torch.float64, slots=2, room=VECTOR)
    cache.allocate(2)
    for stored in (*cache.keys, *cache.values):
        stored.copy_(torch.randn_like(stored))
    before, cache.used[:] = [t[:, :, :5].clone() for t in cache.keys], 5
    cache.resize(7, 2 * VECTOR)
    assert (cache.num_slots, cache.capacity, cache.used.tolist()) == (
        7,
        2 * VECTOR,
        [5, 5, 0, 0, 0, 0, 0],
    )
    cache.resize(2, VECTOR)
    assert (cache.num_slots, cache.capacity, cache.used.tolist()) == (2, 2 * VECTOR, [5, 5])
    assert all(torch.equal(now[:, :, :5], old) for now, old in zip(cache.keys, before, strict=True))
    with pytest.raises(AssertionError, match="2 slots are active, 1 are too few"):
        cache.resize(1, VECTOR)


def test_prefixes_go_with_the_last_that_could_use_them() -> None:
    with opened(build(), GenerationSpec(max_new_tokens=3, min_new_tokens=3)) as generator:
        generator.submit([Request("a", k, LONG) for k in range(6)])
        generator.step()
        assert len(generator._prefill_caches) == 1
        drain(generator)
        assert not generator._prefill_caches and not generator._scheduler.prefixes
        assert held_tokens(generator) == 0

        generator.submit([Request("b", k, LONG) for k in range(6)])
        generator.step()
        generator.abort(["b"])
        assert not generator._prefill_caches and held_tokens(generator) == 0


def test_a_prefix_stays_for_those_that_wait() -> None:
    """Two run, and end in one step; those that wait begin in the next one without computing the
    prefix again.
    """
    budget = GenerationBudget(max_sequences=2)
    with opened(build(), GenerationSpec(max_new_tokens=2, min_new_tokens=2), budget) as generator:
        generator.submit([Request("a", k, LONG) for k in range(6)])
        generator.step()
        [first] = generator._prefill_caches
        generator.step()
        assert not len(generator._batch) and not generator.idle
        assert list(generator._prefill_caches) == [first]
        generator.step()
        assert list(generator._prefill_caches) == [first]


def test_a_closed_generator_holds_nothing() -> None:
    with opened(
        build(),
        GenerationSpec(max_new_tokens=30, min_new_tokens=30),
        GenerationBudget(max_prefill_tokens=120),
    ) as generator:
        generator.submit([Request("a", k, LONG) for k in range(6)])
        generator.step()
        generator.submit([Request("b", 0, np.random.default_rng(0).integers(6, 60, 400).tolist())])
        generator.step()
        caches = [generator._cache, *generator._prefill_caches.values()]
        assert len(caches) == 3 and held_tokens(generator) > 500
    assert (
        held_tokens(generator) == 0 and generator._cache is None and not generator._prefill_caches
    )
    assert all(isinstance(cache, KVCache) and not cache.keys for cache in caches)


def test_the_default_budget_heeds_a_containers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = build().config
    free = choose_default_budget(config, CPU, torch.float32).max_tokens
    limit = read_memory_bytes(CPU) // 8
    monkeypatch.setattr("weft.engine.device.read_cgroup_limits", lambda: [limit, 1 << 62])
    assert read_memory_bytes(CPU) == limit
    assert choose_default_budget(config, CPU, torch.float32).max_tokens == pytest.approx(
        free / 8, abs=1
    )
