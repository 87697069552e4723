"""What a master knows of the firings that it has decided on, until a line of metrics.jsonl holds
what they measured.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from weft.graph.ready import Firing
from weft.runtime.step_metrics import Measured, StepMetrics


@dataclass
class _Line:
    """`firing` None: said of a node beside its firings."""

    node: str
    firing: Firing | None
    measured: Measured | None  # None until it is over

    def is_ahead(self, ahead: Collection[str]) -> bool:
        """Whether it is of later steps: all of its ids that are still there are among theirs."""
        return (
            bool(ahead) and self.firing is not None and any(id in ahead for id in self.firing.ids)
        )


class Books:
    """Firings in the order in which they were decided on, whatever order they end in.

    `ahead` are the ids that later steps will train on. A firing belongs to the first step after
    which none of its ids is waiting for one.
    """

    def __init__(self) -> None:
        self._lines: list[_Line] = []
        self._open: dict[Firing, _Line] = {}

    def decide(self, firing: Firing) -> None:
        self._open[firing] = _Line(firing.node, firing, None)
        self._lines.append(self._open[firing])

    def end(self, firing: Firing, measured: Measured) -> None:
        self._open.pop(firing).measured = measured

    def note(self, node: str, measured: Measured) -> None:
        """Something measured that is of no firing."""
        self._lines.append(_Line(node, None, measured))

    def are_open(self, ahead: Collection[str] = ()) -> bool:
        """Whether a firing that is not of later steps is not over."""
        return any(not line.is_ahead(ahead) for line in self._open.values())

    def open_ids(self) -> set[str]:
        """Ids that firings which are not over read."""
        return {id for firing in self._open for id in firing.ids}

    def close(self, ahead: Collection[str] = ()) -> dict[str, float]:
        """The line of a step that is over, and forget it."""
        metrics = StepMetrics()
        later = list[_Line]()
        for line in self._lines:
            if line.is_ahead(ahead):
                later.append(line)
            else:
                assert line.measured is not None, f"{line.node} is not over"
                metrics.add(line.node, line.measured)
        self._lines = later
        return metrics.close()

    def state_dict(self) -> list[Any]:
        """Plain values; only with nothing under way."""
        assert not self._open, "a recovery point has nothing under way"
        found = []
        for line in self._lines:
            assert line.firing is not None and line.measured is not None, (
                "notes are of the step that they were made in"
            )
            firing = line.firing
            measured = line.measured
            found.append(
                [
                    line.node,
                    list(firing.ids),
                    firing.step,
                    dict(measured.metrics),
                    measured.num_ids,
                    measured.seconds,
                ]
            )
        return found

    def load_state_dict(self, state: Sequence[Any]) -> None:
        self._lines = [
            _Line(node, Firing(node, tuple(ids), step), Measured(metrics, num_ids, seconds))
            for node, ids, step, metrics, num_ids, seconds in state
        ]
