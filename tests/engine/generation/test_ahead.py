"""Decode steps that are launched before the tokens of the last step are read: completions are those
without it, whatever ends, joins, is aborted or changes in between.

A CPU computes a step at once, so a buffer that is written too early shows here; one that is read
too late does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.gpu.varlen_contract import varlen_attn
from weft.engine.base import Request
from weft.engine.generation import ahead
from weft.engine.generation.ahead import SampledSteps
from weft.engine.generation.decode_batch import UNIFORMS_PER_BLOCK, DecodeBatch
from weft.engine.generation.generate import BatchGenerator
from weft.engine.generation.scheduler import GenerationBudget
from weft.engine.generation.scheduler import Sequence as Live
from weft.engine.spec import GenerationSpec
from weft.kernels import flash
from weft.models.network.config import Experts
from weft.randomness import derive_key

from .common import LLAMA, build, drain, opened, requests, tokens, use_pages

SPEC = GenerationSpec(max_new_tokens=12, seed=3)
BUDGET = GenerationBudget(max_sequences=6, max_tokens=2000, max_prefill_tokens=100)
TIGHT = GenerationBudget(max_sequences=4, max_tokens=200, max_prefill_tokens=64)
Tokens = dict[Any, list[int]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Generators use pages, which flash attention reads; how many steps were launched "ahead" and
    otherwise ("alone").
    """
    counts: Counter[str] = Counter()
    launch = SampledSteps._launch

    def counted(self: SampledSteps, *arguments: Any) -> Any:
        launched = launch(self, *arguments)
        if launched is not None:
            counts["ahead" if len(arguments) == 4 else "alone"] += 1
        return launched

    monkeypatch.setattr(SampledSteps, "_launch", counted)
    use_flash(monkeypatch)
    use_pages(monkeypatch)
    return counts


def use_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "serves", lambda *_: True)
    monkeypatch.setattr(flash, "find_features", lambda: flash.FlashFeatures(True, True))
    monkeypatch.setattr(flash, "load_kernel", lambda: varlen_attn)


def run_twice(
    launches: Counter[str], spec: GenerationSpec, run: Callable[[GenerationSpec], Tokens]
) -> tuple[Tokens, Counter[str]]:
    """Run with steps ahead and without; the equal tokens, and the launches of the first run."""
    found = run(replace(spec, decode_ahead=True))
    counts = Counter(launches)
    launches.clear()
    assert run(replace(spec, decode_ahead=False)) == found
    assert launches["ahead"] == 0 < counts["ahead"]
    launches.clear()
    return found, counts


