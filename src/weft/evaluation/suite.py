"""Evaluation of models on tasks of lm-evaluation-harness: `weft eval suite`.

Results are stored in the harness' own form: `results_DATE.json`, and one `samples_TASK_DATE.jsonl`
per task with each item's prompt, answer and score.

lm_eval is imported only when a function needs it.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from weft.checkpoints.hub_card import write_card_results
from weft.errors import ConfigError, DataError, UserError
from weft.evaluation.catalogue import silence_logs
from weft.evaluation.models import EvaluatedModel
from weft.evaluation.sampling import add_intervals
from weft.evaluation.suite_tasks import LoadedTasks

MAX_TOKENS = 16384  # default limit on the tokens of one forward pass
HARNESS_SEED = 1234  # default seed of the harness for numpy, torch and the choice of examples
RESULTS = "results"  # first word of the names of result files
FOLDER = "eval"  # folder of the results in a model's directory
OTHER_FOLDER = Path("eval")  # folder of the results of models that are not directories
WEIGHTS = ("*.safetensors", "*.bin", "adapter_config.json", "config.json")

Progress = Callable[[str, int, int], None]  # (kind of requests, finished, all)


@dataclass(frozen=True)
class SuiteOptions:
    """Options of an evaluation, with the names that the harness gives them.

    Attributes:
        limit: Number of items of each task, or their share if below 1; None for all.
        num_fewshot: Examples in each prompt; None for the number in the task's configuration.
        apply_chat_template: True to render prompts as conversations with the chat template.
        fewshot_as_multiturn: True to make each example a separate turn of the conversation.
        system_instruction: System message of the conversations, or text before each prompt.
        gen_kwargs: Options of generation that override those of the tasks.
        use_cache: Path prefix of the files that cache a model's answers; None for no cache.
        log_samples: True to store the items, too.
        seed: Seed of sampling, of the choice of examples and of all other random choices; None for
            the default seeds of the harness, with which its published figures are computed.
        bootstrap_iters: Resamples for the standard errors of metrics that are not means.
        max_tokens: Limit on the tokens of one forward pass.
        model_arguments: Options with which the model was opened, for the result file.
    """

    limit: float | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = False
    system_instruction: str | None = None
    gen_kwargs: Mapping[str, Any] = field(default_factory=dict)
    use_cache: str | None = None
    log_samples: bool = True
    seed: int | None = None
    bootstrap_iters: int = 100_000
    max_tokens: int = MAX_TOKENS
    model_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chosen_seed(self) -> int:
        """Seed of sampling and of the choice of examples."""
        return HARNESS_SEED if self.seed is None else self.seed


@dataclass(frozen=True)
class TaskFigure:
    """Value of one metric of one task.

    `error` is the standard error, or None if the harness gives none. `items` is the number of
    items of the task.
    """

    task: str
    filter: str
    metric: str
    value: float
    error: float | None
    items: int | None


def evaluate(
    opened: EvaluatedModel,
    loaded: LoadedTasks,
    options: SuiteOptions,
    folder: Path,
    progress: Progress | None = None,
    *,
    keep_samples: bool = False,
) -> tuple[dict[str, Any], list[Path]]:
    """Evaluate a model on tasks and write the result files to `folder`.

    Returns (results of the harness, files); with `keep_samples`, the results contain the items of
    each task. The harness may print to standard output. Raises `UserError` for options that a task
    or the model does not allow.
    """
    from lm_eval import evaluator
    from lm_eval.loggers import EvaluationTracker

    model = check_tasks(opened, loaded, options, progress)
    seed = options.chosen_seed
    limit = options.limit
    tracker = EvaluationTracker(output_path=str(folder / f"{RESULTS}.json"))
    with (
        silence_logs(),
        _keep_random_states(),
        _explain_template_errors(),
        mock.patch.object(evaluator, "get_git_commit_hash", _read_git_commit),
    ):
        results = evaluator.simple_evaluate(
            model=model,
            model_args={"pretrained": opened.name, **options.model_arguments},
            tasks=list(loaded.tasks),
            num_fewshot=options.num_fewshot,
            use_cache=name_cache(opened, options),
            limit=int(limit) if limit is not None and limit >= 1 else limit,
            bootstrap_iters=options.bootstrap_iters,
            log_samples=options.log_samples,
            evaluation_tracker=tracker,
            system_instruction=options.system_instruction,
            apply_chat_template=options.apply_chat_template,
            fewshot_as_multiturn=options.fewshot_as_multiturn,
            gen_kwargs=dict(options.gen_kwargs) or None,
            task_manager=loaded.manager,
            random_seed=0 if options.seed is None else seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    assert results is not None, "only other ranks of a distributed evaluation return None"
    add_intervals(results)
    samples = results.pop("samples", None) or {}
    files = _write_results(results, samples, tracker, folder)
    if folder.name == FOLDER:
        write_card_results(folder.parent)
    return {**results, **({"samples": samples} if keep_samples else {})}, files


def check_tasks(
    opened: EvaluatedModel,
    loaded: LoadedTasks,
    options: SuiteOptions,
    progress: Progress | None = None,
) -> Any:
    """Wrap a model as a model of lm_eval, after all checks that do not need its weights.

    Raises `UserError` for options that a task or the model does not allow.
    """
    from weft.evaluation.harness import WeftLM

    model = WeftLM(
        opened, max_tokens=options.max_tokens, seed=options.chosen_seed, progress=progress
    )
    if options.apply_chat_template:
        opened.tokenizer.require_chat_template()
    _check_generation(model, loaded.manager, loaded.tasks, options)
    _check_shots(loaded.manager, loaded.tasks, options.num_fewshot)
    return model


def _check_generation(
    model: Any, manager: Any, tasks: Sequence[Any], options: SuiteOptions
) -> None:
    """Raise `ConfigError`, which names the task, for unsupported options of generation.

    The cache of the harness is refused for tasks with several answers per item, because it would
    return the same answer each time.
    """
    for name, task in manager.load(list(tasks))["tasks"].items():
        if task.OUTPUT_TYPE != "generate_until":
            continue
        repeats = task.get_config("repeats") or 1
        if options.use_cache is not None and repeats > 1:
            raise ConfigError(
                f"task {name!r} takes {repeats} answers per item, and --use_cache would give one of "
                f"them for all; leave --use_cache out"
            )
        task_options = task.get_config("generation_kwargs") or {}
        try:
            model.read_generation({**task_options, **options.gen_kwargs})
        except UserError as error:
            raise ConfigError(f"task {name!r}: {error}") from error


def _check_shots(manager: Any, tasks: Sequence[Any], count: int | None) -> None:
    """Raise `ConfigError` if a task has fewer than `count` examples.

    Tasks with `num_fewshot: 0` in their file are evaluated without examples.
    """
    if not count:
        return
    for name, task in manager.load(list(tasks))["tasks"].items():
        sampler = getattr(task, "sampler", None)
        if sampler is None or task.get_config("num_fewshot") == 0:
            continue
        if len(sampler.df) < count:
            raise ConfigError(
                f"--num_fewshot {count}: task {name!r} has {len(sampler.df)} examples; set fewer"
            )


def check_items(model: Any, loaded: LoadedTasks, options: SuiteOptions) -> None:
    """Build the requests for all items of an evaluation, and check them.

    `model` is the result of `check_tasks`; its weights are not needed. Raises `DataError` if a
    template cannot render an item, or if the model's context is too short for an answer.
    """
    from lm_eval.evaluator_utils import get_sample_size

    with silence_logs(), _keep_random_states(), _explain_template_errors():
        for name, task in loaded.manager.load(list(loaded.tasks))["tasks"].items():
            # Set the number of examples and the seed as `simple_evaluate` does.
            if options.num_fewshot is not None and task.get_config("num_fewshot") != 0:
                task.set_config(key="num_fewshot", value=options.num_fewshot)
            task.set_fewshot_seed(seed=options.chosen_seed)
            try:
                task.build_all_requests(
                    limit=get_sample_size(task, options.limit),
                    system_instruction=options.system_instruction,
                    apply_chat_template=options.apply_chat_template,
                    fewshot_as_multiturn=options.fewshot_as_multiturn,
                    chat_template=model.apply_chat_template
                    if options.apply_chat_template
                    else None,
                )
                model.check_requests(task.instances)
            except (DataError, ValueError) as error:
                raise DataError(f"task {name!r}: {error}") from error


@contextmanager
def _explain_template_errors() -> Iterator[None]:
    """Raise `DataError` if a template of a task cannot render an item.

    The message does not name the item, because the harness does not report it.
    """
    from jinja2 import TemplateError

    try:
        yield
    except TemplateError as error:
        raise DataError(
            f"a template of the tasks cannot render one of the items: {error}; check doc_to_text, "
            f"doc_to_target and doc_to_choice, and that each row has these fields"
        ) from error


def _write_results(
    results: Any, samples: Mapping[str, Any], tracker: Any, folder: Path
) -> list[Path]:
    """Write the result files and return their paths.

    Raises `ConfigError` if the folder cannot be written; the harness only logs this.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        earlier_files = set(folder.iterdir())
    except OSError as error:
        raise ConfigError(
            f"{folder}: the results cannot be stored there ({error.strerror}); set --output"
        ) from error
    with silence_logs():
        tracker.save_results_aggregated(results=results, samples=samples)
        for name in sorted(samples):
            copies = [dict(sample) for sample in samples[name]]  # the tracker changes them
            tracker.save_results_samples(task_name=name, samples=copies)
    files = sorted(set(folder.iterdir()) - earlier_files)
    if len(files) != 1 + len(samples):
        raise ConfigError(
            f"{folder}: the results cannot be stored there; check the space on the disk, or set "
            f"--output"
        )
    return files


