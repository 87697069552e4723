"""The JAX engine samples the tokens that the torch engine samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.bounds import assert_within, gamma, unit
from tests.engine import layouts
from tests.engine.common import EXACT, batch_of, engine_of
from tests.engine.layouts import Case
from tests.roundings import LIKELY, exactly
from weft import randomness
from weft.cli.main import main
from weft.data.sample import SequenceSample
from weft.engine.base import Partial, Request, TokenEvent
from weft.engine.jax import generation
from weft.engine.spec import GenerationSpec, LoRASpec
from weft.errors import ConfigError, RunError
from weft.models.network.packed import TopIds

END = 5
# Every family compiles for itself, which takes seconds: the others are in the slow tier.
CASES = [
    Case("llama"),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            Case("gpt2"),
            Case("gemma2"),
            Case("mistral", changes={"sliding_window": 6}),
            Case("mixtral"),
            Case("gpt_neox"),
            Case("qwen3"),
        )
    ),
]
PLAIN = GenerationSpec(max_new_tokens=12, stop_ids=[END], seed=1)
Events = dict[tuple[str, int], list[TokenEvent]]


def requests(count: int, copies: int = 1, longest: int = 30) -> list[Request]:
    random = np.random.default_rng(count)
    made = []
    for number in range(count):
        prompt = random.integers(8, 250, size=random.integers(1, longest)).tolist()
        made += [Request(f"r{number}", k, prompt, step=3) for k in range(copies)]
    return made


def sample(engine: Any, spec: GenerationSpec, asked: Sequence[Request]) -> Events:
    events: Events = {}
    with engine.generating(spec) as generator:
        generator.submit(asked)
        while not generator.idle:
            for event in generator.step():
                events.setdefault((event.id, event.k), []).append(event)
    return events


def assert_equal_events(found: Events, wanted: Events) -> None:
    assert found.keys() == wanted.keys()
    for key, events in wanted.items():
        assert [e.token for e in found[key]] == [e.token for e in events]
        assert [e.finish for e in found[key]] == [e.finish for e in events]
        assert [e.support for e in found[key]] == [e.support for e in events]
        # torch returns log-probs in float32
        for one, other in zip(found[key], events, strict=True):
            assert one.logprob == pytest.approx(other.logprob, rel=unit(torch.float32))
            assert [id for id, _ in one.top] == [id for id, _ in other.top]


def both(path: Path, **changes: Any) -> tuple[Any, Any]:
    changes = {"dtype": "float64", "dropout": 0.0, **changes}
    return engine_of(path, **changes), engine_of(path, **changes, backend="jax")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_tokens_are_sampled(case: Case, tmp_path: Path) -> None:
    one, other = both(layouts.write_model(case, tmp_path / "hf"))
    asked = requests(9, copies=3)
    assert_equal_events(sample(other, PLAIN, asked), sample(one, PLAIN, asked))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.6},
        {"greedy": True},
        {"top_k": 7, "record_support": True},
        {"top_p": 0.8, "min_p": 0.01},
        {"min_new_tokens": 4, "top_logprobs": 3},
    ],
    ids=str,
)
def test_the_same_tokens_are_sampled_with_settings(changes: Any, tmp_path: Path) -> None:
    one, other = both(layouts.write_model(Case(), tmp_path / "hf"))
    spec = GenerationSpec(**{"max_new_tokens": 12, "stop_ids": [END], "seed": 1, **changes})
    asked = requests(7, copies=2)
    # Requests with settings of their own beside the generator's.
    own = GenerationSpec(max_new_tokens=5, temperature=0.5)
    asked += [Request("own", 0, [9, 10, 11], sampling=own)]
    assert_equal_events(sample(other, spec, asked), sample(one, spec, asked))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["8,1,1", "1,8,1", "1,1,8"])
def test_a_mesh_samples_the_same(mesh: str, tmp_path: Path) -> None:
    assert_mesh_samples_the_same(mesh, tmp_path)


@pytest.mark.slow
def test_steps_of_few_sequences_are_divided_over_a_mesh(tmp_path: Path) -> None:
    """An eighth of 72 slots is no multiple of eight devices."""
    one, _ = both(layouts.write_model(Case(), tmp_path / "hf"))
    other = engine_of(tmp_path / "hf", dtype="float64", dropout=0.0, backend="jax", layout="1,8,1")
    asked = requests(35, copies=2)
    assert_equal_events(sample(other, PLAIN, asked), sample(one, PLAIN, asked))


@pytest.mark.slow
def test_the_mesh_of_two_by_two_by_two_samples_the_same(tmp_path: Path) -> None:
    assert_mesh_samples_the_same("2,2,2", tmp_path)


def assert_mesh_samples_the_same(mesh: str, tmp_path: Path) -> None:
    one, other = both(layouts.write_model(Case(), tmp_path / "hf"))
    other = engine_of(tmp_path / "hf", dtype="float64", dropout=0.0, backend="jax", layout=mesh)
    asked = requests(5, copies=2)
    assert_equal_events(sample(other, PLAIN, asked), sample(one, PLAIN, asked))


@pytest.mark.slow
def test_adapters_sample(tmp_path: Path) -> None:
    path = layouts.write_model(Case(), tmp_path / "hf")
    one, other = both(path, lora=LoRASpec(r=3, alpha=6.0))
    for engine in (one, other):
        parts = []
        for name, where, values in engine.read(sorted(engine.trained_names)):
            number = sum(map(ord, name))
            made = torch.randn(values.shape, generator=torch.Generator().manual_seed(number))
            parts.append((name, where, made.to(values.dtype)))
        engine.write(parts, version=1)
    asked = requests(5)
    assert_equal_events(sample(other, PLAIN, asked), sample(one, PLAIN, asked))


@pytest.mark.slow
def test_sequences_wait_for_a_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for two sequences of the longest of these lengths."""
    one, other = both(layouts.write_model(Case(), tmp_path / "hf"))
    asked = requests(9)
    wanted = sample(one, PLAIN, asked)
    choose = generation.choose_budget
    limits = []

    def choose_little(*args: Any) -> Any:
        budget = choose(*args)
        limits.append(generation.replace(budget, max_sequences=3, max_tokens=90))
        return limits[-1]

    monkeypatch.setattr("weft.engine.jax.engine.choose_budget", choose_little)
    assert_equal_events(sample(other, PLAIN, asked), wanted)
    assert limits
    with pytest.raises(RunError, match="keys and values of 90 are held at most"):
        sample(other, PLAIN, [Request("long", 0, [9] * 80)])


