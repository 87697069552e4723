"""Steps that are computed ahead: what a generator says is the same as one step at a time, whatever
comes in between.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.generation.common import (
    CPU,
    LLAMA,
    Key,
    assert_logprobs,
    build,
    drain,
    generate,
    opened,
)
from weft import randomness
from weft.engine.base import Request, TokenEvent
from weft.engine.generation import passes
from weft.engine.generation.caches import SlotCaches
from weft.engine.generation.decode_batch import DecodeBatch
from weft.engine.generation.generate import BatchGenerator
from weft.engine.generation.passes import DecoderPasses, MultiStepDecoder
from weft.engine.generation.scheduler import GenerationBudget
from weft.engine.generation.scheduler import Sequence as Live
from weft.engine.spec import GenerationSpec
from weft.kernels import CachedForward, DrawParameters, cpu_library
from weft.models.kv.slots import KVCache
from weft.models.network.transformer import Transformer

pytestmark = pytest.mark.skipif(
    cpu_library() is None, reason="no compiler: nothing is computed ahead"
)
SPEC = GenerationSpec(max_new_tokens=150, seed=3)
# ends that are likely, and may not come before
LATE = replace(SPEC, stop_ids=list(range(5, 40)), min_new_tokens=30)
FAR = 1e9  # seconds: as many steps as there can be


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, steps go ahead."""
    monkeypatch.setattr(passes, "MAX_SECONDS", FAR)


def requests(count: int = 5, samples: int = 2) -> list[Request]:
    return [
        Request(f"p{i}", k, [7 + i] * (1 + 9 * i)) for i in range(count) for k in range(samples)
    ]


def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MultiStepDecoder, "take", lambda *given, **named: None)


@pytest.mark.parametrize(
    "spec", [SPEC, replace(SPEC, temperature=0.7), replace(SPEC, stop_ids=[9, 11]), LATE]
)
def test_completions_are_the_same_to_the_bit(
    spec: GenerationSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, counts = build(dtype=torch.float32), list[int]()
    run = CachedForward.run_ahead

    def counted(*given: Any) -> tuple[Tensor, Tensor]:
        made = run(*given)
        counts.append(len(made[0]))
        return made

    monkeypatch.setattr(CachedForward, "run_ahead", counted)
    found = generate(network, spec, requests())
    assert max(counts) > 8, "steps were computed ahead"
    one_at_a_time(monkeypatch)
    assert found == generate(network, spec, requests())
    assert_logprobs(network, found, [requests()[4]], spec)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 9), min_size=4, max_size=30), st.booleans())
def test_the_same_whatever_comes_in_between(seed: int, choices: list[int], cramped: bool) -> None:
    """Requests that come and are aborted, weights that change, memory that is short, all between
    steps.
    """
    said = []
    for take in (MultiStepDecoder.take, lambda *given, **named: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MultiStepDecoder, "take", take)
            said.append(disturbed(seed, choices, cramped))
    assert said[0] == said[1]


def disturbed(seed: int, choices: list[int], cramped: bool) -> list[object]:
    draw, network, said = random.Random(seed), build(dtype=torch.float32), list[object]()
    other = build(dtype=torch.float32, seed=1).state_dict()
    budget = (
        GenerationBudget(max_sequences=6, max_tokens=400, max_prefill_tokens=64)
        if cramped
        else None
    )
    with opened(network, replace(LATE if seed % 2 else SPEC, seed=seed), budget) as generator:
        for number, choice in enumerate(choices):
            if choice < 3 or generator.idle:
                new = [
                    Request(f"n{number}", k, [draw.randrange(61)] * draw.randint(1, 40))
                    for k in range(draw.randint(1, 3))
                ]
                generator.submit(
                    [replace(request, max_new_tokens=draw.randint(1, 90)) for request in new]
                )
            elif choice == 3:
                said += generator.abort([f"n{draw.randrange(number)}"])
            elif choice == 4:
                network.load_state_dict(other)
                generator.weights_changed(number, keep_kv=draw.random() < 0.5)
            for _ in range(draw.choice([1, 2, 5, 20])):
                said.append(generator.step())
        said.append(drain(generator))
    return said


def decode_steps(
    network: Transformer, prompts: list[list[int]], tokens: list[int], draws: DrawParameters
) -> tuple[Tensor, Tensor]:
    """Tokens and log-probs [n, R] of the steps that `draws` has numbers for, after prompts and a
    token each.
    """
    with torch.no_grad():
        cache, passes = (
            KVCache(network.config, CPU, torch.float32, slots=len(prompts), room=64),
            DecoderPasses(network),
        )
        passes.compute_hidden(
            cache.extend(cache.allocate(len(prompts)), [torch.tensor(prompt) for prompt in prompts])
        )
        return passes.run_ahead(cache.extend(np.arange(len(prompts)), torch.tensor(tokens)), draws)


