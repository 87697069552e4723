"""Batch generation: one call, `gen`, whose completions are written to generations.jsonl."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.data.spec import DatasetSpec
from weft.engine.spec import GenerationSpec, ModelSpec
from weft.engine.spec_parts import MAX_SAMPLES
from weft.experiment import Experiment
from weft.experiments._assemble import (
    ExperimentParts,
    assemble,
    check_config,
    choose_dataset_type,
    fill_batch_sizes,
    get_batch_size,
)
from weft.experiments.common import MFCOptions, RunConfig
from weft.experiments.models import find_context
from weft.graph.mfc import MFCDef
from weft.options import option, to_mapping
from weft.planner.lengths import compute_max_length, fill_sample_lengths
from weft.registry import register_quickstart


@dataclass
class GenOptions(MFCOptions, GenerationSpec):
    """Options of the call `gen`: how completions are sampled, and how the call runs."""

    samples_per_prompt: int = option(1, "completions per prompt", at_least=1, at_most=MAX_SAMPLES)


@register_quickstart("gen")
@dataclass
class GenConfig(RunConfig):
    """Batch generation: sample completions for a file of prompts.

    The completions are written to generations.jsonl in the directory of the run.
    """

    algorithm: ClassVar[str] = "gen"
    generation: ClassVar[str] = "gen"
    spellings: ClassVar[dict[str, str]] = {
        "rollouts_per_prompt": "gen.samples_per_prompt",
        "num_generations": "gen.samples_per_prompt",
        "num_return_sequences": "gen.samples_per_prompt",
    }

    model: ModelSpec = option(ModelSpec(), "the model that samples completions")
    dataset: DatasetSpec = option(DatasetSpec(shuffle=False), "rows of type prompt")
    gen: GenOptions = option(GenOptions(), "the call that samples")

    def build(self) -> Experiment:
        """Return the experiment, whose dataflow graph has a single node, `gen`.

        Raises `UserError` if an option is invalid.
        """
        # Fill in the defaults of lengths and batch sizes.
        config = check_config(self)
        dataset, gen = fill_sample_lengths(
            fill_batch_sizes(config.dataset), config.gen, find_context(config), "gen"
        )
        sampling = {name: getattr(gen, name) for name in to_mapping(GenerationSpec())}
        node = MFCDef(
            "gen",
            "model",
            "generate",
            "generate",
            get_batch_size(dataset),
            input_keys=("prompt",),
            output_keys=("completion", "logprobs", "versions", "finished"),
            args={**sampling, "samples_per_prompt": config.gen.samples_per_prompt},
        )
        return assemble(
            config,
            ExperimentParts(
                roles={"model": config.model.with_head("lm", trained=False)},
                nodes=[node],
                dataset=dataset,
                dataset_type=choose_dataset_type(dataset, "prompt"),
                data_role="model",
                steps_follow="gen",
                longest=compute_max_length(config.dataset, config.gen),
            ),
        )
