"""Log-likelihoods and continuations equal those of the harness' backend `hf`, in float32."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.evaluation.harness_tasks import write_tasks
from tests.tiny import make_llama
from weft.engine.spec import ModelSpec
from weft.errors import ConfigError, DataError
from weft.evaluation.harness import WeftLM
from weft.evaluation.models import OpenedModel, open_policy

CONTEXT = 96  # tokens; some prompts of the tasks are longer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("harness") / "model", max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def opened(directory: Path) -> OpenedModel:
    return open_policy(ModelSpec(path=str(directory), dtype="float32", device="cpu"))


def ask(*arguments: Any) -> list[Any]:
    """Return requests in the form of the harness; only their arguments are read."""
    return [SimpleNamespace(args=each) for each in arguments]


def compute_logprobs(directory: Path, ids: list[int]) -> Any:
    """Return the log-probabilities of every next token by `transformers`, [tokens, vocabulary]."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return network(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_log_likelihood_of_a_continuation(directory: Path, opened: OpenedModel) -> None:
    """A trailing space belongs to the continuation, and an empty context is BOS."""
    model = WeftLM(opened)
    encode = opened.tokenizer.hf.encode
    head, whole = encode("A red"), encode("A red ball")
    expected = []
    for context, ids in ((head, whole[len(head) :]), ([1], encode(" ball"))):
        rows = compute_logprobs(directory, [*context, *ids])[len(context) - 1 : -1]
        own = [float(row[token]) for row, token in zip(rows, ids, strict=True)]
        greedy = all(int(row.argmax()) == token for row, token in zip(rows, ids, strict=True))
        expected.append((sum(own), greedy))
    found = model.loglikelihood(ask(("A red", " ball"), ("A red ", "ball"), ("", " ball")))
    assert found[0] == found[1], "the space is moved"
    for (logprob, greedy), (own, also) in zip((found[0], found[2]), expected, strict=True):
        assert logprob == pytest.approx(own, abs=1e-4) and greedy == also


def test_requests_that_cannot_be_scored_are_refused(opened: OpenedModel) -> None:
    model = WeftLM(opened)
    with pytest.raises(DataError, match="has 0 tokens"):
        model.loglikelihood(ask(("A", "")))
    with pytest.raises(DataError, match=f"1 to {CONTEXT}"):
        model.loglikelihood(ask(("A", " ball" * 4 * CONTEXT)))
    with pytest.raises(ConfigError, match="num_beams=2"):
        model.read_generation({"num_beams": 2})
    with pytest.raises(ConfigError, match="max_gen_toks=96"):
        model.read_generation({"max_gen_toks": CONTEXT})
    for wrong in ({"max_gen_toks": "many"}, {"temperature": None}):
        with pytest.raises(ConfigError, match="must be numbers"):
            model.read_generation(wrong)
    with pytest.raises(ConfigError, match="temperature above 0"):
        model.read_generation({"do_sample": True, "max_gen_toks": 4})
    spec = model.read_generation({"until": ["\n", ""], "max_gen_toks": 4, "num_beams": 1})
    assert spec.greedy and spec.new_token_limit == 4 and spec.stop == ["\n", "</s>"]


def run_hf(directory: Path, folder: Path, names: list[str], **options: Any) -> dict[str, Any]:
    """Return the results of lm_eval's backend `hf` on the task files in `folder`."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    model = HFLM(pretrained=str(directory), dtype="float32", device="cpu", batch_size=4)
    found = simple_evaluate(model, tasks=names, task_manager=manager, bootstrap_iters=0, **options)
    assert found is not None
    return dict(found)


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_five_tasks_equal_hf(
    directory: Path,
    opened: OpenedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chat: bool,
) -> None:
    """One task of each kind; with `chat`, examples are turns of a conversation."""
    from weft.evaluation.suite import SuiteOptions, evaluate
    from weft.evaluation.suite_tasks import LoadedTasks, TaskSelection, load_tasks, open_manager

    folder = write_tasks(tmp_path / "tasks")
    monkeypatch.chdir(folder)  # the harness itself reads relative paths from here
    names = ["choices", "talk", "continued", "last_word"]
    names += [] if chat else ["stories"]
    told = {"system_instruction": "Be brief."} if chat else {}
    theirs = run_hf(
        directory, folder, names, apply_chat_template=chat, fewshot_as_multiturn=chat, **told
    )
    manager, found = open_manager(TaskSelection(names, [folder]))
    options = SuiteOptions(
        apply_chat_template=chat, fewshot_as_multiturn=chat, bootstrap_iters=0, **told
    )
    tasks = LoadedTasks(manager, load_tasks(manager, found, tmp_path))
    ours, files = evaluate(opened, tasks, options, tmp_path / "out", keep_samples=True)
    assert len(files) == 1 + len(names)
    for name in names:
        compare_samples(name, ours["samples"][name], theirs["samples"][name])
        for key, value in theirs["results"][name].items():
            if isinstance(value, float) and "stderr" not in key:
                assert ours["results"][name][key] == pytest.approx(value, rel=1e-5), (name, key)


def compare_samples(name: str, ours: list[Any], theirs: list[Any]) -> None:
    """Check that prompts and texts are equal, and log-likelihoods within 1e-4."""
    for own, other in zip(ours, theirs, strict=True):
        assert own["prompt_hash"] == other["prompt_hash"]
        for answers, expected in zip(own["resps"], other["resps"], strict=True):
            for answer, right in zip(answers, expected, strict=True):
                if isinstance(right, str):
                    assert answer == right, name
                elif isinstance(right, float):
                    assert math.isclose(answer, right, abs_tol=1e-4, rel_tol=1e-6), name
                else:
                    assert answer[0] == pytest.approx(right[0], abs=1e-4), name
                    assert answer[1] == right[1]
