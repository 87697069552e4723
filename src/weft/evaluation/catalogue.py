"""Catalogue of tasks over the user's copies of data sets, for `weft eval suite`.

A file in the folder `tasks` has one or more tasks in lm_eval's form. The block `weft` of a task
names the data set, the scoring function of `task_scoring`, and the task's requirements. Data, judge
and permissions are checked before anything runs. docs/evaluation-tasks.md lists the tasks.

lm_eval is imported only when a task is built.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.evaluation.task_data import DATA_SETS, FOLDER, TaskRows, find_data, read_data
from weft.evaluation.task_judge import QUESTIONS, JudgeFilter, JudgeSettings, check_judge
from weft.evaluation.task_prompts import ShotPrompt
from weft.evaluation.task_scoring import SCORERS, Metrics, TaskScorer
from weft.reading import read_yaml

TASKS = Path(__file__).parent / "tasks"
SPLIT = "test"
GROUPS = {
    "open-instruct": (
        "mmlu_0shot",
        "mmlu_5shot",
        "gsm_direct",
        "gsm_cot",
        "bbh_direct",
        "bbh_cot",
        "tydiqa_goldp_1shot",
        "tydiqa_no_context_1shot",
        "codex_eval_temp_0.1",
        "codex_eval_temp_0.8",
        "ifeval",
        "truthfulqa",
        "toxigen",
        "xstest_judge",
        "alpaca_eval",
    )
}


@dataclass(frozen=True)
class CatalogueOptions:
    """Data, judge and permissions for the catalogue's tasks.

    Attributes:
        data: Files or folders of data sets, by name.
        folder: Folder in which other data sets are looked up by name.
        judge: Judge of answers, or None.
        allow_code: True if programs that a model writes may run, in the sandbox.
        num_samples: Answers per item of tasks that summarize several; None for the task's number.
        include_path: Folders of the user's task files, which take precedence over tasks of the
            catalogue with the same names.
    """

    data: Mapping[str, Path] = field(default_factory=dict)
    folder: Path = FOLDER
    judge: JudgeSettings | None = None
    allow_code: bool = False
    num_samples: int | None = None
    include_path: Sequence[Path] = ()


@dataclass(frozen=True)
class TaskBlock:
    """The block `weft` of a task file.

    Attributes:
        data: Name of the data set.
        scorer: Name of the scoring function, or None for a metric of lm_eval.
        prompt: Name of a prompt in `task_prompts`, or None for lm_eval's own prompts.
        shots: Number of examples in this prompt.
        code: True if the task runs programs that the model writes.
        judge: Name of the question to the judge, or None.
        samples: Answers per item.
        sampling: Options of generation if an item has several answers.
        by_subset: True if the main metric is also reported for each subset.
    """

    data: str
    scorer: str | None = None
    prompt: str | None = None
    shots: int = 0
    code: bool = False
    judge: str | None = None
    samples: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)
    by_subset: bool = False


@cache
def read_catalogue() -> dict[str, tuple[TaskBlock, dict[str, Any]]]:
    """Return (block `weft`, lm_eval's configuration) of each task in the catalogue, by name."""
    tasks = {}
    for file in sorted(TASKS.glob("*.yaml")):
        content = read_yaml(file, str(file))
        for config in content["tasks"]:
            block = TaskBlock(**config.pop("weft"))
            if config.get("num_fewshot"):
                config["fewshot_config"]["samples"] = content["examples"]
            tasks[config["task"]] = (block, config)
    return tasks


def list_names() -> list[str]:
    """Return the names of the catalogue's tasks and groups."""
    return sorted([*read_catalogue(), *GROUPS])


def resolve_tasks(names: Sequence[str], options: CatalogueOptions) -> tuple[list[Any], list[str]]:
    """Return (tasks of the catalogue as lm_eval's `Task` objects, names of other tasks).

    Groups are replaced by their tasks. Raises `ConfigError` if tasks lack data, a judge or the
    permission to run code: one message names everything that is missing. Raises `DataError` for
    unusable rows, and `UserError` if the judge does not answer. No model is needed.
    """
    catalogue = read_catalogue()
    user_names = _list_user_tasks(options.include_path)
    catalogued: list[str] = []
    others: list[str] = []
    for name in names:
        if name in user_names:
            others.append(name)
            continue
        members = GROUPS.get(name, (name,))
        for member in members:
            (catalogued if member in catalogue else others).append(member)
    catalogued = list(dict.fromkeys(catalogued))
    # Check everything before data is read.
    _check_options([catalogue[name][0] for name in catalogued], options)
    if not catalogued:
        return [], others
    paths = {
        name: find_data(catalogue[name][0].data, options.data, options.folder)
        for name in catalogued
    }
    _check_requirements({name: catalogue[name][0] for name in catalogued}, paths, options)
    # Read each data set once.
    rows: dict[str, TaskRows] = {}
    for name in catalogued:
        data = catalogue[name][0].data
        path = paths[name]
        if data not in rows and path is not None:
            rows[data] = read_data(data, path)
    tasks = []
    for name in catalogued:
        block, config = catalogue[name]
        tasks.append(_build_task(block, config, rows[block.data], options))
    if options.judge is not None and any(catalogue[name][0].judge for name in catalogued):
        check_judge(options.judge)
    return tasks, others


def _check_options(blocks: Sequence[TaskBlock], options: CatalogueOptions) -> None:
    """Raise `ConfigError` for unknown data sets, and for an unused or invalid `num_samples`."""
    for name in options.data:
        if name not in DATA_SETS:
            known = ", ".join(sorted(DATA_SETS))
            raise ConfigError(f"--data {name}=...: there is no data set {name!r}; known: {known}")
    if options.num_samples is None:
        return
    if options.num_samples < 1:
        raise ConfigError(f"--num_samples {options.num_samples}: must be at least 1")
    if not any(block.scorer is not None and SCORERS[block.scorer].samples for block in blocks):
        raise ConfigError(
            f"--num_samples {options.num_samples}: none of the tasks summarizes several answers; "
            f"leave it out, or set repeats in your task file"
        )


def _list_user_tasks(folders: Sequence[Path]) -> set[str]:
    """Return the names of the tasks and groups in the user's task files."""
    paths = [str(folder.expanduser()) for folder in folders]
    if not paths:
        return set()
    from lm_eval.tasks import TaskManager

    with silence_logs():
        return set(TaskManager(include_path=list(paths), include_defaults=False).all_tasks)


def _check_requirements(
    blocks: Mapping[str, TaskBlock], paths: Mapping[str, Path | None], options: CatalogueOptions
) -> None:
    """Raise `ConfigError` with all missing data, permissions and judges."""
    problems = []
    judged_tasks = [name for name, block in blocks.items() if block.judge]
    if judged_tasks and options.judge is None:
        problems.append(
            f"{', '.join(judged_tasks)}: answers are graded by a judge; give an OpenAI-compatible "
            f"endpoint with --judge URL and --judge_model NAME, or leave the task out"
        )
    code_tasks = [name for name, block in blocks.items() if block.code]
    if code_tasks and not options.allow_code:
        problems.append(
            f"{', '.join(code_tasks)}: programs that the model writes are run, in the sandbox of the "
            f"code reward (docs/code-reward.md); allow it with --allow_code, or leave the task out"
        )
    missing: dict[str, list[str]] = {}
    for name, path in paths.items():
        if path is None:
            missing.setdefault(blocks[name].data, []).append(name)
    for data, tasks in missing.items():
        data_set = DATA_SETS[data]
        problems.append(
            f"{', '.join(tasks)}: there is no data; give --data {data}=PATH, or put a copy in "
            f"{options.folder / data} ({data_set.form}; published at {data_set.published})"
        )
    if problems:
        raise ConfigError("\n".join(problems))


# -- lm_eval's task objects


class LoadedRows:
    """Callable that returns items, in the form of lm_eval's `custom_dataset`."""

    def __init__(self, name: str, items: Sequence[Mapping[str, Any]]) -> None:
        self.name = name
        self.items = items

    def __call__(self, **settings: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {SPLIT: Dataset.from_list([dict(item) for item in self.items])}

    def __repr__(self) -> str:
        """Describe the data for result files."""
        return f"weft:{self.name}, {len(self.items)} items"

    def __deepcopy__(self, memo: object) -> LoadedRows:
        """Return the rows themselves; lm_eval copies configurations often."""
        return self


class ItemScoring:
    """Callable that scores an item, in the form of lm_eval's `process_results`."""

    def __init__(self, name: str, by_subset: bool) -> None:
        self.name = name
        self.by_subset = by_subset
        self.main_metric = next(iter(SCORERS[name].metrics))

    def __call__(self, doc: Mapping[str, Any], results: Sequence[Any]) -> Metrics:
        metrics = SCORERS[self.name].function(doc, results)
        if self.by_subset and doc["subset"] and self.main_metric in metrics:
            metrics[f"{self.main_metric}_{doc['subset']}"] = metrics[self.main_metric]
        return metrics

    def __repr__(self) -> str:
        """Describe the scoring for result files."""
        return f"weft:{self.name}"

    def __deepcopy__(self, memo: object) -> ItemScoring:
        """Return the scoring itself, which never changes."""
        return self


def _build_task(
    block: TaskBlock, template: Mapping[str, Any], rows: TaskRows, options: CatalogueOptions
) -> Any:
    """Return a task as lm_eval's `ConfigurableTask`, with its data, prompt and scoring."""
    from copy import deepcopy

    from lm_eval.api.task import ConfigurableTask

    config: dict[str, Any] = deepcopy(dict(template))
    config["custom_dataset"] = LoadedRows(block.data, rows.items)
    config["test_split"] = SPLIT
    if block.prompt is not None:
        prompt = ShotPrompt(block.prompt, rows.shots, block.shots)
        prompt.check(rows.items, f"task {config['task']!r}")
        config["doc_to_text"] = prompt
    repeats = 1
    if block.scorer is not None:
        scorer = SCORERS[block.scorer]
        repeats = _count_samples(block, scorer, options)
        config["process_results"] = ItemScoring(block.scorer, block.by_subset)
        config["metric_list"] = _list_metrics(block, scorer, rows, repeats)
    if repeats > 1:
        config["generation_kwargs"] |= {"do_sample": True, **block.sampling}
    config["repeats"] = repeats
    if config["output_type"] == "generate_until":
        if block.judge is not None and options.judge is not None:
            answer_filter: dict[str, Any] = {
                "function": JudgeFilter(options.judge, QUESTIONS[block.judge])
            }
        else:
            answer_filter = {"function": "take_first_k", "k": repeats}
        config["filter_list"] = [{"name": "none", "filter": [answer_filter]}]
    with silence_logs():
        return ConfigurableTask(config=config)


def _count_samples(block: TaskBlock, scorer: TaskScorer, options: CatalogueOptions) -> int:
    """Return the number of answers per item."""
    if options.num_samples is None or not scorer.samples:
        return block.samples
    return options.num_samples


def _list_metrics(
    block: TaskBlock, scorer: TaskScorer, rows: TaskRows, repeats: int
) -> list[dict[str, Any]]:
    """Return lm_eval's `metric_list` for a task with `repeats` answers per item."""
    metrics = scorer.list_metrics(repeats)
    main_metric = next(iter(scorer.metrics))
    if block.by_subset and main_metric in metrics:
        for subset in sorted({item["subset"] for item in rows.items} - {""}):
            metrics[f"{main_metric}_{subset}"] = metrics[main_metric]
    entries = []
    for name, is_rising in metrics.items():
        aggregation = scorer.aggregations.get(name, "mean")
        entries.append({"metric": name, "aggregation": aggregation, "higher_is_better": is_rising})
    return entries


@contextmanager
def silence_logs() -> Iterator[None]:
    """Suppress the warnings and progress bars of the harness. Exceptions are still raised."""
    names = ("lm_eval", "datasets", "huggingface_hub", "transformers")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
