"""The generator over pages gives the completions it gives over slots: the same draws in float64,
whatever shares, waits, restarts or is cut into parts. FlexAttention runs unfused, and a stand-in
plays the captured graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.gpu.varlen_contract import varlen_attn
from tests.models.common import tiny
from weft.engine.base import Request
from weft.engine.generation import generate as generation
from weft.engine.generation.caches import PageCaches, ReusablePageCaches, identify_storage
from weft.engine.generation.scheduler import GenerationBudget
from weft.engine.spec import GenerationSpec
from weft.kernels import flash, flex
from weft.models.kv.pages import PagedCache, PagePool
from weft.models.network import lora

from .common import LLAMA, build, drain, generate, near, opened, requests, tokens, use_pages

SPEC = GenerationSpec(max_new_tokens=12, seed=3)
BUDGET = GenerationBudget(max_sequences=6, max_tokens=2000, max_prefill_tokens=100)
PAGE = 16


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[PageCaches]]:
    """Switches generators to pages; returns those made since."""
    return lambda: use_pages(monkeypatch, PAGE)


def test_completions_are_those_of_slots(paged: Callable[[], list[PageCaches]]) -> None:
    network = build()
    expected = generate(network, SPEC, requests(), BUDGET)
    made = paged()
    with opened(network, SPEC, BUDGET) as generator:
        generator.submit(requests())
        found = drain(generator)
        captured = len(made[0].graphs)
        assert made[0]._pool.pages.num_used == 0, "every page came back"
    assert tokens(found) == tokens(expected)
    for key, row in found.items():
        assert [e.logprob for e in row] == [near(e.logprob) for e in expected[key]]
    (caches,) = made
    assert not caches._pool.num_bytes, "the generator is closed"
    assert caches.blocks.num_used == 0
    assert captured > 1 and len(caches.graphs) == 0, "graphs are dropped with the generator"


def test_short_memory_and_new_weights(paged: Callable[[], list[PageCaches]]) -> None:
    """Room for few sequences, so that some are sent back to wait; an abort in between; and the
    weights change on the way.
    """
    network = build()
    tight = GenerationBudget(max_sequences=4, max_tokens=200, max_prefill_tokens=64)

    def run() -> dict[Any, list[int]]:
        with opened(network, SPEC, tight) as generator:
            generator.submit(requests(3, 2))
            events: dict[Any, list[int]] = {}
            for _ in range(4):
                for event in generator.step():
                    events.setdefault((event.id, event.k), []).append(event.token)
            partials = generator.abort(["0"])
            for partial in partials:
                events.pop((partial.id, partial.k), None)
            generator.weights_changed(8)
            for key, row in drain(generator).items():
                events.setdefault(key, []).extend(event.token for event in row)
            assert generator.step() == []
            return events

    expected = run()
    made = paged()
    assert run() == expected
    assert made[0]._pool.pages.num_used == 0 and made[0].blocks.num_used == 0


def test_windows_and_capped_scores(paged: Callable[[], list[PageCaches]]) -> None:
    network = build(replace(LLAMA, windows=(24, None), attention_softcap=5.0))
    expected = generate(network, SPEC, requests(3, 2), BUDGET)
    paged()
    assert tokens(generate(network, SPEC, requests(3, 2), BUDGET)) == tokens(expected)


def test_pages_hold_what_is_counted(paged: Callable[[], list[PageCaches]]) -> None:
    """The scheduler never counts fewer pages than rows hold."""
    made = paged()
    with opened(build(), SPEC, BUDGET) as generator:
        generator.submit(requests())
        while not generator.idle:
            generator.step()
            assert made[0]._pool.pages.num_used <= made[0].blocks.num_used


@pytest.mark.parametrize("windows", [(), (24, None)])
@pytest.mark.parametrize("table", [True, False])
def test_with_the_flash_kernels_contract(
    paged: Callable[[], list[PageCaches]],
    monkeypatch: pytest.MonkeyPatch,
    windows: tuple[int | None, ...],
    table: bool,
) -> None:
    """Whole prompts, parts of prompts and decode steps as they are put to `varlen_attn`, of a torch
    with and without block tables and grouped heads.
    """
    network = build(replace(LLAMA, windows=windows))
    expected = generate(network, SPEC, requests(), BUDGET)
    paged()
    monkeypatch.setattr(flash, "serves", lambda *_: True)
    monkeypatch.setattr(
        flash, "find_features", lambda: flash.FlashFeatures(grouped_heads=table, block_table=table)
    )
    monkeypatch.setattr(flash, "load_kernel", lambda: varlen_attn)
    assert tokens(generate(network, SPEC, requests(), BUDGET)) == tokens(expected)


def counted(caches: PageCaches) -> tuple[int, int, int]:
    counts = caches.graphs.counts
    return counts["eager"], counts["replayed"], counts["captured"]


def ragged(count: int = 24) -> list[Request]:
    """Completions of 1 to `count` tokens, each as long as its own settings say."""
    return [
        Request(id=str(i), k=0, prompt=[3, 4, 6 + i], sampling=replace(SPEC, max_new_tokens=1 + i))
        for i in range(count)
    ]


@pytest.mark.slow
def test_calls_of_one_engine_share_pages_and_graphs(paged: Callable[[], list[PageCaches]]) -> None:
    """A ragged run, three times: each step is replayed, the first too, and later calls capture
    nothing that is there. What was captured goes once weights lie elsewhere or other adapters are
    at work, and not before.
    """
    network, kept, budget = (
        build(),
        ReusablePageCaches(),
        replace(BUDGET, max_sequences=24, max_tokens=4000),
    )
    expected = generate(network, SPEC, ragged(), budget)
    made = paged()

    def call() -> dict[Any, list[int]]:
        with generation.open_generator(
            network,
            SPEC,
            device=torch.device("cpu"),
            version=7,
            eos_ids=(5,),
            budget=budget,
            reusable_caches=kept,
        ) as generator:
            generator.submit(ragged())
            return tokens(drain(generator))

    assert call() == tokens(expected)
    (caches,) = made
    first, steps = counted(caches), max(map(len, expected.values())) - 1
    assert first[0] == 0 and first[1] == steps > 10 and 1 <= first[2] <= 7
    pages = kept.num_bytes
    assert call() == call() == tokens(expected)
    assert len(made) == 1 and kept.num_bytes == pages > 0
    after = counted(caches)
    assert after[:2] == (0, 3 * steps) and after[2] <= 7
    assert call() == tokens(expected) and counted(caches)[2] == after[2], "nothing is captured anew"
    with torch.no_grad():
        network.norm.weight.mul_(1.0)  # the same memory, as after a train step
    call()
    assert counted(caches)[2] == after[2]
    weight = network.norm.weight
    # as after an offload or a move
    network.norm.weight = torch.nn.Parameter(weight.detach().clone())
    assert call() == tokens(expected) and counted(caches)[2] > after[2]
    kept.drop()
    assert kept.num_bytes == 0 and call() == tokens(expected) and len(made) == 2


def test_pages_are_not_reused_for_more_sequences_than_their_steps_have(
    paged: Callable[[], list[PageCaches]],
) -> None:
    """Steps for 6 sequences have 8 rows, padding included."""
    network, kept, made = build(), ReusablePageCaches(), paged()
    for max_sequences, num_made in ((6, 1), (8, 1), (9, 2)):
        budget = replace(BUDGET, max_sequences=max_sequences)
        kept.give_back(kept.take(network, torch.device("cpu"), budget))
        assert len(made) == num_made
    kept.drop()


def test_a_switch_of_adapters_drops_what_was_captured() -> None:
    network = build()
    before = identify_storage(network)
    lora.attach(network, r=2, alpha=4.0)
    on = identify_storage(network)
    with lora.disable_adapters(network):
        off = identify_storage(network)
    assert before != on != off != before and identify_storage(network) == on


def test_pages_are_made_room_for_once_and_never_past_the_budget(
    paged: Callable[[], list[PageCaches]],
) -> None:
    made, sizes = paged(), list[int]()
    with opened(build(), SPEC, BUDGET) as generator:
        generator.submit(requests())
        while not generator.idle:
            generator.step()
            sizes.append(len(made[0]._pool.keys[0]))
    assert set(sizes) == {128}, (
        "2,000 tokens are 125 pages, 2 for where prefixes end, and the one that nobody owns"
    )


DRAWS = {
    "sampled": [replace(SPEC, temperature=0.6), SPEC, replace(SPEC, temperature=1.7)],
    "greedy": [replace(SPEC, greedy=True)],
    "states": [replace(SPEC, top_p=0.8), replace(SPEC, top_k=3)],
}


@pytest.mark.default_cases("sampled")
@pytest.mark.parametrize("kind", DRAWS)
def test_draws_in_a_graph_are_those_outside(
    paged: Callable[[], list[PageCaches]], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Rows of several temperatures, and likeliest tokens; those that a graph cannot hold are drawn
    after it.
    """
    network, used, run = build(), list[str](), PageCaches._run_step
    specs = DRAWS[kind]
    asked = [
        replace(request, sampling=specs[i % len(specs)]) for i, request in enumerate(requests(3, 2))
    ]
    expected = generate(network, SPEC, asked, BUDGET)

    def spy(caches: PageCaches, kind: str, step: np.ndarray) -> Tensor:
        used.append(kind)
        return run(caches, kind, step)

    monkeypatch.setattr(PageCaches, "_run_step", spy)
    paged()
    assert tokens(generate(network, SPEC, asked, BUDGET)) == tokens(expected)
    assert set(used) == {kind}


