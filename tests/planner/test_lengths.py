"""Lengths of runs in steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest

from weft.data.spec import DatasetSpec
from weft.engine.spec import ModelSpec, OptimizerSpec
from weft.errors import ConfigError
from weft.experiment import Control, Experiment
from weft.graph.graph import DataflowGraph
from weft.graph.mfc import MFCDef
from weft.planner.lengths import RunLength
from weft.planner.run_plan import _count_training


@dataclass
class Length:
    """A loader's length."""

    num_ids: int
    batches_per_epoch: int

    def count_batches(self, epochs: int) -> int:
        return epochs * self.batches_per_epoch


def training(batch_size: int, max_steps: int | None = None) -> Experiment:
    node = MFCDef("train", "actor", "train", "train_step", batch_size, ["completion"])
    return Experiment(
        control=Control("e", "t", total_train_epochs=3, max_steps=max_steps),
        roles={
            "actor": ModelSpec(trained=True, optimizer=OptimizerSpec(warmup_steps_proportion=0.1))
        },
        graph=DataflowGraph([node], ["completion"]),
        dataset=DatasetSpec(),
        dataset_type="prompt_answer",
        data_role="actor",
        steps_follow="train",
        updates_per_firing={"train": 4},
    )


def test_schedules_count_the_optimizer_steps_of_the_real_run():
    horizon = RunLength.from_experiment(training(128), Length(5000, 40))
    assert (horizon.steps_per_epoch, horizon.steps) == (40, 120), (
        "5,000 rows, batch 128, 3 epochs: 120 steps, not 354"
    )
    schedule = horizon.build_specs(training(128))["actor"].schedule
    assert (schedule.total_steps, schedule.warmup_steps) == (480, 48)
    limited = training(128, max_steps=50)
    assert (
        RunLength.from_experiment(limited, Length(5000, 40))
        .build_specs(limited)["actor"]
        .schedule.total_steps
        == 200
    )


def test_a_run_of_so_many_steps_has_as_many_epochs_as_it_takes():
    longer = training(128, max_steps=500)
    horizon = RunLength.from_experiment(longer, Length(5000, 40))
    assert (
        horizon.steps == 500 and horizon.build_specs(longer)["actor"].schedule.total_steps == 2000
    )
    assert longer.most_epochs == math.inf and training(128).most_epochs == 3
    node = MFCDef("sample", "actor", "generate", "generate", 128, ["prompt"], ["completion"])
    sampled = replace(longer, graph=DataflowGraph([node], ["prompt"]), steps_follow="sample")
    assert sampled.most_epochs == 3, "completions of prompts are not made again"
    assert RunLength.from_experiment(sampled, Length(5000, 40)).steps == 120


def test_steps_of_frozen_epochs_are_not_among_those_trained():
    made = training(128)
    role = made.roles["actor"]
    frozen = replace(
        made, roles={"actor": replace(role, optimizer=replace(role.optimizer, frozen_epochs=1))}
    )
    horizon = RunLength.from_experiment(frozen, Length(5000, 40))
    assert horizon.updates["train"] == (160, 480) and horizon.schedules["train"].total_steps == 320
    (counted,) = _count_training(frozen, horizon)
    assert (counted.node, counted.per_epoch, counted.total, counted.late_epochs) == (
        "train",
        160,
        320,
        1,
    )


def test_batches_by_tokens_are_counted_by_the_loader():
    assert RunLength.from_experiment(training(0), Length(5000, 17)).steps == 51


def test_a_run_without_steps_is_refused():
    with pytest.raises(ConfigError, match="no steps"):
        RunLength.from_experiment(training(8), Length(0, 0))
