"""Answers under several settings at once."""

from __future__ import annotations

import pytest

from tests.tiny import make_llama
from weft.engine.base import Request
from weft.engine.spec import GenerationSpec, ModelSpec
from weft.errors import DataError
from weft.evaluation.answers import EvaluationPrompt, choose, sample_answers
from weft.evaluation.models import OpenedModel, open_policy


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    return open_policy(ModelSpec(path=str(make_llama(tmp_path_factory.mktemp("policy") / "model"))))


def prompt(text: str) -> EvaluationPrompt:
    return EvaluationPrompt("p", text, ({"role": "user", "content": text},))


def test_settings_give_the_same_answers_alone_and_together(opened: OpenedModel) -> None:
    settings, _ = choose(["greedy", "k50"], GenerationSpec(max_new_tokens=6, seed=4))
    prompts = [prompt("Who are you?"), prompt("What is two plus two?")]
    seen = []
    together = sample_answers(
        opened, prompts, settings, samples=2, progress=lambda done, all: seen.append((done, all))
    )
    assert [[len(said) for said in row] for row in together] == [[1, 2], [1, 2]]
    assert seen[-1] == (6, 6)
    for kind, chosen in enumerate(settings):
        alone = sample_answers(opened, prompts, [chosen], samples=2)
        if chosen.spec.greedy:
            assert [row[0] for row in alone] == [row[kind] for row in together]
    ids = prompts[0].tokenize(opened.tokenizer)
    spec = GenerationSpec(max_new_tokens=6, greedy=True, stop_ids=opened.tokenizer.list_stop_ids())
    with opened.engine.generating(spec) as generator:
        generator.submit([Request("a", 0, ids)])
        tokens = []
        while not generator.idle:
            tokens += [event.token for event in generator.step()]
    assert list(together[0][0][0].token_ids) == tokens


def test_two_samples_differ_and_a_seed_repeats_them(opened: OpenedModel) -> None:
    settings, _ = choose(["free"], GenerationSpec(max_new_tokens=12, seed=4))
    first, again = (
        sample_answers(opened, [prompt("Who?")], settings, samples=2)[0][0] for _ in range(2)
    )
    assert first == again
    assert first[0].token_ids != first[1].token_ids
    assert all(
        answer.finish_reason in ("stop", "length") and len(answer.token_ids) <= 12
        for answer in first
    )


def test_a_prompt_without_room_is_refused(opened: OpenedModel) -> None:
    settings, _ = choose(["greedy"], GenerationSpec(max_new_tokens=100))
    with pytest.raises(DataError, match="takes 512 with its answer"):
        sample_answers(opened, [prompt("Who? " * 400)], settings)
    long = prompt("a" * 480)
    (said,) = sample_answers(opened, [long], settings)[0][0]
    assert len(said.token_ids) <= 512 - len(long.tokenize(opened.tokenizer)) < 100
