"""Firings (executions of graph nodes) that have finished: their results, metrics and records.

The metrics of a step's firings are combined into one line of metrics.jsonl. Until then, the
`StepLedger` has them. The `FiringRecorder` reads samples of a step before their tensors are removed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.data.sample import SequenceSample
from weft.experiment import Experiment
from weft.graph.mfc import MFCDef, Node
from weft.graph.ready import Firing
from weft.observe.jsonl import StepFile
from weft.observe.observer import RunObserver
from weft.observe.timeline import HOST, ROLES
from weft.runtime.calls import PEAK_BYTES, SampleMeta
from weft.runtime.samples import SampleReader

GENERATIONS = "generations.jsonl"


@dataclass(frozen=True)
class FiringOutcome:
    """Result of one firing (execution) of a graph node.

    Attributes:
        firing: Node and sample ids of the firing.
        outputs: Metadata of the outputs, or None if the node has no output keys.
        metrics: Metrics of the node.
        start_time: Start in seconds since the epoch.
        seconds: Duration in seconds.
        kept_ids: Ids that the node kept: all ids, unless the node is a filter.
        seen_samples: Log-probs or scores of a few ids, for display, or None.
    """

    firing: Firing
    outputs: SampleMeta | None
    metrics: Mapping[str, float]
    start_time: float  # seconds since the epoch
    seconds: float
    kept_ids: tuple[str, ...]  # ids that a filter kept; all ids for other nodes
    seen_samples: SequenceSample | None = None  # the network's values for a few ids, with tensors


def describe_firing(node: Node, firing: Firing) -> str:
    """Describe a firing for an error message by its node, role or function, and ids."""
    if isinstance(node, MFCDef):
        executor = f"role {node.role!r}"
    else:
        executor = f"host function {node.function!r}"
    first_ids = ", ".join(firing.ids[:4]) + (", ..." if len(firing.ids) > 4 else "")
    return f"node {firing.node!r} ({executor}, {len(firing.ids)} ids: {first_ids})"


@dataclass(frozen=True)
class FiringMetrics:
    """Metrics of one firing (execution) of a node.

    Attributes:
        metrics: Metrics by name.
        num_ids: Number of sample ids that were processed, used as weight in averages.
        seconds: Duration in seconds.
    """

    metrics: Mapping[str, float]
    num_ids: int
    seconds: float


def join_metrics(fired: Iterable[FiringMetrics]) -> dict[str, float]:
    """Combine the metrics of several firings (executions) of a node.

    Counts (`num_*`) are summed. For names that end in `_max` or `_min`, the maximum or minimum is
    kept, for `peak_bytes` the maximum, and for `learning_rate` and `version` the last value. Other
    metrics are averaged over ids; firings that lack a metric do not count in its average.
    """
    parts = list(fired)
    joined: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part.metrics):
        having = []
        for part in parts:
            if name in part.metrics:
                having.append((float(part.metrics[name]), part.num_ids))
        values = [value for value, _ in having]
        last = name.rsplit("/", 1)[-1]
        if len(values) == 1 or last in ("learning_rate", "version"):
            joined[name] = values[-1]
        elif last.startswith("num_"):
            joined[name] = sum(values)
        elif last.endswith(("_max", "_min", PEAK_BYTES)):
            joined[name] = min(values) if last.endswith("_min") else max(values)
        else:
            weight = sum(count for _, count in having)
            total = sum(value * count for value, count in having)
            joined[name] = total / weight if weight else values[-1]
    return joined


@dataclass
class _LedgerEntry:
    """Metrics of a node.

    Attributes:
        node: Name of the node.
        firing: Firing (execution) that was measured, or None if the metrics do not belong to a
            single one.
        measured: The metrics, or None while the firing is running.
    """

    node: str
    firing: Firing | None
    measured: FiringMetrics | None  # None while the firing runs

    def is_ahead(self, ahead: Collection[str]) -> bool:
        """Return whether the firing belongs to a later step.

        `ahead` has the ids that later steps will train on. The firing belongs to a later step if it
        reads at least one of them.
        """
        return (
            bool(ahead) and self.firing is not None and any(id in ahead for id in self.firing.ids)
        )


class StepLedger:
    """Record of running and finished firings (node executions), in the order of their scheduling.

    When a step ends, the metrics of its firings are logged. Firings that belong to later steps stay
    in the record. They are recognised by their ids: callers pass the ids of later steps as `ahead`.
    """

    def __init__(self) -> None:
        self._entries: list[_LedgerEntry] = []
        self._open_entries: dict[Firing, _LedgerEntry] = {}

    def add_firing(self, firing: Firing) -> None:
        """Add a firing that has been scheduled. Its metrics are recorded when it finishes."""
        self._open_entries[firing] = _LedgerEntry(firing.node, firing, None)
        self._entries.append(self._open_entries[firing])

    def finish_firing(self, firing: Firing, measured: FiringMetrics) -> None:
        """Record the metrics of a finished firing."""
        self._open_entries.pop(firing).measured = measured

    def record_measurements(self, node: str, measured: FiringMetrics) -> None:
        """Record metrics of a node that do not belong to a single firing."""
        self._entries.append(_LedgerEntry(node, None, measured))

    def has_open_firings(self, ahead: Collection[str] = ()) -> bool:
        """Return whether any firing of the current step is unfinished.

        `ahead` contains the ids of later steps. Firings that read any of them are not considered.
        """
        return any(not line.is_ahead(ahead) for line in self._open_entries.values())

    def collect_open_ids(self) -> set[str]:
        """Return the sample ids that unfinished firings (executions of nodes) read."""
        open_ids: set[str] = set()
        for firing in self._open_entries:
            open_ids.update(firing.ids)
        return open_ids

    def close_step(self, ahead: Collection[str] = ()) -> dict[str, float]:
        """Return the metrics of the finished step, and remove its firings from the record.

        The metrics are named `{node}/{metric}`, and `time/{node}` is the total duration of the
        node's firings in seconds. A node fires several times in a step if a filter refills the
        batch.

        Firings that read any of the ids `ahead` belong to later steps and stay in the record.
        """
        fired_by_node: dict[str, list[FiringMetrics]] = {}
        later = list[_LedgerEntry]()
        for line in self._entries:
            if line.is_ahead(ahead):
                later.append(line)
            else:
                assert line.measured is not None, f"{line.node} has not finished"
                fired_by_node.setdefault(line.node, []).append(line.measured)
        self._entries = later
        metrics: dict[str, float] = {}
        for node, fired in fired_by_node.items():
            metrics[f"time/{node}"] = sum(firing.seconds for firing in fired)
        for node, fired in fired_by_node.items():
            for name, value in join_metrics(fired).items():
                metrics[f"{node}/{name}"] = value
        return metrics

    def state_dict(self) -> list[Any]:
        """Return the recorded firings, all of which must be finished, as plain values."""
        assert not self._open_entries, "no firing may be running"
        rows = []
        for line in self._entries:
            assert line.firing is not None and line.measured is not None, (
                "measurements without a firing are logged with the step in which they were made"
            )
            firing = line.firing
            measured = line.measured
            rows.append(
                [
                    line.node,
                    list(firing.ids),
                    firing.step,
                    dict(measured.metrics),
                    measured.num_ids,
                    measured.seconds,
                ]
            )
        return rows

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Replace the recorded firings by those that `state_dict` returned."""
        self._entries = [
            _LedgerEntry(
                node, Firing(node, tuple(ids), step), FiringMetrics(metrics, num_ids, seconds)
            )
            for node, ids, step, metrics, num_ids, seconds in state
        ]