def check_folder(folder: Path) -> None:
    """Raise `ConfigError` if results cannot be stored in `folder`."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"{nearest}: is not a folder, so no results can be stored in it")
    if not os.access(nearest, os.W_OK):
        raise ConfigError(f"{nearest}: cannot be written; store the results with --output DIR")


def choose_folder(path: str, output: Path | None, name: str) -> Path:
    """Return the folder of a model's result files.

    `path` is the model's directory or hub name, and `name` its name among several models. By
    default, the results are stored in the model's directory if it has one.
    """
    if output is not None:
        return output / name
    model_folder = Path(path).expanduser()
    return model_folder / FOLDER if model_folder.is_dir() else OTHER_FOLDER / name


def name_cache(opened: EvaluatedModel, options: SuiteOptions) -> str | None:
    """Return the path prefix of a model's cache, or None if no cache is used.

    The prefix depends on the weights and the settings, because the harness identifies cached
    answers only by their requests.
    """
    if options.use_cache is None:
        return None
    state = [opened.name, str(sorted(options.model_arguments.items())), str(options.seed)]
    for folder in (Path(opened.path).expanduser(), opened.adapter):
        if folder is None or not folder.is_dir():
            continue
        files = [file for pattern in WEIGHTS for file in folder.glob(pattern)]
        for file in sorted(files):
            stat = file.stat()
            state.append(f"{file.name} {stat.st_size} {stat.st_mtime_ns}")
    digest = hashlib.sha256("\n".join(state).encode()).hexdigest()[:12]
    return f"{options.use_cache}_{digest}"


@contextmanager
def _keep_random_states() -> Iterator[None]:
    """Restore the states of random generators afterwards, because the harness seeds them."""
    import torch

    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)


def _read_git_commit() -> str | None:
    """Return the git commit of the working directory, or None outside of a repository.

    Replaces a function of the harness that prints git's errors.
    """
    try:
        completed = subprocess.run(
            ["git", "describe", "--always"], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return completed.stdout.strip() or None


def list_figures(results: Mapping[str, Any]) -> list[TaskFigure]:
    """Return the metrics of all tasks and groups in the results of the harness."""
    figures = []
    rows = {**results.get("results", {}), **results.get("groups", {})}
    for name, row in rows.items():
        items = results.get("n-samples", {}).get(name, {}).get("effective")
        for key, value in row.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = row.get(f"{metric}_stderr,{filter_name}")
            figures.append(
                TaskFigure(
                    name,
                    filter_name,
                    metric,
                    float(value),
                    float(error) if isinstance(error, int | float) else None,
                    items,
                )
            )
    return figures