@pytest.mark.slow
def test_new_weights_and_a_stop_go_on_where_they_were(tmp_path: Path) -> None:
    """Completions are stopped in the middle, taken up again, and get new weights once."""
    one, other = both(layouts.write_model(Case(), tmp_path / "hf"))
    spec = GenerationSpec(max_new_tokens=9, seed=1)
    asked = requests(4)
    found = []
    for engine in (one, other):
        weights = [
            (name, where, values.clone() * 1.5)
            for name, where, values in engine.read(["blocks.0.mlp.up.weight"])
        ]
        parts: list[Partial] = []
        events: Events = {}
        with engine.generating(spec) as generator:
            generator.submit(asked)
            for turn in range(5):
                if turn == 3:
                    engine.write(weights, version=8)
                    generator.weights_changed(8, keep_kv=False)
                for event in generator.step():
                    events.setdefault((event.id, event.k), []).append(event)
            parts = generator.abort([request.id for request in asked])
        taken = {(part.id, part.k): part for part in parts}
        again = [Request(r.id, r.k, r.prompt, step=3, generated=taken[r.id, r.k]) for r in asked]
        for key, more in sample(engine, spec, again).items():
            events[key] += more
        found.append(events)
        assert {event.version for own in events.values() for event in own} == {0, 8}
    assert_equal_events(found[1], found[0])


def count_compiled(engine: Any) -> int:
    functions = [f for f in vars(engine._network.compiled).values() if hasattr(f, "_cache_size")]
    assert len(functions) == 6
    return sum(function._cache_size() for function in functions)


def test_nothing_is_compiled_after_the_first_step(tmp_path: Path) -> None:
    """Later calls have fewer, and shorter, prompts."""
    path = layouts.write_model(Case(), tmp_path / "hf")
    engine: Any = engine_of(path, backend="jax", trained=False)
    # All end at their limit together, so no step of few sequences is among the first.
    sample(engine, GenerationSpec(max_new_tokens=12, seed=1), requests(24, copies=3))
    compiled = count_compiled(engine)
    # A prefill, decode steps of all slots and of few, copies, and four sizes of logits.
    assert compiled == 8
    greedy = GenerationSpec(max_new_tokens=20, greedy=True)
    for spec, asked in (
        (PLAIN, requests(20, copies=3)),
        (greedy, requests(24)),
        (PLAIN, requests(70, copies=4, longest=20)),
    ):
        sample(engine, spec, asked)
    assert count_compiled(engine) == compiled


@pytest.mark.slow
def test_lengths_that_change_the_rotation_of_cached_keys_are_refused(tmp_path: Path) -> None:
    path = layouts.write_model(Case(), tmp_path / "hf")
    scaling = {"type": "dynamic", "factor": 2.0}
    engine = engine_of(path, backend="jax", trained=False, rope_scaling=scaling)
    with pytest.raises(ConfigError, match=r"rope_scaling \(dynamic\) then changes"):
        sample(engine, GenerationSpec(max_new_tokens=600), [Request("a", 0, [9] * 60)])


# -- outputs that sampling needs in training


