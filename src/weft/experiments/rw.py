"""Reward model training: one call, `train`, on ranked completions of the same prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
from weft.experiments._lengths import with_answers
from weft.experiments._roles import with_lr
from weft.experiments.common import MFCOptions, RunConfig
from weft.graph.mfc import MFCDef
from weft.options import option
from weft.registry import register_quickstart


@dataclass
class RWOptions:
    """Options of the loss for reward models."""

    score_l2: float = option(
        0.0, "weight of the squared scores, which keeps them small", at_least=0.0
    )
    center: float = option(
        0.0,
        "weight of the squared sum of a pair's scores, which keeps their mean at 0",
        at_least=0.0,
    )
    loss_type: str = option(
        "ranking",
        "ranking: equal weight for every ranking, of any length; classification: equal weight for "
        "every pair",
        choices=("ranking", "classification"),
    )


@register_quickstart("rw")
@dataclass
class RWConfig(RunConfig):
    """Training of a reward model on pairs of completions, or on rankings of any length.

    The dataset types for pairs are `paired_comparison` and `preference`; the type for rankings is
    `ranking`.
    """

    trained_roles: ClassVar[tuple[str, ...]] = ("model",)
    algorithm: ClassVar[str] = "rw"

    model: ModelSpec = option(
        ModelSpec(), "the model that is trained; model.pooling sets where its score is read"
    )
    dataset: DatasetSpec = option(
        DatasetSpec(), "rows of type paired_comparison, preference or ranking"
    )
    rw: RWOptions = option(RWOptions(), "the loss")
    train: MFCOptions = option(MFCOptions(), "the call that trains")

    def build(self) -> Experiment:
        """Return the experiment, whose dataflow graph has a single node, `train`.

        Raises `UserError` if an option is invalid.
        """
        config = check_config(self)
        dataset = with_answers(config, fill_batch_sizes(config.dataset))
        train = MFCDef(
            name="train",
            role="model",
            interface="train",
            method="train_step",
            batch_size=get_batch_size(dataset),
            input_keys=("prompt", "completion", "rank"),
            optional_keys=("comparison", "margin"),
            args={
                "loss": "rw",
                "loss_args": {
                    "score_l2": config.rw.score_l2,
                    "center": config.rw.center,
                    "loss_type": config.rw.loss_type,
                },
            },
        )
        return assemble(
            config,
            ExperimentParts(
                roles={
                    "model": with_lr(config.model.with_head("score", trained=True), LEARNING_RATE)
                },
                nodes=[train],
                dataset=dataset,
                dataset_type=choose_dataset_type(dataset, "paired_comparison"),
                data_role="model",
                steps_follow="train",
                longest=config.dataset.limit,
                evaluation=build_evaluation_nodes([train], dataset),
                updates_per_firing={"train": 1},
            ),
        )
