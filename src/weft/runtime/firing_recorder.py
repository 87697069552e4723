"""Recorder of finished firings (executions of graph nodes) and of samples of each step.

Samples are read before their tensors are removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.data.sample import SequenceSample
from weft.experiment import Experiment
from weft.graph.mfc import MFCDef
from weft.observe.jsonl import StepFile
from weft.observe.observer import RunObserver
from weft.observe.timeline import HOST, ROLES
from weft.runtime.outcome import FiringOutcome
from weft.runtime.samples import SampleReader

GENERATIONS = "generations.jsonl"


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
        followed = experiment.get_node(experiment.steps_follow)
        generates = isinstance(followed, MFCDef) and followed.method == "generate"
        self._product = StepFile(directory / GENERATIONS) if generates else None
        self.rows: list[dict[str, Any]] = []
        self._step_node = followed.name
        self._seen_samples: SequenceSample | None = (
            None  # `MFCResult.seen` of the last firing of the followed node
        )

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
        self._observer.add_span(firing.node, track, outcome.start_time, outcome.seconds, **about)
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
