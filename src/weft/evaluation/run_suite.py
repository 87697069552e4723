"""Evaluation of the model that a run trains, on tasks: the option `eval_suite`.

The engines of the run answer the requests of the tasks with their current weights and layouts, in
calls of the graph `Experiment.eval_suite`. Options, checks, prompts, scores and result files are
the same as for `weft eval suite`. The files are in `eval/stepN` of the run's directory, so that
`weft eval table` shows them as results of RUN@stepN.

lm_eval is imported only when a function needs it.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast
from unittest import mock

from weft.algorithms.base import Output, to_host_array
from weft.data.sample import SequenceSample
from weft.data.suite_spec import EvalSuiteSpec
from weft.data.tokenizer import Tokenizer
from weft.engine.base import Request
from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError, DataError, UserError
from weft.evaluation import suite
from weft.evaluation.catalogue import CatalogueOptions
from weft.evaluation.continuation_scores import join_ids
from weft.evaluation.models import AnsweringEngine
from weft.evaluation.suite import SuiteOptions, TaskFigure
from weft.evaluation.suite_tasks import (
    COPIES,
    LoadedTasks,
    load_named_tasks,
    require_harness,
)
from weft.evaluation.task_judge import JudgeSettings
from weft.experiment import EVALUATION, Experiment
from weft.experiments.models import read_model_context
from weft.graph.mfc import MFCDef
from weft.graph.ready import Firing
from weft.interfaces.task_requests import SAMPLING, describe_sampling
from weft.observe.jsonl import STEP
from weft.observe.metrics import EVAL, format_number
from weft.runtime.calls import WorkerGroup
from weft.runtime.directory import clean_up, remove, write_directory
from weft.runtime.hosts import HostGroup
from weft.runtime.node_runner import NodeRunner
from weft.runtime.store import TensorStore

# Resamples for standard errors of metrics that are not means. With the 100,000 of
# `weft eval suite`, this would take longer than the evaluation of a small model.
BOOTSTRAP_ITERS = 1000
NO_FILTER = "none"
MAX_FIGURES = 6  # maximum figures in the log line about an evaluation
SWITCHES = ("allow_code", "apply_chat_template")  # options without a value on the command line


@dataclass(frozen=True)
class PreparedSuite:
    """Loaded and checked tasks of a run, with the options of their evaluation.

    Attributes:
        loaded: Tasks with their data.
        options: Options of the evaluation.
        tokenizer: Tokenizer of the evaluated role.
        context: Maximum number of tokens of a sequence, or None if it is unknown.
    """

    loaded: LoadedTasks
    options: SuiteOptions
    tokenizer: Tokenizer
    context: int | None

    def list_names(self) -> list[str]:
        """Return the names of all tasks and groups that are evaluated."""
        loaded = self.loaded.manager.load(list(self.loaded.tasks))
        return [*loaded["groups"], *loaded["tasks"]]


@dataclass(frozen=True)
class RunModel:
    """Model that a run trains; implements `EvaluatedModel`. `path` is a name such as RUN@step4."""

    engine: AnsweringEngine
    tokenizer: Tokenizer
    path: str
    context: int | None
    adapter: Path | None = None

    @property
    def name(self) -> str:
        return self.path


# -- before the run


def prepare_suite(
    experiment: Experiment, tokenizers: Mapping[str, Tokenizer]
) -> PreparedSuite | None:
    """Return the tasks of the option `eval_suite`, or None if it is not set.

    Checks everything that can be checked without weights. Raises `UserError` if lm_eval is missing,
    for an unknown task, for missing data, permissions or a judge, and for options that a task or
    the model does not allow. Messages name the options of the run.
    """
    if experiment.eval_suite is None:
        return None
    require_harness("eval_suite")
    spec = experiment.control.eval_suite
    role = _get_role(experiment)
    with _name_run_options(role), silence_thread():
        loaded = load_named_tasks(spec.tasks, _build_catalogue_options(spec))
        prepared = PreparedSuite(
            loaded,
            _build_options(experiment),
            tokenizers[role],
            read_model_context(experiment.roles[role]),
        )
        engine = cast(AnsweringEngine, None)  # only tokens and options are checked
        model = RunModel(engine, prepared.tokenizer, role, prepared.context)
        checked = suite.check_tasks(model, loaded, prepared.options)
        suite.check_items(checked, loaded, prepared.options)
    return prepared


def _get_role(experiment: Experiment) -> str:
    assert experiment.eval_suite is not None, "eval_suite is set"
    return experiment.eval_suite.graph.list_model_calls()[0].role


def _build_catalogue_options(spec: EvalSuiteSpec) -> CatalogueOptions:
    judge = None
    if spec.judge is not None and spec.judge_model is not None:
        judge = JudgeSettings(spec.judge, spec.judge_model)
    return CatalogueOptions(
        data={name: Path(path) for name, path in spec.data.items()},
        folder=Path(spec.data_dir or COPIES).expanduser(),
        judge=judge,
        allow_code=spec.allow_code,
        num_samples=spec.num_samples,
        include_path=[Path(folder) for folder in spec.include_path],
    )


def _build_options(experiment: Experiment) -> SuiteOptions:
    """Return the options of the evaluation from those of the run."""
    spec = experiment.control.eval_suite
    as_multiturn = spec.fewshot_as_multiturn
    assert experiment.eval_suite is not None, "eval_suite is set"
    score_call = experiment.eval_suite.graph.list_model_calls()[0]
    num_ranks = experiment.call_meshes[EVALUATION + score_call.name].layout.data
    return SuiteOptions(
        limit=spec.limit,
        num_fewshot=spec.num_fewshot,
        apply_chat_template=spec.apply_chat_template,
        fewshot_as_multiturn=spec.apply_chat_template if as_multiturn is None else as_multiturn,
        system_instruction=spec.system_instruction,
        gen_kwargs=spec.gen_kwargs,
        log_samples=spec.log_samples,
        seed=spec.seed,
        bootstrap_iters=BOOTSTRAP_ITERS,
        max_tokens=num_ranks * (spec.batch or experiment.control.max_tokens_per_microbatch),
    )


@contextmanager
def _name_run_options(role: str) -> Iterator[None]:
    """Replace flags of `weft eval suite` in error messages with the options of the run.

    If the message changes, a `DataError` is raised for a `DataError`, else a `ConfigError`.
    """
    try:
        yield
    except UserError as error:
        text = replace_flags(str(error), role)
        if text == str(error):
            raise
        raise (DataError if isinstance(error, DataError) else ConfigError)(text) from error


def replace_flags(text: str, role: str) -> str:
    """Replace the flags of `weft eval suite` in a message with the options of a run.

    For example, `--num_fewshot 5` becomes `eval_suite.num_fewshot=5`. `role` is the evaluated role.
    """
    text = text.replace("--chat-template", f"{role}.tokenizer.chat_template")
    text = re.sub(r"^unknown task", "eval_suite.tasks: unknown task", text)
    # options that take a list
    text = re.sub(r"--tasks (\S+,[^\s;:]+)", r"eval_suite.tasks=[\1]", text)
    text = re.sub(r"--include_path (\S+):", r"eval_suite.include_path=[\1]:", text)
    text = re.sub(rf"--({'|'.join(SWITCHES)})\b", r"eval_suite.\1=true", text)
    # mappings, such as --data gsm8k=PATH or --gen_kwargs do_sample=true,temperature=1
    text = re.sub(
        r"--(data|gen_kwargs) (\w+=[^\s;,]+(?:,\w+=[^\s;,]+)*)",
        lambda flag: " ".join(f"eval_suite.{flag[1]}.{item}" for item in flag[2].split(",")),
        text,
    )
    # options with a number or a word in capitals, and options without a value
    text = re.sub(r"--(\w+) ([A-Z]+\b|[\d.]+\b)", r"eval_suite.\1=\2", text)
    return re.sub(r"--(\w+)", r"eval_suite.\1", text)


class _SilencedStream:
    """Output stream that ignores the writes of one thread, and passes on all others."""

    def __init__(self, stream: TextIO, thread: int) -> None:
        self._stream = stream
        self._thread = thread

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def silence_thread() -> Iterator[None]:
    """Ignore the output of this thread: progress bars and messages of lm_eval.

    Other threads, such as the one that draws the run's display, still write to the real streams.
    """
    thread = threading.get_ident()
    out = cast(TextIO, _SilencedStream(sys.stdout, thread))
    err = cast(TextIO, _SilencedStream(sys.stderr, thread))
    with redirect_stdout(out), redirect_stderr(err):
        yield


# -- the engines of the run


class RunEngine:
    """Engine that answers requests with two calls of a run: one scores texts, one generates.

    It implements `AnsweringEngine` for the role that the run trains. `step` is the number of
    completed train steps. While a method runs, no other call of the run may be running.
    """

    def __init__(
        self,
        experiment: Experiment,
        group: WorkerGroup,
        tokenizers: Mapping[str, Tokenizer],
        hosts: HostGroup | None = None,
    ) -> None:
        assert experiment.eval_suite is not None, "eval_suite is set"
        graph = experiment.eval_suite.graph
        self._score, self._generate = graph.list_model_calls()
        self._group = group
        self._runner = NodeRunner(experiment, graph, group, tokenizers, EVALUATION, hosts)
        self.role = self._score.role
        self.step = 0

    @property
    def description(self) -> Mapping[str, Any]:
        """Properties of the role's model, such as `num_parameters`."""
        return self._group.describe()[self.role]

    def forward(
        self, batch: SequenceSample, want: frozenset[Output], *, max_tokens: int = 0
    ) -> SequenceSample:
        """Return the outputs in `want` for each id of the batch.

        Each data-parallel rank computes its part in one pass; `max_tokens` is not used.
        """
        return self._run(self._score, batch, sorted(want))

    @contextmanager
    def generating(self, spec: GenerationSpec) -> Iterator[_RunGenerator]:
        """Open a generator on the current weights; see `Engine.generating`."""
        yield _RunGenerator(self, spec)

    def generate(self, requests: Sequence[Request], spec: GenerationSpec) -> list[list[int]]:
        """Return the tokens of each request's continuation. `spec` has the generator's settings."""
        prompts = [list(request.prompt) for request in requests]
        batch = SequenceSample.from_groups(
            [request.id for request in requests],
            {"prompt": [[len(prompt)] for prompt in prompts]},
            {"prompt": join_ids(prompts)},
            {SAMPLING: [describe_sampling(request, spec) for request in requests]},
        )
        answers = self._run(self._generate, batch, ["answer"]).sequences("answer")
        return [to_host_array(answer).tolist() for answer in answers]

    def _run(self, call: MFCDef, batch: SequenceSample, keys: Sequence[str]) -> SequenceSample:
        """Run a call on a batch and return its outputs."""
        # The prefix makes the ids different from those of the run's rows.
        ids = tuple(f"{EVALUATION}{call.name}/{id}" for id in batch.ids)
        metas = TensorStore()
        metas.put(self._group.put(replace(batch, ids=ids)))
        try:
            self._runner.start(Firing(call.name, ids, self.step), metas)
            self._runner.wait()
            return self._group.fetch(ids, keys)
        finally:
            self._group.discard(ids)


