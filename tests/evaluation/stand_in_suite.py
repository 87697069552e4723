"""Small evaluation that replaces lm_eval, whose import takes seconds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from weft.engine.base import Request
from weft.engine.spec import GenerationSpec
from weft.evaluation import run_suite
from weft.evaluation.continuation_scores import ContinuationScorer, ScoredPair
from weft.evaluation.models import EvaluatedModel
from weft.evaluation.run_suite import PreparedSuite
from weft.evaluation.suite import SuiteOptions, _keep_random_states
from weft.evaluation.suite_tasks import LoadedTasks

CONTEXT = 128
SHARED = [7 + token % 30 for token in range(20)]
OPTIONS = SuiteOptions(max_tokens=96)  # several batches
LOADED = LoadedTasks(
    SimpleNamespace(load=lambda tasks: {"groups": {}, "tasks": {"quiz": None}}), []
)


def evaluate(
    model: EvaluatedModel, loaded: LoadedTasks, options: SuiteOptions, folder: Path, *_: Any
) -> tuple[dict[str, Any], list[Path]]:
    """Score continuations with shared contexts, and generate and sample texts."""
    pairs = []
    for number in range(9):
        pairs.append(ScoredPair([*SHARED, 40 + number % 3], [50 + number, 9][: 1 + number % 2]))
    scorer = ContinuationScorer(model, CONTEXT, options.max_tokens)
    scores = scorer.score(pairs, lambda *_: None, lambda *_: None)
    requests = []
    for number in range(5):
        spec = GenerationSpec(max_new_tokens=3 + number, greedy=number % 2 == 0, temperature=2.0)
        requests.append(Request(str(number), 0, SHARED[: 4 + number], sampling=spec))
    texts: dict[str, list[int]] = {}
    base = GenerationSpec(max_new_tokens=8, seed=11, tokenizer=model.tokenizer)
    with model.engine.generating(base) as generator:
        generator.submit(requests)
        while not generator.idle:
            for event in generator.step():
                texts.setdefault(event.id, []).append(event.token)
    digest = 0
    for id in sorted(texts):
        for token in texts[id]:
            digest = (31 * digest + token) % 1_000_003
    with _keep_random_states():  # as the harness, which seeds all generators
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
    folder.mkdir(parents=True, exist_ok=True)
    row = {
        "acc,none": sum(greedy for _, greedy in scores) / len(scores),
        "logprob,none": sum(logprob for logprob, _ in scores),
        "tokens,strict": digest,
    }
    (folder / "results_1.json").write_text(json.dumps({"results": {"quiz": row}}))
    return {"results": {"quiz": row}}, []


def use_stand_in(patch: pytest.MonkeyPatch) -> None:
    """Let runs with `eval_suite.tasks=[quiz]` evaluate by `evaluate` above."""

    def prepare(experiment: Any, tokenizers: Any) -> PreparedSuite | None:
        if experiment.eval_suite is None:
            return None
        (role,) = experiment.saved_roles[:1]
        return PreparedSuite(LOADED, OPTIONS, tokenizers[role], CONTEXT)

    patch.setattr("weft.launch.resolve.prepare_suite", prepare)
    patch.setattr(run_suite.suite, "evaluate", evaluate)


def read_figures(metrics: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Return the figures of the evaluations by step."""
    figures = {}
    for line in metrics:
        own = {name: value for name, value in line.items() if name.startswith("eval/")}
        if own:
            figures[line["step"]] = own
    return figures