def test_ends_that_may_not_come_yet_are_kept_from_rows_in_graphs(
    paged: Callable[[], list[PageCaches]],
) -> None:
    network, early = build(), replace(SPEC, min_new_tokens=5)
    expected = generate(network, early, requests(3, 2), BUDGET)
    paged()
    assert tokens(generate(network, early, requests(3, 2), BUDGET)) == tokens(expected)


class Questions(TorchDispatchMode):
    """Notes what a captured graph cannot hold: numbers read on the host, and tensors made of the
    host's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(
            word in name
            for word in ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "unique")
        ):
            self.asked.append(name)
        if "repeat_interleave" in name and not (kwargs or {}).get("output_size"):
            self.asked.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3"])
@torch.no_grad()
def test_a_decode_step_asks_the_host_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the flash kernel, whose own work is the device's."""
    network = tiny(name, **({"attn_logit_softcapping": None} if name == "gemma2" else {}))
    monkeypatch.setattr(flash, "serves", lambda *_: True)
    monkeypatch.setattr(flash, "find_features", lambda: flash.FlashFeatures(True, True))
    monkeypatch.setattr(flash, "load_kernel", lambda: lambda q, *_, **__: q)
    pool = PagePool(network.config, "cpu", torch.float32, page=PAGE)
    cache = PagedCache(pool)
    step = torch.from_numpy(cache.step(cache.allocate(3), np.array([5, 6, 7])))
    with Questions() as questions:
        states = network.compute_hidden(pool.build_packed(step))
        assert questions.asked == []
        int(states.sum() > 0)
    assert len(questions.asked) == 1, "the mode sees a question"