class FiringRecorder:
    """Recorder of finished firings (executions of graph nodes), and of samples of finished steps.

    Firings are added to the observer's timeline. The samples of the last finished step are stored
    in `rows`. If the node that defines the run's steps is a generation call, all completions are
    also written to `generations.jsonl`.
    """

    def __init__(
        self, experiment: Experiment, samples: SampleReader, directory: Path, observer: RunObserver
    ) -> None:
        self._graph = experiment.graph
        self._samples = samples
        self._observer = observer
        followed = experiment.graph.get_node(experiment.steps_follow)
        generates = isinstance(followed, MFCDef) and followed.method == "generate"
        self._product = StepFile(directory / GENERATIONS) if generates else None
        self.rows: list[dict[str, Any]] = []
        self._step_node = followed.name
        # `MFCResult.seen` of the last firing of the followed node
        self._seen_samples: SequenceSample | None = None

    def truncate(self, step: int) -> None:
        """Remove completions from `generations.jsonl` that belong to steps after `step`."""
        if self._product is not None:
            self._product.truncate(step)

    def on_firing_finished(self, outcome: FiringOutcome, step: int) -> None:
        """Add a finished firing (execution of a graph node) to the observer's timeline.

        `step` is the step during which it finished.
        """
        firing, node = outcome.firing, self._graph.get_node(outcome.firing.node)
        if isinstance(node, MFCDef):
            track = f"{ROLES}/{node.role}"
        else:
            track = f"{HOST}/{node.name}"
        about = {"step": step, "ids": len(firing.ids)}
        start, seconds = outcome.start_time, outcome.seconds
        self._observer.timeline.add(firing.node, track, start, seconds, **about)
        if firing.node == self._step_node:
            self._seen_samples = outcome.seen_samples

    def on_step_finished(self, ids: Sequence[str], step: int) -> None:
        """Read samples of the finished step and store them in `rows`.

        `ids` are the ids that the step used. If the run writes `generations.jsonl`, all completions
        of these ids are also added to this file.
        """
        self.rows = self._samples.read_rows(ids, step, self._seen_samples)
        if self._product is not None:
            for row in self._samples.read_generations(ids):
                self._product.append({"step": step, **row})
