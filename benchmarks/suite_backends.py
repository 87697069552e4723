"""One evaluation through weft's model of the harness, and through lm_eval's own backend `hf`.

Settings: `model` (directory), `tasks` (folder of task files with a task called `task`). Either side
computes on the CPU in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from benchmarks.clock import Stopwatch
from benchmarks.pairs import Pause

Settings = Mapping[str, Any]


def weft(settings: Settings, pause: Pause) -> dict[str, Any]:
    return evaluate(_weft_model(settings["model"]), settings)


@cache
def _weft_model(directory: str) -> Any:
    from weft.engine.spec import ModelSpec
    from weft.evaluation.harness import WeftLM
    from weft.evaluation.models import open_policy

    return WeftLM(open_policy(ModelSpec(path=directory, dtype="float32", device="cpu")))


def hf_1(settings: Settings, pause: Pause) -> dict[str, Any]:
    return evaluate(_hf_model(settings["model"], "1"), settings)


def hf_8(settings: Settings, pause: Pause) -> dict[str, Any]:
    return evaluate(_hf_model(settings["model"], "8"), settings)


def hf_32(settings: Settings, pause: Pause) -> dict[str, Any]:
    return evaluate(_hf_model(settings["model"], "32"), settings)


def hf_auto(settings: Settings, pause: Pause) -> dict[str, Any]:
    return evaluate(_hf_model(settings["model"], "auto"), settings)


@cache
def _hf_model(directory: str, batch_size: str) -> Any:
    from lm_eval.models.huggingface import HFLM

    size = int(batch_size) if batch_size.isdigit() else batch_size
    return HFLM(pretrained=directory, dtype="float32", device="cpu", batch_size=size)


@cache
def _tasks(folder: str) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    return dict(TaskManager(include_path=folder, include_defaults=False).load(["task"]))


def evaluate(model: Any, settings: Settings) -> dict[str, Any]:
    """Evaluate, and return the time and all log-likelihoods."""
    from lm_eval import evaluator

    tasks = _tasks(settings["tasks"])
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=1234)  # both sides draw the same examples
    watch = Stopwatch()
    found = evaluator.evaluate(lm=model, task_dict=tasks, bootstrap_iters=0)
    measured = watch.read()
    assert found is not None
    samples = found["samples"]["task"]
    return measured | {"logprobs": [pair[0][0] for each in samples for pair in each["resps"]]}
