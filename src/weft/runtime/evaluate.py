"""Evaluation between steps: metrics on validation data, tasks, completions of fixed prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.experiment import EVALUATION, Evaluation, Experiment
from weft.graph.graph import DataflowGraph
from weft.graph.ready import Firing, IdBuffer, find_ready_firings
from weft.observe.jsonl import StepFile
from weft.observe.sample_rows import EVAL_PROMPTS
from weft.runtime.calls import PEAK_BYTES, WorkerGroup
from weft.runtime.firings import FiringMetrics, join_metrics
from weft.runtime.hosts import HostGroup
from weft.runtime.node_runner import NodeRunner
from weft.runtime.samples import SampleReader
from weft.runtime.store import TensorStore


class ValidationSource(Protocol):
    """Indexable collection of validation samples, each of which has a single id."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> SequenceSample: ...


class TaskEvaluator(Protocol):
    """Evaluation of the current weights on tasks, the option `eval_suite`."""

    def run(self, step: int) -> dict[str, float]:
        """Evaluate after `step` completed train steps, and return the metrics."""
        ...

    def describe(self) -> str:
        """Return a line that shows some metrics of the last evaluation."""
        ...

    def truncate(self, step: int) -> None:
        """Remove the results of evaluations after step `step`."""
        ...


class Evaluator:
    """Runner of the evaluation graph on all validation sources.

    `sources` maps names to sources. The ids of a source are prefixed with its name, so that they
    cannot collide with training ids.
    """

    def __init__(
        self,
        experiment: Experiment,
        evaluation: Evaluation,
        group: WorkerGroup,
        sources: Mapping[str, ValidationSource],
        tokenizers: Mapping[str, Tokenizer],
        hosts: HostGroup | None = None,
    ) -> None:
        self._graph = evaluation.graph
        self._group = group
        self._sources = sources
        self._size = evaluation.batch_size
        self._tokens = experiment.dataset.valid_tokens_per_batch
        self._runner = NodeRunner(
            experiment, evaluation.graph, group, tokenizers, EVALUATION, hosts
        )

    def run(self, step: int) -> dict[str, float]:
        """Evaluate on all sources and return the metrics.

        `eval/{source}/{metric}` is the mean over one source, `eval/{metric}` is the mean over the
        samples of all sources, and `eval/num_rows` is the number of samples. `step` is the number
        of completed train steps, which also seeds the sampling.
        """
        all_metrics: list[FiringMetrics] = []
        line: dict[str, float] = {}
        for name, rows in self._sources.items():
            measured = []
            for batch in self._iterate_batches(name, rows):
                measured.append(self._evaluate_batch(batch, step))
            for metric, value in join_metrics(measured).items():
                line[f"eval/{name}/{metric}"] = value
            all_metrics += measured
        for metric, value in join_metrics(all_metrics).items():
            line[f"eval/{metric}"] = value
        return line | {"eval/num_rows": float(sum(part.num_ids for part in all_metrics))}

    def _evaluate_batch(self, batch: SequenceSample, step: int) -> FiringMetrics:
        """Run every node of the evaluation graph once on the batch, and return their metrics.

        If two nodes have a metric of the same name, the value of the later node is kept.
        """
        buffer = IdBuffer(closed=True)
        metas = TensorStore()
        metrics: dict[str, float] = {}
        metas.put(self._group.put(batch))
        buffer.add(batch.ids, batch.keys)
        seconds = 0.0
        graph = _accept_any_batch_size(self._graph)
        while firings := find_ready_firings(graph, buffer, {}, []):
            firing = replace(firings[0], step=step)
            buffer.record_start(firing)
            self._runner.start(firing, metas)
            outcome = self._runner.wait()
            if outcome.outputs is not None:
                metas.put(outcome.outputs)
            metrics.update(outcome.metrics)
            metrics.pop(PEAK_BYTES, None)  # says nothing about the weights
            seconds += outcome.seconds
            buffer.record_finish(
                firing,
                outcome.kept_ids,
                self._graph.get_node(firing.node).outputs,
                len(self._graph.nodes),
            )
        self._group.discard(batch.ids)
        return FiringMetrics(metrics, batch.num_ids, seconds)

    def _iterate_batches(self, source: str, rows: ValidationSource) -> Iterator[SequenceSample]:
        """Iterate over the rows of a source in batches.

        A batch has `batch_size` rows or, if `batch_size` is 0, up to `valid_tokens_per_batch`
        tokens.
        """
        part: list[SequenceSample] = []
        tokens = 0
        for index in range(len(rows)):
            row = rows[index]
            row = replace(row, ids=tuple(f"{EVALUATION}{source}/{id}" for id in row.ids))
            cost = int(row.token_costs().sum())
            if self._size:
                full = len(part) >= self._size
            else:
                full = tokens + cost > (self._tokens or 0)
            if part and full:
                yield SequenceSample.gather(part)
                part = []
                tokens = 0
            part.append(row)
            tokens += cost
        if part:
            yield SequenceSample.gather(part)


def _accept_any_batch_size(graph: DataflowGraph) -> DataflowGraph:
    """Return a copy of the graph in which each node processes a whole batch of any size."""
    nodes: Sequence[Any] = [replace(node, batch_size=0) for node in graph.nodes]
    return replace(graph, nodes=nodes)


class FixedPrompts:
    """Recorder of completions of a few fixed prompts, to show how the model changes.

    `prompts` is a batch of prompts with one id each. The ids get a prefix, so that they differ from
    the ids of training samples.
    """

    def __init__(
        self,
        experiment: Experiment,
        evaluation: Evaluation,
        group: WorkerGroup,
        prompts: SequenceSample,
        tokenizers: Mapping[str, Tokenizer],
        directory: Path,
        hosts: HostGroup | None = None,
    ) -> None:
        self._hosts = hosts
        (self._call,) = evaluation.graph.list_model_calls()
        self._prefix = f"{EVALUATION}{self._call.name}/"
        self._prompts = replace(prompts, ids=tuple(f"{self._prefix}{id}" for id in prompts.ids))
        self._group = group
        self._runner = NodeRunner(
            experiment, evaluation.graph, group, tokenizers, EVALUATION, hosts
        )
        self._samples = SampleReader(evaluation.graph, group, tokenizers[self._call.role])
        self._file = StepFile(directory / EVAL_PROMPTS)

    def truncate(self, step: int) -> None:
        """Remove completions from the file that were generated after step `step`."""
        self._file.truncate(step)

    def write_completions(self, step: int) -> None:
        """Generate completions with the current model and write them to the file.

        `step` is the number of completed steps. Does nothing if the file already has completions
        for this step. No other call may be running.
        """

        def is_written() -> bool:
            return any(row.get("step") == step for row in self._file.read_rows())

        if is_written() if self._hosts is None else self._hosts.decide(is_written):
            return
        metas = TensorStore()
        ids = self._prompts.ids
        metas.put(self._group.put(self._prompts))
        self._runner.start(Firing(self._call.name, ids, step), metas)
        self._runner.wait()
        rows = self._samples.read_generations(ids)
        self._group.discard(ids)
        for row in rows:
            self._file.append(
                {
                    "step": step,
                    "id": row["id"].removeprefix(self._prefix),
                    "prompt": row["prompt"],
                    "completion": row["completion"],
                    "tokens": len(row["completion_ids"]),
                    "finish_reason": row["finish_reason"],
                }
            )
