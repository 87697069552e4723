"""The interface `generate`: what it asks of the engine, and the keys and metrics it makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.engine.generation.test_generate import CPU, build, letters
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.engine.base import Engine, Generator
from weft.engine.generation.generate import BatchGenerator, open_generator
from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError
from weft.interfaces.base import Model
from weft.interfaces.generate import GenerateInterface
from weft.randomness import draw_uniform
from weft.registry import interfaces


class OnlyGenerates:
    """The part of an engine that the interface uses."""

    version = 3

    def __init__(self) -> None:
        self.network = build()
        self.specs: list[GenerationSpec] = []

    @contextmanager
    def generating(self, spec: GenerationSpec) -> Iterator[Generator]:
        self.specs.append(spec)
        with open_generator(
            self.network, spec, device=CPU, version=self.version, eos_ids=[]
        ) as generator:
            yield generator


def model(tokenizer: Tokenizer | None = None, **changes: Any) -> Model:
    own = letters()
    engine = cast(Engine, OnlyGenerates())
    return Model(
        "actor",
        engine,
        tokenizer or own,
        own,
        "cpu",
        "float64",
        **{"step": 2, "seed": 9, **changes},
    )


def batch(texts: tuple[str, ...] = ("once", "a fox", "no", "z")) -> SequenceSample:
    ids = [letters().encode(text) for text in texts]
    return SequenceSample.from_default(
        [f"p{i}" for i in range(len(ids))],
        [len(p) for p in ids],
        {"prompt": [token for p in ids for token in p]},
    )


def ended(tokenizer: Tokenizer, token: str) -> Tokenizer:
    tokenizer.hf.add_special_tokens({"eos_token": token})
    return tokenizer


def test_announces_each_id_once_as_soon_as_all_its_completions_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four prompts by three, ended by a letter: what is announced is what comes out, the first
    before the last token.
    """
    told: list[tuple[int, SequenceSample]] = []
    steps: list[int] = []
    step = BatchGenerator.step
    monkeypatch.setattr(BatchGenerator, "step", lambda self: steps.append(1) or step(self))
    generate = GenerateInterface(samples_per_prompt=3, max_new_tokens=60, stop=["q", "e"])
    made = generate.generate(
        model(announce=lambda sample: told.append((len(steps), sample))), batch()
    ).outputs
    assert made is not None
    assert sorted(id for _, sample in told for id in sample.ids) == list(made.ids)
    assert told[0][0] < len(steps) == told[-1][0]
    for when, sample in told:
        same = made.select(ids=sample.ids)
        assert when == max(same.lengths["completion"].tolist()), "a token a step"
        for key in made.keys:
            assert torch.equal(sample.data[key], same.data[key])


def test_is_registered_under_its_name() -> None:
    assert interfaces.get("generate") is GenerateInterface


def test_makes_k_completions_an_id_with_everything_about_them() -> None:
    made = GenerateInterface(samples_per_prompt=3, max_new_tokens=12).generate(model(), batch())
    sample = made.outputs
    assert sample is not None
    assert sample.ids == ("p0", "p1", "p2", "p3")
    assert [len(group) for group in sample.seqlens["completion"]] == [3] * 4
    for key in ("logprobs", "versions"):
        assert sample.lengths[key].tolist() == sample.lengths["completion"].tolist()
    assert sample.lengths["finished"].tolist() == [1] * 12
    types = {key: value.dtype for key, value in sample.data.items()}
    assert types == {
        "completion": torch.int64,
        "logprobs": torch.float32,
        "versions": torch.int64,
        "loss_mask": torch.float32,
        "finished": torch.float32,
    }
    assert set(sample.data["versions"].tolist()) == {3}
    assert len({tuple(row.tolist()) for row in sample.sequences("completion")}) == 12
    lengths = sample.lengths["completion"]
    assert made.metrics["response_length"] == pytest.approx(lengths.mean())
    assert made.metrics["response_length_max"] == lengths.max()
    assert made.metrics["truncated_fraction"] == pytest.approx(
        1 - float(sample.data["finished"].mean())
    )
    assert made.metrics["tokens_per_second"] > 0


def answered(texts: tuple[str, ...] = ("once", "a fox", "no", "z")) -> SequenceSample:
    """Prompts with an answer of two tokens each, the second trained, and a column."""
    prompts = batch(texts)
    count = prompts.num_ids
    rows = {"completion": list(range(1, 2 * count + 1)), "loss_mask": [0.0, 1.0] * count}
    answers = SequenceSample.from_default(prompts.ids, [2] * count, rows)
    return replace(prompts.update(answers), metadata={"column": tuple(texts)})