def test_ends_that_may_not_come_yet() -> None:
    """Each row's come after its own number of steps, and go on to count for the log-probs before."""
    network, ends = build(dtype=torch.float32), torch.arange(61) < 60
    uniforms = (
        torch.rand(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.9
    )

    def drawn(early: list[int]) -> tuple[Tensor, Tensor]:
        draws = DrawParameters(uniforms, ends, torch.tensor(early), 1.0)
        return decode_steps(network, [[7, 8], [9], [7]], [3, 4, 5], draws)

    found, logprobs = drawn([30, 7, -2])
    assert found.shape == (1, 3) and found[0, 0] == found[0, 1] == 60 != found[0, 2]
    found, logprobs = drawn([30, 7, 12])
    assert (
        (found[:7] == 60).all()
        and found[7, 1] != 60
        and found[7, 0] == found[7, 2] == 60
        and len(found) == 8
    )
    assert (logprobs < -1).all(), "one of 61 tokens, though no other may come"


def test_a_step_says_one_token_of_each_completion() -> None:
    with opened(build(dtype=torch.float32), SPEC, eos=()) as generator:
        generator.submit(requests(3, 1))
        for _ in range(60):
            assert [event.id for event in generator.step()] == ["p0", "p1", "p2"]


def test_what_was_forgotten_is_computed_again_with_the_new_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    after = build(dtype=torch.float32, seed=1)

    def changed() -> dict[Key, list[TokenEvent]]:
        network = build(dtype=torch.float32)
        with opened(network, SPEC, eos=()) as generator:
            generator.submit(requests())
            for _ in range(10):
                generator.step()
            network.load_state_dict(after.state_dict())
            generator.weights_changed(8, keep_kv=True)
            rest = drain(generator)
        assert {event.version for row in rest.values() for event in row} == {8}
        return rest

    found = changed()
    one_at_a_time(monkeypatch)
    assert found == changed()


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, greedy=True),
        replace(SPEC, top_k=4),
        replace(SPEC, top_p=0.5),
        replace(SPEC, min_p=0.1),
        replace(SPEC, record_support=True),
    ],
)
def test_draws_that_need_more_are_made_one_at_a_time(spec: GenerationSpec) -> None:
    assert not reaches(spec)
    assert reaches(SPEC)


def reaches(spec: GenerationSpec) -> bool:
    with opened(build(dtype=torch.float32), spec, eos=()) as generator:
        generator.submit(requests(2, 1))
        return max(steps_at_once(generator, 12)) > 1


def pending(generator: BatchGenerator) -> int:
    """Steps that are computed and not taken."""
    assert generator._multi_step is not None
    return len(generator._multi_step._pending_tokens)


def test_requests_with_settings_of_their_own_are_drawn_one_at_a_time() -> None:
    with opened(build(dtype=torch.float32), SPEC, eos=()) as generator:
        generator.submit([*requests(2, 1), Request("own", 0, [8], sampling=replace(SPEC, top_k=3))])
        for _ in range(20):
            generator.step()
            assert not pending(generator)


def test_rows_with_other_settings_that_are_gone_are_forgotten() -> None:
    own = Request("own", 0, [8], sampling=replace(SPEC, top_k=3), max_new_tokens=5)
    with opened(build(dtype=torch.float32), SPEC, eos=()) as generator:
        generator.submit([*requests(2, 1), own])
        assert max(steps_at_once(generator, 30)) > 8


