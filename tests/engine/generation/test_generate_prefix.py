"""Generation with a trained prefix: what a forward pass of the same tokens says, over slots and
over pages, whatever else runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.engine.generation.common import (
    LLAMA,
    assert_logprobs,
    build,
    drain,
    generate,
    opened,
    tokens,
)
from tests.engine.generation.test_caches_pages import BUDGET, paged
from tests.engine.generation.test_generate_sharing import BUDGETS, asked
from weft.engine.base import Request
from weft.engine.generation.caches import PageCaches
from weft.engine.generation.scheduler import GenerationBudget
from weft.engine.spec import GenerationSpec
from weft.errors import DataError, RunError
from weft.models.network import lora
from weft.models.network.transformer import Transformer

COUNT = 6
CONFIG = replace(LLAMA, prefix_tokens=COUNT)
paged = paged  # the fixture


def prefixed(dtype: torch.dtype = torch.float32) -> Transformer:
    return build(CONFIG, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", BUDGETS)
def test_log_probs_are_those_that_training_recomputes(name: str, dtype: torch.dtype) -> None:
    network, spec = prefixed(dtype), GenerationSpec(max_new_tokens=20, seed=3)
    rows = generate(network, spec, asked(), BUDGETS[name])
    assert_logprobs(network, rows, asked(), spec)


@pytest.mark.parametrize("name", ["together", "both"])
def test_completions_are_those_of_prompts_alone(name: str) -> None:
    network, spec, apart = prefixed(torch.float64), GenerationSpec(max_new_tokens=20, seed=3), {}
    for request in asked():
        apart |= generate(network, spec, [request])
    assert tokens(generate(network, spec, asked(), BUDGETS[name])) == tokens(apart)
    plain = build(dtype=torch.float64)
    assert tokens(generate(plain, spec, asked())) != tokens(apart)


def test_pages_give_what_slots_give(paged: Callable[[], list[PageCaches]]) -> None:
    network, spec = prefixed(torch.float64), GenerationSpec(max_new_tokens=8, seed=3)
    slots = tokens(generate(network, spec, asked(), BUDGET))
    made = paged()
    assert tokens(generate(network, spec, asked(), BUDGET)) == slots
    assert len(made) == 1


def test_a_prefix_that_is_off_changes_nothing() -> None:
    network, spec = prefixed(torch.float64), GenerationSpec(max_new_tokens=8, seed=3)
    plain = build(dtype=torch.float64)
    with torch.no_grad():
        for mine, theirs in zip(
            (p for n, p in network.named_parameters() if ".prefix." not in n),
            plain.parameters(),
            strict=True,
        ):
            mine.copy_(theirs)
    with lora.disable_adapters(network):
        off = tokens(generate(network, spec, asked()))
    assert off == tokens(generate(plain, spec, asked()))


def test_a_prompt_shorter_than_the_prefix_taken_up_again() -> None:
    network, spec = prefixed(torch.float64), GenerationSpec(max_new_tokens=12, seed=3)
    request = Request("a", 0, [9])
    whole = generate(network, spec, [request])["a", 0]
    with opened(network, spec) as generator:
        generator.submit([request])
        begun = [event for _ in range(5) for event in generator.step()]
        (partial,) = generator.abort(["a"])
        generator.submit([replace(request, generated=partial)])
        rest = drain(generator)["a", 0]
    assert [e.token for e in (*begun, *rest)] == [e.token for e in whole]


def test_learned_positions_hold_the_prefix_too() -> None:
    network = build(replace(CONFIG, rope=None, learned_positions=20))
    with opened(network, GenerationSpec(max_new_tokens=50)) as generator:
        with pytest.raises(
            DataError,
            match="a prompt of 14 tokens leaves no room in the 14 positions of this model",
        ):
            generator.submit([Request("a", 0, [1] * 14)])
        generator.submit([Request("b", 0, [1] * 10)])
        assert len(drain(generator)["b", 0]) == 4


def test_memory_counts_the_prefix() -> None:
    network, spec = prefixed(), GenerationSpec(max_new_tokens=4, greedy=True)
    generate(network, spec, [Request("a", 0, [9] * 10)], GenerationBudget(max_tokens=20))
    with (
        opened(network, spec, GenerationBudget(max_tokens=19)) as generator,
        pytest.raises(RunError, match="20 tokens"),
    ):
        generator.submit([Request("a", 0, [9] * 10)])
