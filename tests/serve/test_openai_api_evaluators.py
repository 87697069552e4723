"""Evaluation programs as clients of the server: lm_eval's `local-completions` and inspect-ai."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.serving import TOKEN, serving
from tests.tiny import make_llama, write_jsonl
from weft.cli.main import main
from weft.serve.server import Server

CONTEXT = 512
STORY = "One day, a girl named Lily went to the park. She saw a big red ball and a dog. "
QUESTIONS = [
    ("Once upon a time, there was a little", ["girl named Lily", "car of the sky", "xyzzy"], 0),
    ("The dog was very", ["happy", "the", "of"], 0),
    ("Lily went to the", ["park.", "run", "é ü"], 0),
    ("Tom said,", ['"Thank you"', "banana", "No no no no no no"], 1),
]
CHOICES = {
    "task": "choices",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
STORIES = {
    "task": "stories",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}


@pytest.fixture(scope="module")
def stories(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model whose tokenizer begins each text with `<s>`."""
    source = data_dir / "weights" / "stories260K"
    target = tmp_path_factory.mktemp("stories") / "model"
    words = [str(source / "stories260K.bin"), "--tokenizer", str(source / "tok512.bin")]
    assert main(["convert", "llama2c", *words, "--output", str(target)]) == 0
    return target


@pytest.fixture(scope="module")
def server(stories: Path) -> Iterator[Server]:
    with serving(str(stories), "--name", "policy", grpc=False) as running:
        yield running


@pytest.fixture
def tasks(tmp_path: Path) -> list[dict[str, Any]]:
    questions = [
        dict(zip(("question", "choices", "answer"), row, strict=True)) for row in QUESTIONS
    ]
    # The last text is longer than the context, so that it is read in several windows.
    texts = [{"text": STORY * count} for count in (1, 2, 14)]
    made = []
    for task, rows in ((CHOICES, questions), (STORIES, texts)):
        path = write_jsonl(tmp_path / f"{task['task']}.jsonl", rows)
        files = {"data_files": {"test": str(path)}}
        made.append({"dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **task})
    return made


def evaluate(model: str, arguments: dict[str, Any], tasks: list[dict[str, Any]]) -> dict[str, Any]:
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    from lm_eval.tasks import TaskManager

    # The tasks are given whole, so that the thousands that lm_eval brings need not be read.
    return lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=tasks,
        task_manager=TaskManager(include_defaults=False),
        device="cpu",
        bootstrap_iters=0,
    )


def list_answers(results: dict[str, Any]) -> list[tuple[float, bool | None]]:
    """(log-likelihood, whether it is what the model would say) of all requests, in order."""
    answers = []
    for task in ("choices", "stories"):
        for sample in sorted(results["samples"][task], key=lambda each: each["doc_id"]):
            for (answer,) in sample["resps"]:
                whole = answer if isinstance(answer, tuple | list) else (answer, None)
                answers.append((float(whole[0]), whole[1]))
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["of a directory", "of the server"])
def test_lm_eval_finds_what_its_own_backend_finds(
    tokenizer: str,
    stories: Path,
    server: Server,
    tasks: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Log-likelihoods within 1e-4, the bound that the client's users are promised: it sends at most
    its `max_length` - 1 tokens, and asks for one more than it needs.
    """
    monkeypatch.setenv("OPENAI_API_KEY", TOKEN)
    remote = tokenizer == "of the server"
    own = evaluate(
        "hf",
        {
            "pretrained": str(stories),
            "dtype": "float32",
            "max_length": CONTEXT - 2,
            # The client takes texts without the first token from a server's tokenizer.
            "add_bos_token": not remote,
        },
        tasks,
    )
    kind = {"auth_token": TOKEN} if remote else {"tokenizer": str(stories), "add_bos_token": True}
    url = server.urls["http"] + "/v1/completions"
    served = evaluate(
        "local-completions",
        {
            "model": "policy",
            "base_url": url,
            "max_length": CONTEXT,
            "num_concurrent": 8,
            **kind,
        },
        tasks,
    )
    expected, found = list_answers(own), list_answers(served)
    assert len(found) == len(expected) == 4 * 3 + 3
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert any(greedy for _, greedy in found), "none of the answers is what the model would say"
    for (value, _), (wanted, _) in zip(found, expected, strict=True):
        assert value == pytest.approx(wanted, abs=1e-4)
    for metric in ("acc,none", "acc_norm,none"):
        assert served["results"]["choices"][metric] == own["results"]["choices"][metric]
    for metric in ("word_perplexity,none", "bits_per_byte,none"):
        assert served["results"]["stories"][metric] == pytest.approx(
            own["results"]["stories"][metric], rel=1e-5
        )
    assert server.models[0].worker.load == 0


INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import think


@task
def words():
    samples = [Sample(input=text, target="e") for text in ("Hello", "What is it?")]
    return Task(dataset=samples, solver=[system_message("Be brief."), generate()], scorer=includes())


@task
def tools():
    return Task(dataset=[Sample(input="Hello", target="e")], solver=[use_tools(think()), generate()])
"""


@pytest.mark.slow
def test_inspect_gets_the_answers_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect_ai = pytest.importorskip("inspect_ai", reason="inspect-ai is not installed")
    path = tmp_path / "own_task.py"
    path.write_text(INSPECT_TASK)
    monkeypatch.setenv("WEFT_API_KEY", TOKEN)
    monkeypatch.chdir(tmp_path)
    make_llama(tmp_path / "policy")
    with serving(str(tmp_path / "policy"), grpc=False) as server:
        url = server.urls["http"] + "/v1"

        def run(task: str) -> Any:
            (log,) = inspect_ai.eval(
                f"{path}@{task}",
                model="openai-api/weft/policy",
                model_base_url=url,
                log_dir=str(tmp_path / "logs"),
                display="none",
                max_tokens=24,
                temperature=0.0,
                max_retries=0,
                logprobs=True,
                top_logprobs=2,
            )
            return log

        log = run("words")
        assert log.status == "success", log.error
        assert len(log.samples) == 2
        for sample in log.samples:
            messages = [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": sample.input},
            ]
            body = {"model": "policy", "messages": messages, "max_tokens": 24, "temperature": 0}
            headers = {"Authorization": f"Bearer {TOKEN}"}
            answer = httpx.post(f"{url}/chat/completions", json=body, headers=headers).json()
            (choice,) = answer["choices"]
            assert sample.output.completion == choice["message"]["content"]
            assert sample.output.choices[0].logprobs.content[0].logprob < 0
            assert sample.output.usage.output_tokens == answer["usage"]["completion_tokens"]
            right = "e" in choice["message"]["content"].lower()
            assert sample.scores["includes"].value == ("C" if right else "I")

        log = run("tools")
        assert log.status == "error", "a task that the server cannot do has no score"
        assert "tools is not supported by this endpoint" in log.error.message
        assert not log.results or json.dumps(log.results.model_dump()["scores"]) == "[]"
