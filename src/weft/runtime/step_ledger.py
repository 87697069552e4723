"""Metrics of firings (executions of graph nodes), collected for the log.

They are kept until the step that they belong to is logged.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from weft.graph.ready import Firing
from weft.runtime.step_metrics import FiringMetrics, StepMetrics


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

        Firings that read any of the ids `ahead` belong to later steps and stay in the record.
        """
        metrics = StepMetrics()
        later = list[_LedgerEntry]()
        for line in self._entries:
            if line.is_ahead(ahead):
                later.append(line)
            else:
                assert line.measured is not None, f"{line.node} has not finished"
                metrics.add(line.node, line.measured)
        self._entries = later
        return metrics.compute_metrics()

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
