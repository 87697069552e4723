"""Recording of the trained model's completions of a few fixed prompts, at every evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.experiment import Evaluation, Experiment
from weft.graph.ready import Firing
from weft.observe.filmstrip import FILE
from weft.observe.jsonl import StepFile
from weft.runtime.group import EVALUATION, WorkerGroup
from weft.runtime.node_runner import NodeRunner
from weft.runtime.samples import SampleReader
from weft.runtime.store import TensorStore


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
    ) -> None:
        (self._call,) = evaluation.graph.list_model_calls()
        self._prefix = f"{EVALUATION}{self._call.name}/"
        self._prompts = replace(prompts, ids=tuple(f"{self._prefix}{id}" for id in prompts.ids))
        self._group = group
        self._runner = NodeRunner(experiment, evaluation.graph, group, tokenizers, EVALUATION)
        self._samples = SampleReader(evaluation.graph, group, tokenizers[self._call.role])
        self._file = StepFile(directory / FILE)

    def truncate(self, step: int) -> None:
        """Remove completions from the file that were generated after step `step`."""
        self._file.truncate(step)

    def write_completions(self, step: int) -> None:
        """Generate completions with the current model and write them to the file.

        `step` is the number of completed steps. Does nothing if the file already has completions
        for this step. No other call may be running.
        """
        if any(row.get("step") == step for row in self._file.read_rows()):
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