def test_steps_are_launched_before_the_last_tokens_are_read(
    launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt, one step alone, and each later step while the one before is not read yet."""
    log: list[str] = []
    monkeypatch.setattr(ahead, "record_event", lambda _: log.append("launch") or wait)

    def wait() -> None:
        log.append("wait")

    with opened(build(), SPEC, BUDGET, eos=()) as generator:
        generator.submit([Request(id="a", k=0, prompt=[7, 8, 9])])
        rows = drain(generator)
    assert len(rows["a", 0]) == SPEC.max_new_tokens
    steps = SPEC.max_new_tokens - 1  # the prompt's last state gives the first token
    assert log == ["launch"] + ["launch", "wait"] * (steps - 1) + ["wait"]
    assert launches == {"alone": 1, "ahead": steps - 1}, "nothing is computed past the limit"


@pytest.mark.parametrize("change", ["close", "weights"])
def test_a_step_that_is_discarded_is_waited_for(
    change: str, launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still writes to pages and results."""
    pending: list[object] = []

    def record(_: torch.device) -> Callable[[], None]:
        pending.append(mark := object())
        return lambda: pending.remove(mark)

    monkeypatch.setattr(ahead, "record_event", record)
    with opened(build(), SPEC, BUDGET, eos=()) as generator:
        generator.submit([Request(id="a", k=0, prompt=[7, 8, 9])])
        for _ in range(4):
            generator.step()
        assert len(pending) == 1
        if change == "weights":
            generator.weights_changed(8)
            assert not pending
    assert not pending


KINDS = {
    "ends": SPEC,
    "temperature": replace(SPEC, temperature=0.6),
    "greedy": replace(SPEC, greedy=True),
    "minimum": replace(SPEC, min_new_tokens=5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_completions_are_the_same(launches: Counter[str], kind: str) -> None:
    """More prompts than fit, which join as others end; most steps are ahead once none joins."""
    network = build()

    def run(spec: GenerationSpec) -> Tokens:
        with opened(network, spec, BUDGET) as generator:
            generator.submit(requests())
            return tokens(drain(generator))

    found, _ = run_twice(launches, KINDS[kind], run)
    assert kind == "greedy" or min(map(len, found.values())) < SPEC.max_new_tokens


def test_short_memory(launches: Counter[str]) -> None:
    network = build()

    def run(spec: GenerationSpec) -> Tokens:
        with opened(network, spec, TIGHT) as generator:
            generator.submit(requests(3, 2))
            found = tokens(drain(generator))
            assert generator._caches._pool.pages.num_used == 0  # type: ignore[attr-defined]
        return found

    run_twice(launches, SPEC, run)


@pytest.mark.parametrize("keeps", [False, True])
def test_aborts_and_new_weights_between_steps(launches: Counter[str], keeps: bool) -> None:
    """What a step ahead sampled for an aborted sequence, or with the weights before, is forgotten:
    its tokens are sampled again.
    """
    before, after = build(), build(seed=1)
    network = build()

    def run(spec: GenerationSpec) -> Tokens:
        network.load_state_dict(before.state_dict())
        with opened(network, spec, BUDGET, eos=()) as generator:
            generator.submit(requests(3, 2))
            events: Tokens = {}
            collect(events, generator, 6)
            for partial in generator.abort(["0"]):
                assert events.pop((partial.id, partial.k)) == list(partial.tokens)
                generator.submit([replace(requests(3, 2)[partial.k], generated=partial)])
                events[partial.id, partial.k] = list(partial.tokens)
            collect(events, generator, 3)
            network.load_state_dict(after.state_dict())
            generator.weights_changed(8, keep_kv=keeps)
            collect(events, generator, 3)
            generator.abort(["1"])
            collect(events, generator, 100)
            assert generator.idle
        return events

    found, _ = run_twice(launches, replace(SPEC, max_new_tokens=30), run)
    assert len(found["0", 1]) == 30 > len(found["1", 0])


def collect(events: Tokens, generator: BatchGenerator, steps: int) -> None:
    for _ in range(steps):
        for event in generator.step():
            events.setdefault((event.id, event.k), []).append(event.token)


def test_requests_that_are_submitted_late_and_other_settings(launches: Counter[str]) -> None:
    """Rows of a limit that a graph does not sample join a step that is ahead."""
    network, own = build(), replace(SPEC, top_k=3)

    def run(spec: GenerationSpec) -> Tokens:
        with opened(network, spec, BUDGET) as generator:
            generator.submit(requests(2, 2)[:2])
            events: Tokens = {}
            collect(events, generator, 5)
            generator.submit([Request(id="late", k=0, prompt=[5, 6, 7], sampling=own)])
            collect(events, generator, 100)
        return events

    found, _ = run_twice(launches, replace(SPEC, max_new_tokens=20), run)
    assert ("late", 0) in found


def test_a_step_of_sequences_that_are_gone_is_not_used_for_the_next_ones(
    launches: Counter[str],
) -> None:
    """All sequences are aborted while a step of theirs is ahead, and others follow."""
    network = build()

    def run(spec: GenerationSpec) -> Tokens:
        with opened(network, spec, BUDGET, eos=()) as generator:
            generator.submit(requests(2, 2))
            events: Tokens = {}
            collect(events, generator, 6)
            assert len(generator.abort(["0", "1"])) == 4 and generator.idle
            generator.submit([Request(id="next", k=0, prompt=[5, 6, 7])])
            collect(events, generator, 100)
        return events

    found, _ = run_twice(launches, SPEC, run)
    assert len(found["next", 0]) == SPEC.max_new_tokens


def test_experts_launch_nothing_ahead(launches: Counter[str]) -> None:
    """Their host waits for the device in each step, and would deliver tokens a step late."""
    experts = Experts(num=4, top_k=2, intermediate_size=16)
    with opened(build(replace(LLAMA, experts=experts)), SPEC, BUDGET) as generator:
        generator.submit(requests(2, 2))
        drain(generator)
    assert launches["alone"] > 0 == launches["ahead"]


def test_ranks_that_agree_on_tokens_launch_nothing_ahead(launches: Counter[str]) -> None:
    """A step ahead would start from this rank's tokens."""
    from weft.engine.generation.generate import open_generator
    from weft.engine.generation.sampling import sample_locally

    with open_generator(
        build(),
        SPEC,
        device=torch.device("cpu"),
        version=1,
        eos_ids=(),
        budget=BUDGET,
        agree_on_tokens=lambda draw, rows: sample_locally(draw, rows),
    ) as generator:
        generator.submit(requests(2, 2))
        drain(generator)
    assert launches["alone"] > 0 == launches["ahead"]


def test_pages_that_are_not_reserved_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every moment, rows hold no more pages than the scheduler has counted."""
    use_flash(monkeypatch)
    made = use_pages(monkeypatch, page=2)
    budget = GenerationBudget(max_sequences=5, max_tokens=420, max_prefill_tokens=64)
    with opened(build(), SPEC, budget, eos=()) as generator:
        generator.submit(requests(4, 3, shared=65))
        while not generator.idle:
            generator.step()
            assert made[0]._pool.pages.num_used <= made[0].blocks.num_used


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(
        st.sampled_from([0, 1, 62, 63, 64, 100, 127, UNIFORMS_PER_BLOCK * 3 - 1]),
        min_size=1,
        max_size=5,
    ),
    skips=st.lists(st.integers(0, 1), min_size=1, max_size=6),
)
def test_numbers_of_a_step_ahead_are_those_of_the_step(counts: list[int], skips: list[int]) -> None:
    """Whichever numbers were asked for before, of rows of any length."""
    rows, fresh = batch_of(counts), batch_of([count + 1 for count in counts])
    expected = {0: batch_of(counts).compute_uniforms(1), 1: fresh.compute_uniforms(1)}
    for skip in skips:
        np.testing.assert_array_equal(rows.compute_uniforms(1, skip=skip), expected[skip])


def batch_of(counts: list[int]) -> DecodeBatch:
    rows = DecodeBatch()
    for k, count in enumerate(counts):
        live = Live("a", k, (1,), 10_000, [1] * count, [0.0] * count, [0] * count, [()] * count)
        rows.add(live, 0, derive_key(0, "sample", 0, "a", k), watched=False)
    return rows
