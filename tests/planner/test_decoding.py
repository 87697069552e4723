"""Decode steps of a generation, against hand-worked cases and the generator's scheduler."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.decoders import SMALL, compute_seconds
from weft.engine.generation.blocks import PageManager
from weft.engine.generation.scheduler import GenerationBudget, Scheduler, Sequence
from weft.models.kv.pages import PAGE as ENGINE_PAGE
from weft.planner import decoding
from weft.planner.cost import CallWorkload, estimate_call
from weft.planner.decoding import DecodingPlan, plan_decoding
from weft.planner.devices import GIB, DeviceRates
from weft.topology import Layout, Mesh

PAGE = 16


def test_pages_are_those_of_the_engine() -> None:
    assert decoding.PAGE == ENGINE_PAGE


def plan(sequences: int, together: int, mean: int, longest: int | None, room: int) -> DecodingPlan:
    return plan_decoding(
        sequences, together, prompt=60, mean=mean, longest=longest, samples=1, room=room
    )


def test_the_longest_answer_sets_the_steps_and_the_batch_shrinks() -> None:
    """Answers of 20 tokens on average and 40 at most: half of the batch is left half way."""
    steps = plan(8, 8, 20, 40, 10**6).steps
    assert sum(count for count, _, _ in steps) == 40
    # Eight groups of five steps with 7.5, 6.5, ... sequences; the last has at least one.
    assert sum(count * batch for count, batch, _ in steps) == 8 * 20 + 5 * 0.5
    assert steps[0][1] > steps[4][1] > steps[-1][1] == 1.0
    # All of one length: the batch stays.
    alike = plan(8, 8, 40, None, 10**6)
    assert {batch for _, batch, _ in alike.steps} == {8.0} and alike.preemptions == 0
    # Twice as many as fit: a full batch until the last eight have begun.
    rounds = plan(16, 8, 20, 40, 10**6).steps
    assert rounds[0] == (20.0, 8.0, 70.0) and rounds[1:] == steps


def run_scheduler(
    sequences: int, together: int, prompt: int, lengths: list[int], room: int
) -> tuple[int, int, int]:
    """Return the scheduler's numbers of steps, preemptions, and tokens computed again."""
    budget = GenerationBudget(together, room, 10**9)
    scheduler = Scheduler(budget, PageManager(together, room, PAGE, least_spared=None))
    for number in range(sequences):
        own = tuple(range(number * prompt, (number + 1) * prompt))
        scheduler.submit(Sequence(str(number), 0, own, lengths[number]))
    steps = computed = 0
    while not scheduler.idle:
        done = scheduler.plan_step()
        steps += 1
        sampled = list(done.decodes)
        for chunk in done.chunks:
            computed += chunk.stop - chunk.start
            sampled += chunk.prefill.sequences
        for each in sampled:
            each.tokens.append(0)
            if len(each.tokens) >= each.limit:
                scheduler.finish(each)
    return steps, scheduler.num_preempted, computed - sequences * prompt


@pytest.mark.parametrize("room", [1200, 2500])
@pytest.mark.parametrize(("mean", "longest"), [(128, 128), (80, 256)])
def test_preemption_is_that_of_the_scheduler(
    room: int, mean: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 sequences in a cache that has room for a few of them at their longest."""
    monkeypatch.setattr(decoding, "PAGE", PAGE)
    plan_decoding.cache_clear()
    found = plan_decoding(64, 32, prompt=40, mean=mean, longest=longest, samples=1, room=room)
    plan_decoding.cache_clear()
    power = (longest - mean) / mean
    lengths = [max(1, round(longest * ((number + 0.5) / 64) ** power)) for number in range(64)]
    decoding.random.Random(decoding.SEED).shuffle(lengths)
    steps, preemptions, again = run_scheduler(64, 32, 40, lengths, room)
    assert sum(count for count, _, _ in found.steps) == pytest.approx(steps, rel=0.12)
    tokens = sum(count * batch for count, batch, _ in found.steps)
    assert tokens == pytest.approx(sum(lengths), rel=0.05)
    assert preemptions > 0
    assert found.preemptions == pytest.approx(preemptions, rel=0.5)
    assert found.computed_again == pytest.approx(again, rel=0.45)


def test_a_small_cache_takes_longer() -> None:
    """The limit is the one that the user set, or a quarter of the memory."""
    rates = DeviceRates("hand", 1e12, 1e9, 1e9, 1e8, 0.0, 0.0, 64 * GIB, 128, per_node=4)
    load = CallWorkload("generate", 64, 200, 2000)
    mesh = Mesh(Layout(), (0,))
    token = 2 * 4 * 50 * 4  # keys and values of four layers
    roomy = compute_seconds(SMALL, load, mesh, rates)
    seconds = [
        compute_seconds(SMALL, replace(load, cache_bytes=size * 3000 * token), mesh, rates)
        for size in (100, 32, 8)
    ]
    assert seconds[0] == roomy < seconds[1] < seconds[2]
    small = replace(rates, capacity=4 * 8 * 3000 * token)
    assert compute_seconds(SMALL, load, mesh, small) == seconds[2]
    # What is computed again has a part of its own.
    fast = replace(rates, flops=1e9)
    parts = [
        estimate_call(SMALL, replace(load, cache_bytes=size * 3000 * token), mesh, fast).parts
        for size in (100, 8)
    ]
    assert parts[0]["preemption"] == 0.0 < parts[1]["preemption"]
    # Ranks share the sequences.
    both = compute_seconds(
        SMALL,
        replace(load, cache_bytes=32 * 3000 * token),
        Mesh(Layout(data=2, fsdp=1), (0, 1)),
        rates,
    )
    assert both < seconds[1]
