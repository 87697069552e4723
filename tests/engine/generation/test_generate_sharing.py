"""Shared prefixes and prompts that take several steps: the same completions as without, less work,
less memory.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.engine.generation.common import (
    CPU,
    EOS,
    LLAMA,
    Key,
    Spy,
    assert_logprobs,
    assert_same_rows,
    build,
    drain,
    generate,
    opened,
    tokens,
)
from weft.engine.base import Request, TokenEvent
from weft.engine.generation.generate import open_generator
from weft.engine.generation.scheduler import GenerationBudget
from weft.engine.spec import GenerationSpec
from weft.models.network.config import TransformerConfig

WIDE = dataclasses.replace(LLAMA, num_heads=2, num_kv_heads=2)


def asked(system: int = 130, prompts: int = 3, samples: int = 4) -> list[Request]:
    """Samples of a long prompt, prompts after a system prompt, and one that has nothing in common
    with them.
    """
    random = np.random.default_rng(3)
    head, whole = (
        random.integers(6, 61, size=system).tolist(),
        random.integers(6, 61, size=150).tolist(),
    )
    made = [Request("whole", k, whole, step=1) for k in range(samples)]
    made += [
        Request(f"p{i}", 0, head + random.integers(6, 61, size=3 + 9 * i).tolist(), step=1)
        for i in range(prompts)
    ]
    return [*made, Request("other", 0, random.integers(6, 61, size=100).tolist(), step=1)]


BUDGETS = {
    "together": GenerationBudget(),
    "two at once": GenerationBudget(max_sequences=2),
    "parts of prompts": GenerationBudget(max_prefill_tokens=37),
    "short memory": GenerationBudget(max_tokens=620),
    "both": GenerationBudget(max_tokens=620, max_prefill_tokens=23),
}


@pytest.mark.default_cases("grouped")
@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize("config", [LLAMA, WIDE], ids=["grouped", "all heads"])
def test_completions_are_those_of_prompts_computed_apart(
    name: str, config: TransformerConfig
) -> None:
    network, spec = (
        build(config),
        GenerationSpec(max_new_tokens=50, seed=3, top_p=0.9, record_support=True),
    )
    apart: dict[Key, list[TokenEvent]] = {}
    for request in asked():
        apart |= generate(network, spec, [request])
    together = generate(network, spec, asked(), BUDGETS[name])
    assert_same_rows(apart, together)


def test_many_prompts_of_which_each_has_one_token_left() -> None:
    network, spec, random = build(), GenerationSpec(max_new_tokens=4), np.random.default_rng(5)
    made = [random.integers(6, 61, size=70).tolist() for _ in range(16)]
    requests = [Request(f"p{i}", k, prompt) for i, prompt in enumerate(made) for k in range(5)]
    apart: dict[Key, list[TokenEvent]] = {}
    for request in requests:
        apart |= generate(network, spec, [request])
    assert tokens(generate(network, spec, requests)) == tokens(apart)


@pytest.mark.parametrize("name", ["together", "parts of prompts"])
@pytest.mark.parametrize("seed", range(3))
def test_log_probs_are_those_that_training_recomputes(name: str, seed: int) -> None:
    network, spec = (
        build(dtype=torch.float32, seed=seed),
        GenerationSpec(max_new_tokens=60, seed=seed),
    )
    rows = generate(network, spec, asked(), BUDGETS[name])
    assert sum(map(len, rows.values())) > 100
    assert_logprobs(network, rows, asked(), spec)


def test_what_is_shared_is_computed_once() -> None:
    spy = Spy(build())
    with open_generator(
        spy,
        GenerationSpec(max_new_tokens=3, min_new_tokens=3),
        device=CPU,
        version=0,
        eos_ids=[EOS],
    ) as g:
        g.submit(asked())
        drain(g)
    # 149 tokens of the whole prompt and 128 of the system prompt, each in a pass of its own; then 1
    # token for all samples of the first, the rest of three others, and the one that shares nothing.
    assert spy.passes == [149, 128, 1 + (5 + 14 + 23) + 100, 8, 8]


def test_a_prompt_in_parts_leaves_decodes_running() -> None:
    spy = Spy(build())
    spec, budget = (
        GenerationSpec(max_new_tokens=30, min_new_tokens=30),
        GenerationBudget(max_prefill_tokens=40),
    )
    with open_generator(spy, spec, device=CPU, version=0, eos_ids=[], budget=budget) as generator:
        generator.submit([Request("a", 0, [9] * 4)])
        generator.step()
        generator.submit([Request("b", 0, list(range(6, 56)) * 2)])
        spy.passes.clear()
        seen = [[event.id for event in generator.step()] for _ in range(4)]
    assert seen == [["a"], ["a"], ["a", "b"], ["a", "b"]]
    assert spy.passes == [4, 40, 4, 40, 4, 20, 4]


def test_weights_that_change_and_aborts_in_the_middle_of_a_prompt() -> None:
    network, spec, budget = (
        build(),
        GenerationSpec(max_new_tokens=20, seed=2),
        GenerationBudget(max_prefill_tokens=37),
    )
    expected = tokens(generate(network, spec, asked()))
    with opened(network, spec, budget) as generator:
        generator.submit(asked())
        assert generator.step() == [], "a part of the first prompt"
        generator.weights_changed(1, keep_kv=False)
        generator.step()
        [*partials] = generator.abort(["whole", "p1"])
        assert len(partials) == 5 and not any(partial.tokens for partial in partials)
        rest = drain(generator)
        generator.submit([request for request in asked() if request.id in ("whole", "p1")])
        rest |= drain(generator)
    assert tokens(rest) == expected


def test_many_samples_of_a_long_prompt_take_little_memory() -> None:
    network, prompt = build(), list(range(6, 56)) * 8
    with opened(network, GenerationSpec(max_new_tokens=20, min_new_tokens=20)) as generator:
        generator.submit([Request("a", k, prompt) for k in range(16)])
        generator.step()
        caches = [generator._get_cache(), *generator._prefill_caches.values()]
        held = sum(cache.num_bytes for cache in caches)
        per_token = caches[0].num_bytes / caches[0].num_slots / caches[0].capacity
    assert held < per_token * 2 * (400 + 16 * 64) < per_token * 16 * 400