def test_a_share_is_sampled_and_the_others_keep_their_rows() -> None:
    """Chosen by the hash alone: the same ids in any batch, and other ones at another step."""
    rows = answered(tuple("abcdefghijkl"))
    interface = GenerateInterface(share=0.5, max_new_tokens=5, samples_per_prompt=2)
    result = interface.generate(model(), rows)
    made = result.outputs
    assert made is not None and made.ids == rows.ids and not made.metadata
    assert set(made.keys) == {"completion", "loss_mask", "sampled"}
    wanted = [draw_uniform(9, "share/actor", 2, id, 0, 0) < 0.5 for id in rows.ids]
    assert 0 < sum(wanted) < len(wanted)
    assert result.metrics["sampled_fraction"] == sum(wanted) / len(wanted)
    whole = (
        GenerateInterface(max_new_tokens=5, samples_per_prompt=2).generate(model(), rows).outputs
    )
    assert whole is not None
    for one, own, sampled, chosen in zip(
        made.unpack(), rows.unpack(), whole.unpack(), wanted, strict=True
    ):
        source = sampled if chosen else own
        assert one.data["completion"].tolist() == source.data["completion"].tolist()
        assert one.data["loss_mask"].tolist() == (
            [1.0] * sampled.num_tokens() if chosen else [0.0, 1.0]
        )
        assert one.data["sampled"].tolist() == ([1.0, 1.0] if chosen else [0.0])
    for id in rows.ids[:4]:
        alone, same = (
            interface.generate(model(), rows.select(ids=[id])).outputs,
            made.select(ids=[id]),
        )
        assert alone is not None
        assert all(torch.equal(alone.data[key], same.data[key]) for key in made.keys)
    later = interface.generate(model(step=3), rows).outputs
    assert later is not None and later.data["sampled"].tolist() != made.data["sampled"].tolist()


def test_without_a_chosen_id_nothing_is_sampled() -> None:
    rows = answered()
    for share, sampled in ((1e-9, 0.0), (1 - 1e-9, 1.0)):
        actor = model()
        result = GenerateInterface(share=share, max_new_tokens=3).generate(
            actor, rows.select(keys=["prompt", "completion"])
        )
        assert result.outputs is not None
        assert result.metrics["sampled_fraction"] == sampled
        assert set(result.outputs.data["sampled"].tolist()) == {sampled}
        # rows without a mask are trained whole
        assert set(result.outputs.data["loss_mask"].tolist()) == {1.0}
        assert len(cast(OnlyGenerates, actor.engine).specs) == sampled


@pytest.mark.parametrize(
    "args", [{"share": 0.0}, {"share": 1.5}, {"share": 0.5, "record_support": True, "top_k": 4}]
)
def test_shares_that_cannot_be_are_refused(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="share"):
        GenerateInterface(**args)


def test_ends_with_the_tokenizers_own_end_token() -> None:
    own = ended(letters(), "<5>")
    made = (
        GenerateInterface(samples_per_prompt=6, max_new_tokens=30)
        .generate(model(own), batch())
        .outputs
    )
    assert made is not None
    rows, finished = made.sequences("completion"), made.data["finished"].tolist()
    assert set(finished) == {0.0, 1.0}
    assert all((row[-1] == 5) == bool(end) for row, end in zip(rows, finished, strict=True))


def test_the_same_firing_draws_the_same_and_another_one_does_not() -> None:
    def completions(**changes: Any) -> list[list[int]]:
        made = GenerateInterface(max_new_tokens=12).generate(model(**changes), batch()).outputs
        assert made is not None
        return [row.tolist() for row in made.sequences("completion")]

    assert completions() == completions()
    assert completions(step=3) != completions()
    assert completions(seed=1) != completions()
    alone = (
        GenerateInterface(max_new_tokens=12).generate(model(), batch().select(ids=["p2"])).outputs
    )
    assert alone is not None
    assert alone.data["completion"].tolist() == completions()[2]


def test_records_what_the_limits_kept() -> None:
    made = GenerateInterface(
        samples_per_prompt=2, max_new_tokens=9, top_k=4, record_support=True
    ).generate(model(), batch())
    sample = made.outputs
    assert sample is not None
    assert sample.data["support_counts"].tolist() == [4] * sample.num_tokens()
    assert sample.lengths["support"].tolist() == (4 * sample.lengths["completion"]).tolist()
    kept = sample.data["support"].view(-1, 4)
    assert (kept == sample.data["completion"][:, None]).any(dim=1).all(), (
        "what was sampled was kept"
    )
    whole = (
        GenerateInterface(max_new_tokens=9, top_k=1000, record_support=True)
        .generate(model(), batch())
        .outputs
    )
    assert whole is not None
    assert set(whole.data["support_counts"].tolist()) == {0}, (
        "a top_k above the vocabulary leaves nothing out"
    )