def test_where_pages_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """On devices with fused kernels, for networks that read them and rotate by fixed frequencies."""
    from weft.engine.generation.caches import SlotCaches, build_caches
    from weft.models.network.config import Rope

    accelerator = torch.device("meta")
    cpu = torch.device("cpu")
    monkeypatch.setattr(flex, "serves", lambda *_: True)
    monkeypatch.setattr(flash, "serves", lambda *_: False)
    assert isinstance(build_caches(build(), accelerator, BUDGET), PageCaches)
    assert isinstance(build_caches(build(), cpu, BUDGET), SlotCaches)
    for table, kind in ((True, PageCaches), (False, SlotCaches)):  # no compiler for FlexAttention
        with monkeypatch.context() as patch:
            patch.setattr(flex, "serves", lambda *_: False)
            patch.setattr(flash, "serves", lambda *_: True)
            patch.setattr(
                flash, "find_features", lambda table=table: flash.FlashFeatures(True, table)
            )
            assert isinstance(build_caches(build(), accelerator, BUDGET), kind)
    changing = Rope(theta=10000.0, dim=6, scaling="dynamic", values={"factor": 2.0, "original": 64})
    assert isinstance(
        build_caches(build(replace(LLAMA, rope=changing)), accelerator, BUDGET), SlotCaches
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_device() -> None:
    """Float32 over pages with captured graphs; draws may flip where two kernels' logits differ in
    the last digit.
    """
    config = replace(
        LLAMA, head_dim=16, hidden_size=64, rope=replace(LLAMA.rope, dim=16) if LLAMA.rope else None
    )
    network, roomy = build(config, torch.float32).cuda(), replace(BUDGET, max_tokens=20_000)
    with generation.open_generator(
        network, SPEC, device=torch.device("cuda", 0), version=1, eos_ids=(5,), budget=roomy
    ) as generator:
        assert isinstance(generator._caches, PageCaches)
        generator._caches.graphs._after = 1
        generator.submit(requests())
        found = drain(generator)
        assert generator._caches.graphs.note is None
        assert len(generator._caches.graphs) > 1
    expected = generate(network.cpu(), SPEC, requests(), roomy)
    same = [tokens(found)[key] == tokens(expected)[key] for key in expected]
    assert sum(same) >= 0.8 * len(same)
