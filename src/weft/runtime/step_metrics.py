"""Combination of the metrics of a step's nodes into one line of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


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


@dataclass
class StepMetrics:
    """Metrics of all firings (executions of nodes) in a step, grouped by node.

    Most nodes fire once per step. If a filter refills the batch, some nodes fire several times.
    """

    firings: dict[str, list[FiringMetrics]] = field(default_factory=dict)

    def add(self, node: str, measured: FiringMetrics) -> None:
        """Add the metrics of one firing of `node`."""
        self.firings.setdefault(node, []).append(measured)

    def compute_metrics(self) -> dict[str, float]:
        """Return the metrics of all node executions since the last call, named `{node}/{metric}`.

        The total duration of each node's executions, in seconds, is included as `time/{node}`.
        """
        line: dict[str, float] = {}
        for node, fired in self.firings.items():
            line[f"time/{node}"] = sum(f.seconds for f in fired)
        for node, fired in self.firings.items():
            for name, value in join_metrics(fired).items():
                line[f"{node}/{name}"] = value
        self.firings = {}
        return line


def join_metrics(fired: Iterable[FiringMetrics]) -> dict[str, float]:
    """Combine the metrics of several firings (executions) of a node.

    Counts (`num_*`) are summed. For names that end in `_max` or `_min`, the maximum or minimum is
    kept, and for `learning_rate` and `version` the last value. Other metrics are averaged over ids;
    firings that lack a metric do not count in its average.
    """
    parts = list(fired)
    joined: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part.metrics):
        having = []
        for p in parts:
            if name in p.metrics:
                having.append((float(p.metrics[name]), p.num_ids))
        values = [value for value, _ in having]
        last = name.rsplit("/", 1)[-1]
        if len(values) == 1 or last in ("learning_rate", "version"):
            joined[name] = values[-1]
        elif last.startswith("num_"):
            joined[name] = sum(values)
        elif last.endswith(("_max", "_min")):
            joined[name] = max(values) if last.endswith("_max") else min(values)
        else:
            weight = sum(count for _, count in having)
            joined[name] = (
                sum(value * count for value, count in having) / weight if weight else values[-1]
            )
    return joined