@pytest.mark.slow
def test_log_probs_over_what_sampling_kept_and_the_likeliest_ids(tmp_path: Path) -> None:
    one, other = both(layouts.write_model(Case(), tmp_path / "hf"))
    batch = batch_of([(5, [4, 2]), (3, [6])])
    batch = batch.update(batch.like("prompt", prompt=batch.data["prompt"] % 250))
    batch = batch.update(batch.like("completion", completion=batch.data["completion"] % 250))
    counts = [[0, 3, 1, 5], [2, 0], [4, 1, 1, 2, 7, 3]]
    sizes = [sum(own) for own in counts]
    ids = np.random.default_rng(0).integers(8, 250, size=sum(sizes))
    lengths = {
        "prompt": [[5], [3]],
        "completion": [[4, 2], [6]],
        "support": [sizes[:2], sizes[2:]],
        "support_counts": [[4, 2], [6]],
    }
    more = {
        "support": torch.tensor(ids),
        "support_counts": torch.tensor([*counts[0], *counts[1], *counts[2]]),
    }
    sampled = SequenceSample.from_groups(batch.ids, lengths, {**batch.data, **more})
    want = frozenset({"logprobs", "entropy", "top1"})
    mine, theirs = (each.forward(sampled, want, temperature=0.7).data for each in (other, one))
    whole = one.forward(batch, want, temperature=0.7).data
    assert not torch.allclose(whole["logprobs"], theirs["logprobs"])
    for key in want:
        torch.testing.assert_close(mine[key], theirs[key], **EXACT)
    top = frozenset({"top_ids", "top_logprobs"})
    for limit in (None, 100):
        mine, theirs = (
            each.forward(batch, top, top=TopIds(4, limit)).data for each in (other, one)
        )
        assert torch.equal(mine["top_ids"], theirs["top_ids"])
        torch.testing.assert_close(mine["top_logprobs"], theirs["top_logprobs"], **EXACT)


# -- a trained model in float32


@pytest.fixture(scope="module")
def stories(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = data_dir / "weights" / "stories260K"
    target = tmp_path_factory.mktemp("stories") / "model"
    words = [str(source / "stories260K.bin"), "--tokenizer", str(source / "tok512.bin")]
    assert main(["convert", "llama2c", *words, "--output", str(target)]) == 0
    return target


@pytest.mark.slow_cases("0.7")
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_float32_differs_by_draws_at_a_boundary_alone(stories: Path, temperature: float) -> None:
    """And log-probs as sampled are those of training.

    A draw u takes the first id whose running sum of probabilities exceeds u. Each probability is
    wrong by as much as its log-prob, relatively, and so are sums of them; adding in two levels of
    128 ids and V / 128 blocks loses as many roundings.
    """
    wide = engine_of(stories, dtype="float64", trained=False)
    engine = engine_of(stories, dtype="float32", trained=False, backend="jax")
    spec = GenerationSpec(max_new_tokens=120, seed=1, temperature=temperature)
    asked = requests(24, copies=2, longest=12)
    wanted = sample(wide, spec, asked)
    found = sample(engine, spec, asked)
    prompts = {request.id: list(request.prompt) for request in asked}
    rows = [(prompts[key[0]], [event.token for event in events]) for key, events in found.items()]
    batch = SequenceSample.from_groups(
        [f"c{number}" for number in range(len(rows))],
        {
            "prompt": [[len(prompt)] for prompt, _ in rows],
            "completion": [[len(own)] for _, own in rows],
        },
        {
            "prompt": torch.tensor([token for prompt, _ in rows for token in prompt]),
            "completion": torch.tensor([token for _, own in rows for token in own]),
        },
    )
    want = frozenset({"logprobs"})
    (exact,) = exactly(
        lambda: wide.forward(batch, want, temperature=temperature).data["logprobs"], draws=1
    )
    sampled = torch.tensor([event.logprob for events in found.values() for event in events])
    trained = engine.forward(batch, want, temperature=temperature).data["logprobs"]
    bound = LIKELY * exact.deviation + unit(torch.float32) * exact.value.abs()
    for values in (sampled, trained):
        assert_within(values, exact.value, bound)
    # First differences.
    compared = differences = 0
    slack = LIKELY * exact.deviation + gamma(128 + 4, torch.float32)
    for (id, k), events in found.items():
        theirs = [event.token for event in wanted[id, k]]
        mine = [event.token for event in events]
        pairs = zip(mine, theirs, strict=False)
        at = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        if at is None:
            compared += len(mine)
            continue
        compared += at + 1
        differences += 1
        known = SequenceSample.from_groups(
            ["x"],
            {"prompt": [[len(prompts[id]) + at]], "completion": [[1]]},
            {
                "prompt": torch.tensor([*prompts[id], *mine[:at]]),
                "completion": torch.tensor([mine[at]]),
            },
        )
        vocab = wide.description["vocab_size"]
        top = frozenset({"top_ids", "top_logprobs"})
        likeliest = wide.forward(known, top, temperature=temperature, top=TopIds(vocab)).data
        probabilities = torch.zeros(vocab, dtype=torch.float64)
        probabilities[likeliest["top_ids"][-1].long()] = likeliest["top_logprobs"][-1, :-1].exp()
        draw = randomness.draw_uniform(1, "sample", 3, id, k, at)
        lower = min(mine[at], theirs[at])
        between = probabilities.cumsum(0)[lower : max(mine[at], theirs[at])]
        assert float((between - draw).abs().max()) <= slack
    assert compared > 3000
    assert differences <= 2e-3 * compared
