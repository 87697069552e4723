"""Folders, caches and figures of `weft eval suite`; tests/cli/test_eval_suite.py runs it."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from jinja2 import StrictUndefined, Template

from weft.errors import ConfigError, DataError
from weft.evaluation import suite
from weft.evaluation.models import OpenedModel
from weft.evaluation.suite import SuiteOptions, TaskFigure


def test_results_are_stored_in_the_model_or_in_the_named_folder(tmp_path: Path) -> None:
    own = tmp_path / "step4"
    own.mkdir()
    assert suite.choose_folder(str(own), None, "a") == own / "eval"
    assert suite.choose_folder("OWNER/NAME", None, "a") == Path("eval/a")
    assert suite.choose_folder(str(own), tmp_path / "out", "a") == tmp_path / "out" / "a"
    suite.check_folder(own / "eval")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        suite.check_folder(tmp_path / "file" / "eval")


def test_other_weights_have_another_cache(tmp_path: Path) -> None:
    opened = cast(
        OpenedModel, SimpleNamespace(name=str(tmp_path), path=str(tmp_path), adapter=None)
    )
    options = SuiteOptions(use_cache="answers")
    (tmp_path / "model.safetensors").write_text("a")
    first = suite.name_cache(opened, options)
    assert first is not None and first.startswith("answers_")
    assert suite.name_cache(opened, options) == first
    (tmp_path / "model.safetensors").write_text("other")
    assert suite.name_cache(opened, options) != first
    assert suite.name_cache(opened, SuiteOptions()) is None


def test_a_cache_would_repeat_one_of_several_answers() -> None:
    settings = {"repeats": 4, "generation_kwargs": {"do_sample": True}}
    task = SimpleNamespace(OUTPUT_TYPE="generate_until", get_config=settings.get)
    manager = SimpleNamespace(load=lambda names: {"tasks": {"sums": task}})
    model = SimpleNamespace(read_generation=lambda options: None)
    suite._check_generation(model, manager, ["sums"], SuiteOptions())
    with pytest.raises(ConfigError, match=r"'sums' takes 4 answers per item.*--use_cache"):
        suite._check_generation(model, manager, ["sums"], SuiteOptions(use_cache="answers"))


def test_more_examples_than_a_task_has_are_refused() -> None:
    settings = {"num_fewshot": None}
    task = SimpleNamespace(sampler=SimpleNamespace(df=[{}, {}]), get_config=settings.get)
    manager = SimpleNamespace(load=lambda names: {"tasks": {"sums": task}})
    suite._check_shots(manager, ["sums"], 2)
    with pytest.raises(ConfigError, match="--num_fewshot 3: task 'sums' has 2 examples"):
        suite._check_shots(manager, ["sums"], 3)
    settings["num_fewshot"] = 0  # the harness ignores the option then
    suite._check_shots(manager, ["sums"], 3)


def test_an_item_that_a_template_cannot_render_is_an_error_of_the_data() -> None:
    with pytest.raises(DataError, match="'q' is undefined"), suite._explain_template_errors():
        Template("{{q.text}}", undefined=StrictUndefined).render()


def test_outside_a_repository_git_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert suite._read_git_commit() is None
    assert capfd.readouterr() == ("", "")


def test_seeds_of_the_harness_do_not_stay() -> None:
    """After an evaluation, random numbers are the same as without one."""

    def draw() -> tuple[Any, ...]:
        return random.random(), np.random.rand(), torch.rand(()).item()

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    expected = draw()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    with suite._keep_random_states():
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(4)
        draw()
    assert draw() == expected


def test_figures_of_tasks_and_groups() -> None:
    results: dict[str, Any] = {
        "results": {
            "quiz": {"alias": "quiz", "acc,none": 0.5, "acc_stderr,none": 0.1},
            "text": {"bits_per_byte,none": 2, "bits_per_byte_stderr,none": "N/A"},
        },
        "groups": {"all": {"acc,none": 0.5, "acc_stderr,none": 0.1}},
        "n-samples": {"quiz": {"original": 8, "effective": 4}},
    }
    assert suite.list_figures(results) == [
        TaskFigure("quiz", "none", "acc", 0.5, 0.1, 4),
        TaskFigure("text", "none", "bits_per_byte", 2.0, None, None),
        TaskFigure("all", "none", "acc", 0.5, 0.1, None),
    ]
