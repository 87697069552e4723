"""Recorder of finished firings, and of completions before their tensors are dropped."""

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
    """Listener that passes finished firings and samples of finished steps to the observer.

    If the node that defines the run's steps is a generation call, all completions are also written
    to `generations.jsonl`, since they are the output of the run.
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
        """Remove the completions that were generated after the recovery point at `step`."""
        if self._product is not None:
            self._product.truncate(step)

    def on_firing_finished(self, outcome: FiringOutcome, step: int) -> None:
        """Record a firing that finished in step `step` as a span of the observer's timeline."""
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
        """Read samples of the finished step `step`, and store them in `rows`.

        `ids` are the ids that the step used. In a run that records its generations, all completions
        of these ids are also written to `generations.jsonl`.
        """
        self.rows = self._samples.read_rows(ids, step, self._seen_samples)
        if self._product is not None:
            for row in self._samples.read_generations(ids):
                self._product.append({"step": step, **row})