def test_stop_texts_are_read_with_the_roles_tokenizer() -> None:
    made = (
        GenerateInterface(samples_per_prompt=4, max_new_tokens=60, stop=["q"])
        .generate(model(), batch())
        .outputs
    )
    assert made is not None
    texts = [letters().decode(row.tolist()) for row in made.sequences("completion")]
    assert [bool(end) for end in made.data["finished"].tolist()] == ["q" in text for text in texts]
    assert any("q" in text for text in texts)


def test_another_tokenizer_than_the_datas_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="role 'actor' generates with another tokenizer"):
        GenerateInterface().generate(model(ended(letters(), "<new>")), batch())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"max_new_token": 3},
            r"unknown option 'gen\.max_new_token'; did you mean max_new_tokens",
        ),
        ({"samples_per_prompt": 0}, "samples_per_prompt=0: must be at least 1"),
        ({"top_p": 1.5}, r"gen\.top_p=1\.5: must be at most 1"),
        ({"temperature": 0.0}, "gen.temperature=0.*gen.greedy=true"),
        ({"max_new_tokens": "many"}, r"gen\.max_new_tokens='many': must be a whole number"),
    ],
)
def test_wrong_arguments_are_told_when_it_is_built(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GenerateInterface(**args)


class Newer:
    """New weights after so many tokens each; `change` makes them."""

    def __init__(self, engine: OnlyGenerates, after: list[int], change: float = 0.0) -> None:
        self.engine, self.after, self.change, self.asked, self.open = engine, after, change, 0, 0

    def are_waiting(self) -> bool:
        self.asked += 1
        return self.asked in self.after

    def take(self, *, left: bool) -> bool:
        if not left:
            return False
        self.engine.version += 1
        with torch.no_grad():
            for parameter in self.engine.network.parameters():
                parameter.mul_(1.0 + self.change)
        return True


def interrupted(
    after: list[int], change: float, *, interrupt: bool = True, **more: Any
) -> tuple[Any, Any, list[Any]]:
    """(outputs, metrics, announced) of three completions a prompt with updates after so many steps."""
    told: list[SequenceSample] = []
    handle = model(announce=told.append)
    updates = Newer(cast(Any, handle.engine), after, change)
    generate = GenerateInterface(samples_per_prompt=3, max_new_tokens=20, stop=["q", "e"], **more)
    result = generate.generate(replace(handle, updates=updates if interrupt else None), batch())
    return result.outputs, result.metrics, told


@pytest.mark.parametrize("top_k", [0, 5])
def test_completions_go_on_exactly_where_they_were(top_k: int) -> None:
    more = {"top_k": top_k, "record_support": bool(top_k)}
    whole, metrics, told = interrupted([], 0.0, **more)
    parts, counted, again = interrupted([2, 3, 9], 0.0, **more)
    assert (metrics["interruptions_max"], counted["interruptions_max"]) == (0.0, 3.0)
    for key in set(whole.keys) - {"versions"}:
        assert torch.equal(torch.as_tensor(parts.data[key]), torch.as_tensor(whole.data[key])), key
    assert parts.lengths["completion"].tolist() == whole.lengths["completion"].tolist()
    assert sorted(id for each in again for id in each.ids) == sorted(
        id for each in told for id in each.ids
    )
    for versions in parts.sequences("versions"):
        expected = [3, 3, 4] + [5] * 6 + [6] * 20
        assert versions.tolist() == expected[: len(versions)], "the weights that made each token"


def test_tokens_after_new_weights_are_theirs_and_those_before_are_not() -> None:
    whole, _, _ = interrupted([], 0.0)
    parts, _, _ = interrupted([4], 0.2)
    apart = 0
    for old, new in zip(whole.sequences("logprobs"), parts.sequences("logprobs"), strict=True):
        assert torch.equal(torch.as_tensor(old[:4]), torch.as_tensor(new[:4]))
        apart += len(old) > 4 and not torch.equal(
            torch.as_tensor(old[4:]), torch.as_tensor(new[4:])
        )
    assert apart > 3


def test_a_call_that_may_not_be_interrupted_is_not() -> None:
    made, metrics, _ = interrupted([2, 3], 0.2, interrupt=False)
    assert (
        set(torch.as_tensor(made.data["versions"]).tolist()) == {3}
        and "interruptions_max" not in metrics
    )
