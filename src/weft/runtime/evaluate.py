"""Runs the evaluation graph over every validation source; metrics are means over ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.experiment import Evaluation, Experiment
from weft.graph.graph import DataflowGraph
from weft.graph.ready import Buffer, ready
from weft.runtime.group import EVALUATION, WorkerGroup
from weft.runtime.node_runner import NodeRunner
from weft.runtime.step_metrics import Measured, join
from weft.runtime.store import TensorStore


class ValidationSource(Protocol):
    """A validation source: one id at a place."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> SequenceSample: ...


class Evaluator:
    """`sources` are the validation sources by name; ids are prefixed with theirs, so they never
    meet training ids.
    """

    def __init__(
        self,
        experiment: Experiment,
        evaluation: Evaluation,
        group: WorkerGroup,
        sources: Mapping[str, ValidationSource],
        tokenizers: Mapping[str, Tokenizer],
    ) -> None:
        self._graph = evaluation.graph
        self._group = group
        self._sources = sources
        self._size = evaluation.batch_size
        self._tokens = experiment.dataset.valid_tokens_per_batch
        self._runner = NodeRunner(experiment, evaluation.graph, group, tokenizers, EVALUATION)

    def run(self, step: int) -> dict[str, float]:
        """`eval/{source}/{metric}` of every source, `eval/{metric}` over the ids of all, and their
        number (`eval/num_rows`).

        `step` seeds what is sampled.
        """
        everything: list[Measured] = []
        line: dict[str, float] = {}
        for name, rows in self._sources.items():
            measured = [self._batch(batch, step) for batch in self._batches(name, rows)]
            line |= {f"eval/{name}/{metric}": value for metric, value in join(measured).items()}
            everything += measured
        line |= {f"eval/{metric}": value for metric, value in join(everything).items()}
        return line | {"eval/num_rows": float(sum(part.num_ids for part in everything))}

    def _batch(self, batch: SequenceSample, step: int) -> Measured:
        """Every node of the graph once, over the whole batch; later nodes' metrics win where names
        meet.
        """
        buffer = Buffer(closed=True)
        metas = TensorStore()
        metrics: dict[str, float] = {}
        metas.put(self._group.put(batch))
        buffer.add(batch.ids, batch.keys)
        seconds = 0.0
        whole = _whole_batches(self._graph)
        while firings := ready(whole, buffer, {}, []):
            firing = replace(firings[0], step=step)
            buffer.start(firing)
            self._runner.start(firing, metas)
            outcome = self._runner.wait()
            if outcome.outputs is not None:
                metas.put(outcome.outputs)
            metrics.update(outcome.metrics)
            seconds += outcome.seconds
            buffer.finish(
                firing, outcome.kept, self._graph.node(firing.node).outputs, len(self._graph.nodes)
            )
        self._group.discard(batch.ids)
        return Measured(metrics, batch.num_ids, seconds)

    def _batches(self, source: str, rows: ValidationSource) -> Iterator[SequenceSample]:
        """The rows in order, `batch_size` at a time, or as many as `valid_tokens_per_batch` holds."""
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


def _whole_batches(graph: DataflowGraph) -> DataflowGraph:
    """The graph with nodes that take a batch as it comes."""
    nodes: Sequence[Any] = [replace(node, batch_size=0) for node in graph.nodes]
    return replace(graph, nodes=nodes)
