"""Generators that take turns sample what one generator samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.engine.generation.common import CPU, EOS, Key, assert_same_rows, build, generate, tokens
from weft.engine.base import Request, TokenEvent
from weft.engine.generation.interleaved import InterleavedGenerator, open_interleaved
from weft.engine.generation.sampling import sample_locally
from weft.engine.generation.scheduler import GenerationBudget
from weft.engine.spec import GenerationSpec
from weft.errors import RunError

SPEC = GenerationSpec(max_new_tokens=30, seed=3, top_k=20, record_support=True)
REQUESTS = [Request(f"p{i}", k, [9 + i] * (1 + 7 * i), step=2) for i in range(5) for k in range(2)]
Events = dict[Key, list[TokenEvent]]


@contextmanager
def opened(count: int) -> Iterator[InterleavedGenerator]:
    budget = GenerationBudget(max_sequences=8, max_tokens=4000)
    with open_interleaved(
        build(),
        SPEC,
        count,
        device=CPU,
        version=7,
        eos_ids=[EOS],
        budget=budget,
        agree_on_tokens=sample_locally,
    ) as generator:
        yield generator


def drain(generator: InterleavedGenerator, events: Events) -> Events:
    while not generator.idle:
        for event in generator.step():
            events.setdefault((event.id, event.k), []).append(event)
    return events


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_any_number_samples_the_same(count: int) -> None:
    with opened(count) as generator:
        generator.submit(REQUESTS)
        assert_same_rows(drain(generator, {}), generate(build(), SPEC, REQUESTS))


def test_work_is_spread_and_an_id_stays_together() -> None:
    with opened(2) as generator:
        generator.submit(REQUESTS[:8])
        homes = [set(one._sampling_keys) for one in generator._generators]
        assert [len(home) for home in homes] == [4, 4]
        assert not {id for id, _ in homes[0]} & {id for id, _ in homes[1]}


def test_what_was_aborted_goes_on_exactly() -> None:
    expected, events = generate(build(), SPEC, REQUESTS), Events()
    with opened(3) as generator:
        generator.submit(REQUESTS)
        for _ in range(7):
            for event in generator.step():
                events.setdefault((event.id, event.k), []).append(event)
        partials = generator.abort(["p0", "p1", "p4", "unknown"])
        assert partials
        drain(generator, events)
        for partial in partials:
            assert tokens(events).get((partial.id, partial.k), []) == list(partial.tokens)
        known = {(request.id, request.k): request for request in REQUESTS}
        again = [known[p.id, p.k] for p in partials]
        generator.submit(
            [
                Request(r.id, r.k, r.prompt, r.step, generated=p)
                for r, p in zip(again, partials, strict=True)
            ]
        )
        assert_same_rows(drain(generator, events), expected)
        assert not generator._generator_by_id and not generator._num_unfinished


def test_steps_that_had_begun_carry_the_old_version() -> None:
    with opened(2) as generator:
        generator.submit(REQUESTS)
        seen = generator.step()
        generator.weights_changed(8, keep_kv=True)
        old = [event.version for event in seen + generator.step()]
        assert old and set(old) == {7}
        assert {event.version for event in generator.step()} == {8}


def test_a_request_given_twice_is_found() -> None:
    with opened(3) as generator, pytest.raises(RunError, match="p1"):
        generator.submit([REQUESTS[0], REQUESTS[2], REQUESTS[2]])
