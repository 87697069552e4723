"""`eval_suite`: which runs take it, and the calls that answer the requests of its tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.cases import grpo, options, prepare, sft
from weft.errors import ConfigError
from weft.experiments import GenConfig, RWConfig


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    prepare(folder)
    return folder


def test_texts_are_scored_by_the_trained_role_and_generated_where_the_run_samples(
    root: Path,
) -> None:
    config = grpo(root, "out")
    config.eval_suite.tasks = ["quiz"]
    config.actor_gen.device_mesh, config.grpo.gen.kv_cache_gb = "1", 0.5
    made = config.build()
    score, generate = made.calls["eval/suite_score"], made.calls["eval/suite_generate"]
    assert score.role == generate.role == "actor"
    assert made.call_meshes["eval/suite_score"] == made.role_meshes["actor"]
    assert made.call_meshes["eval/suite_generate"] == made.call_meshes["actor_gen"]
    assert generate.args == {"kv_cache_gb": 0.5}
    assert "eval_suite: quiz" in made.plan_notes
    assert grpo(root, "out").build().eval_suite is None


def test_runs_without_a_policy_refuse_tasks(root: Path) -> None:
    rw = RWConfig(**options(root, "rw"))
    rw.model.path, rw.dataset.train_path = str(root / "model"), str(root / "pairs.jsonl")
    rw.eval_suite.tasks = ["quiz"]
    with pytest.raises(
        ConfigError,
        match=r"eval_suite\.tasks=\[quiz\]: rw trains a model that scores texts but cannot",
    ):
        rw.build()
    gen = GenConfig(**options(root, "gen", eval_suite={"tasks": ["quiz"]}))
    gen.model.path, gen.dataset.path = str(root / "model"), str(root / "prompts.jsonl")
    with pytest.raises(ConfigError, match="this run trains no model; use weft eval suite"):
        gen.build()


def test_tasks_are_something_to_evaluate_on(root: Path) -> None:
    config = sft(root, "out")
    for source in config.dataset.sources:
        source.pop("valid_split", None)
    config.eval_at_start, config.save_best = True, "eval/quiz/acc"
    with pytest.raises(ConfigError, match=r"there is nothing to evaluate on; .*eval_suite\.tasks"):
        config.build()
    config.eval_suite.tasks = ["quiz"]
    made = config.build()
    made.check()
    assert made.evaluation is None and made.control.evaluates_at_start
