"""The interface `task_requests` answers as the engine of an opened model does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.tiny import make_llama
from weft.data.groups import SCORED_ONCE
from weft.data.sample import SequenceSample
from weft.engine.base import Request
from weft.engine.spec import GenerationSpec, ModelSpec
from weft.evaluation.models import OpenedModel, open_policy
from weft.interfaces.base import Model
from weft.interfaces.task_requests import SAMPLING, TaskRequestsInterface, describe_sampling

PROMPTS = ([7, 8, 9, 10], [7, 8, 30], [40, 41, 42, 43, 44])
SEED = 5


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    directory = make_llama(tmp_path_factory.mktemp("requests") / "model")
    return open_policy(ModelSpec(path=str(directory), dtype="float64", device="cpu"))


def wrap(opened: OpenedModel) -> Model:
    """The model as interfaces get it; its seed and step must not matter."""
    own = opened.tokenizer
    return Model("actor", opened.engine, own, own, "cpu", "float64", step=3, seed=99, max_tokens=4)


def build(prompts: list[list[int]], **metadata: list) -> SequenceSample:
    return SequenceSample.from_groups(
        [f"eval/{number}" for number in range(len(prompts))],
        {"prompt": [[len(prompt)] for prompt in prompts]},
        {"prompt": np.array([token for prompt in prompts for token in prompt], np.int64)},
        metadata,
    )


def test_scores_of_one_pass(opened: OpenedModel) -> None:
    """Its limit is that of the batch, not the run's."""
    batch = SequenceSample.from_groups(
        ["a", "b"],
        {"prompt": [[4], [4]], "completion": [[2], [3]]},
        {
            "prompt": np.array([7, 8, 9, 10] * 2, np.int64),
            "completion": np.array([11, 12, 13, 14, 15], np.int64),
        },
        {SCORED_ONCE: [True, True]},
    )
    found = TaskRequestsInterface().inference(wrap(opened), batch).outputs
    expected = opened.engine.forward(batch, frozenset({"logprobs", "top1"}), max_tokens=13)
    assert found is not None and set(found.keys) == {"logprobs", "top1"}
    for key in found.keys:
        assert found.data[key].tolist() == expected.data[key].tolist()


def test_each_request_has_its_own_settings_and_draws(opened: OpenedModel) -> None:
    specs = [
        GenerationSpec(max_new_tokens=3, greedy=True),
        GenerationSpec(max_new_tokens=6, temperature=0.7, top_k=9),
        GenerationSpec(max_new_tokens=5, stop=["e"], temperature=1.5),
    ]
    requests = []
    for number, (prompt, spec) in enumerate(zip(PROMPTS, specs, strict=True)):
        requests.append(Request(str(number), 0, prompt, sampling=spec))
    base = GenerationSpec(max_new_tokens=6, seed=SEED, tokenizer=opened.tokenizer)
    expected: dict[str, list[int]] = {}
    with opened.engine.generating(base) as generator:
        generator.submit(requests)
        while not generator.idle:
            for event in generator.step():
                expected.setdefault(event.id, []).append(event.token)
    settings = [describe_sampling(request, base) for request in requests]
    batch = build([*map(list, PROMPTS)], **{SAMPLING: settings})
    found = TaskRequestsInterface().generate(wrap(opened), batch).outputs
    assert found is not None and found.ids == batch.ids
    assert [each.tolist() for each in found.sequences("answer")] == [*expected.values()]


def test_a_rank_without_requests_takes_part(opened: OpenedModel) -> None:
    found = TaskRequestsInterface().generate(wrap(opened), build([], **{SAMPLING: []})).outputs
    assert found is not None and found.num_ids == 0 and "answer" in found.keys


def test_settings_are_plain_values(opened: OpenedModel, tmp_path: Path) -> None:
    """They are sent to other processes as JSON."""
    spec = GenerationSpec(max_new_tokens=3, stop=["x"], tokenizer=opened.tokenizer)
    settings = describe_sampling(Request("4", 0, [1]), spec)
    batch = build([[1]], **{SAMPLING: [settings]})
    assert SequenceSample.from_bytes(batch.to_bytes()).metadata[SAMPLING] == (settings,)