def test_networks_that_the_kernel_does_not_draw_from(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(build(replace(LLAMA, activation="gelu"), torch.float32), SPEC) as generator:
        assert generator._multi_step is None
    turned, capped = (
        build(dtype=torch.float32),
        build(replace(LLAMA, final_softcap=3.0), torch.float32),
    )
    turned.head.weight = torch.nn.Parameter(turned.head.weight.data.T.contiguous().T)
    found = []
    for network in (turned, capped):
        with opened(network, SPEC, eos=()) as generator:
            generator.submit(requests(2, 1))
            assert steps_at_once(generator, 20) == {1}
        found.append(generate(network, SPEC, requests()))
    one_at_a_time(monkeypatch)
    assert found == [generate(network, SPEC, requests()) for network in (turned, capped)]


def steps_at_once(generator: BatchGenerator, count: int) -> set[int]:
    """How many were computed in each of `count` steps that are not taken from those before."""
    found = set()
    for _ in range(count):
        before = pending(generator)
        generator.step()
        if not before:
            found.add(pending(generator) + 1)
    return found


class Clock:
    """Each step takes `seconds`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds
        run, decoded = CachedForward.run_ahead, SlotCaches.decode

        def run_ahead(*given: Any) -> tuple[Tensor, Tensor]:
            made = run(*given)
            self.now += self.seconds * len(made[0])
            return made

        def one(*given: Any) -> torch.Tensor:
            self.now += self.seconds
            return decoded(*given)

        monkeypatch.setattr(passes, "MAX_SECONDS", 1.0)
        monkeypatch.setattr(passes.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(CachedForward, "run_ahead", run_ahead)
        monkeypatch.setattr(SlotCaches, "decode", one)


@pytest.mark.parametrize(("seconds", "most"), [(0.45, 2), (0.7, 1), (0.09, 11)])
def test_as_many_steps_at_once_as_the_time_allows(
    seconds: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are not to be seen later than `SECONDS`."""
    clock = Clock(monkeypatch, seconds)
    with opened(build(dtype=torch.float32), SPEC, eos=()) as generator:
        generator.submit(requests(2, 1))
        assert max(steps_at_once(generator, 40)) == most
        clock.seconds = 3.0  # another process takes the machine for a while
        assert max(steps_at_once(generator, 20)) <= most
        assert max(steps_at_once(generator, 10)) == 1
        clock.seconds = seconds
        assert max(steps_at_once(generator, 40)) == most


@pytest.mark.parametrize("every", [3, 5, 10])
def test_little_is_computed_in_vain(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where requests come steadily, an eighth of the steps beside those that it takes to find out."""
    computed = []
    run = CachedForward.run_ahead
    monkeypatch.setattr(
        CachedForward,
        "run_ahead",
        lambda *given: (made := run(*given), computed.append(len(made[0])))[0],
    )
    spec = replace(SPEC, max_new_tokens=700)
    with opened(build(dtype=torch.float32), spec, eos=()) as generator:
        generator.submit(requests(1, 1))
        for step in range(600):
            if step % every == 0:
                generator.submit([Request(f"short{step}", 0, [9], max_new_tokens=1)])
            generator.step()
    assert sum(computed) <= 600 * 1.125 + 64


def drawn_freely(uniforms: Tensor) -> DrawParameters:
    """No token ends any row."""
    never = torch.zeros(61, dtype=torch.bool), torch.zeros(uniforms.shape[1], dtype=torch.int64)
    return DrawParameters(uniforms, *never, 1.0)


def test_a_log_prob_that_is_not_finite_is_the_last() -> None:
    network, draws = (
        build(dtype=torch.float32),
        drawn_freely(torch.full((5, 2), 0.5, dtype=torch.float64)),
    )
    assert len(decode_steps(network, [[7, 8], [9]], [3, 4], draws)[0]) == 5
    with torch.no_grad():
        network.projection.weight[60] = float("nan")
    found, logprobs = decode_steps(network, [[7, 8], [9]], [3, 4], draws)
    assert found.shape == logprobs.shape == (1, 2) and logprobs.isnan().all()


def test_tokens_outside_the_vocabulary() -> None:
    with pytest.raises(IndexError, match="token 61 is outside the vocabulary of 61"):
        draws = drawn_freely(torch.zeros(2, 1, dtype=torch.float64))
        decode_steps(build(dtype=torch.float32), [[7, 8]], [61], draws)


@pytest.mark.parametrize("most", [1, 5, 200])
def test_the_numbers_of_rows_are_those_of_the_hash(most: int) -> None:
    """Rows that begin at other tokens, and one that comes later and takes another's place."""
    table, done = DecodeBatch(), {"a": 0, "b": 63, "c": 130}
    keys = {id: randomness.derive_key(1, "sample", 2, id, 0) for id in "abcd"}

    def add(id: str) -> None:
        table.add(
            Live(
                id,
                0,
                (1,),
                1000,
                tokens=[0] * done[id],
                logprobs=[0.0] * done[id],
                versions=[0] * done[id],
            ),
            0,
            keys[id],
            False,
        )

    for id in "abc":
        add(id)
    for step in range(150):
        if step == 70:
            table.remove(0)
            done["d"] = 5
            add("d")
        made = table.compute_uniforms(most)
        assert 1 <= len(made) <= most
        for row, id in enumerate(table.ids):
            expected = randomness.draw_uniforms(keys[id], done[id] + np.arange(len(made)))
            assert np.array_equal(made[:, row], expected)
        table.append_tokens(np.zeros(3, np.int64), np.zeros(3), 0, None)
        for id in table.ids:
            done[id] += 1


def test_completions_end_at_their_limits() -> None:
    limits = [3, 20, 21, 90]
    wanted = [Request(f"p{i}", 0, [9 + i], max_new_tokens=limit) for i, limit in enumerate(limits)]
    with opened(build(dtype=torch.float32), SPEC, eos=()) as generator:
        generator.submit(wanted)
        found = drain(generator)
    assert [len(found[request.id, 0]) for request in wanted] == limits
    assert all(row[-1].finish == "length" for row in found.values())
    assert all(event.finish is None for row in found.values() for event, _ in pairwise(row))
