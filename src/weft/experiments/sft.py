"""Supervised fine-tuning: one call, `train`, on the assistant's tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

from weft.algorithms.sft import SFTLoss
from weft.data.spec import DatasetSpec
from weft.engine.spec import LEARNING_RATE, ModelSpec
from weft.experiment import Experiment
from weft.experiments._assemble import (
    ExperimentParts,
    assemble,
    build_evaluation_nodes,
    check_config,
    choose_dataset_type,
    fill_batch_sizes,
    get_batch_size,
)
from weft.experiments._roles import with_lr
from weft.experiments.common import MFCOptions, RunConfig
from weft.experiments.models import find_context
from weft.graph.mfc import MFCDef
from weft.options import include, option
from weft.planner.lengths import fill_row_length
from weft.registry import register_quickstart


@dataclass
class SFTOptions:
    """Options of the loss for supervised fine-tuning."""

    loss: SFTLoss = include(SFTLoss)


@register_quickstart("sft")
@dataclass
class SFTConfig(RunConfig):
    """Supervised fine-tuning on prompts with answers, or on conversations (dataset.type=chat)."""

    trained_roles: ClassVar[tuple[str, ...]] = ("model",)
    algorithm: ClassVar[str] = "sft"

    model: ModelSpec = option(ModelSpec(), "the model that is trained")
    dataset: DatasetSpec = option(DatasetSpec(), "rows of type prompt_answer or chat")
    sft: SFTOptions = option(SFTOptions(), "the loss")
    train: MFCOptions = option(MFCOptions(), "the call that trains")

    def build(self) -> Experiment:
        """Return the experiment, whose dataflow graph has a single node, `train`.

        Raises `UserError` if an option is invalid.
        """
        config = check_config(self)
        dataset = fill_row_length(fill_batch_sizes(config.dataset), find_context(config))
        train = MFCDef(
            name="train",
            role="model",
            interface="train",
            method="train_step",
            batch_size=get_batch_size(dataset),
            input_keys=("prompt", "completion"),
            optional_keys=("loss_mask",),
            args={"loss": "sft", "loss_args": asdict(config.sft.loss)},
        )
        return assemble(
            config,
            ExperimentParts(
                roles={"model": with_lr(config.model.with_head("lm", trained=True), LEARNING_RATE)},
                nodes=[train],
                dataset=dataset,
                dataset_type=choose_dataset_type(dataset, "prompt_answer"),
                data_role="model",
                steps_follow="train",
                longest=config.dataset.limit,
                evaluation=build_evaluation_nodes([train], dataset),
                updates_per_firing={"train": 1},
            ),
        )