class _RunToken(NamedTuple):
    id: str
    token: int
    finish: str | None


class _RunGenerator:
    """Generator that answers all submitted requests in one call, at the first step."""

    def __init__(self, engine: RunEngine, spec: GenerationSpec) -> None:
        self._engine = engine
        self._spec = spec
        self._requests: list[Request] = []

    @property
    def idle(self) -> bool:
        return not self._requests

    def submit(self, requests: Sequence[Request]) -> None:
        self._requests += requests

    def step(self) -> list[_RunToken]:
        requests = self._requests
        self._requests = []
        events = []
        answers = self._engine.generate(requests, self._spec)
        for request, tokens in zip(requests, answers, strict=True):
            for token in tokens[:-1]:
                events.append(_RunToken(request.id, token, None))
            events.append(_RunToken(request.id, tokens[-1], "stop"))
        return events


# -- during the run


class RunSuite:
    """Evaluation of a run's current weights on tasks; implements `runtime.evaluate.TaskEvaluator`.

    Result files are written below `folder`, which is in the run's directory. `name` is the name of
    the run.
    """

    def __init__(self, prepared: PreparedSuite, engine: RunEngine, folder: Path, name: str) -> None:
        self._prepared = prepared
        self._engine = engine
        self._folder = folder
        self._name = name
        self._figures: list[TaskFigure] = []  # of the last evaluation

    def run(self, step: int) -> dict[str, float]:
        """Evaluate the current weights on all tasks, and return the metrics.

        `step` is the number of completed train steps. Results of an earlier evaluation of this step
        are replaced. The metrics are `eval/TASK/METRIC` or, for metrics after a filter with a name,
        `eval/TASK/FILTER/METRIC`.
        """
        prepared = self._prepared
        self._engine.step = step
        model = RunModel(
            self._engine, prepared.tokenizer, f"{self._name}@step{step}", prepared.context
        )
        results: dict[str, Any] = {}

        def evaluate(folder: Path) -> None:
            results.update(suite.evaluate(model, prepared.loaded, prepared.options, folder)[0])

        # Keeps lm_eval from forking this process, which holds models, to draw resamples.
        in_process = mock.patch.dict(os.environ, {"DISABLE_MULTIPROC": "1"})
        with _name_run_options(self._engine.role), silence_thread(), in_process:
            write_directory(self._folder / f"step{step}", evaluate)
        self._figures = suite.list_figures(results)
        return {name_metric(figure): figure.value for figure in self._figures}

    def describe(self) -> str:
        """Return a log line with figures of the last evaluation."""
        return f"eval_suite, step {self._engine.step}: {format_figures(self._figures)}"

    def truncate(self, step: int) -> None:
        """Remove the results of evaluations after step `step`, and unfinished results."""
        clean_up(self._folder)
        for path in self._folder.glob("step*"):
            match = STEP.fullmatch(path.name)
            if match is not None and int(match[1]) > step:
                remove(path)


def name_metric(figure: TaskFigure) -> str:
    """Return the name of a figure in metrics.jsonl."""
    if figure.filter == NO_FILTER:
        return f"{EVAL}{figure.task}/{figure.metric}"
    return f"{EVAL}{figure.task}/{figure.filter}/{figure.metric}"


def format_figures(figures: Sequence[TaskFigure]) -> str:
    """Return the first figures with their standard errors, and the number of others."""
    parts = []
    for figure in figures[:MAX_FIGURES]:
        filtered = "" if figure.filter == NO_FILTER else f" ({figure.filter})"
        error = "" if figure.error is None else f" ± {format_number(figure.error)}"
        value = format_number(figure.value)
        parts.append(f"{figure.task} {figure.metric}{filtered} {value}{error}")
    if len(figures) > MAX_FIGURES:
        parts.append(f"and {len(figures) - MAX_FIGURES} others in metrics.jsonl")
    return ", ".join(parts)
