"""The interface `train`: how a batch becomes minibatches, what it hands the engine, how metrics are
joined.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from weft.algorithms.base import Loss
from weft.data.sample import SequenceSample
from weft.engine.base import Engine, StepStats
from weft.engine.spec import OptimizerSpec, Schedule
from weft.errors import ConfigError
from weft.interfaces.base import MFCResult, Model
from weft.interfaces.train import TrainInterface, merge_metrics
from weft.runtime.split import split


def batch_of(groups: list[list[int]], **keys: list[float]) -> SequenceSample:
    """Ids a, b, ... with a prompt of two tokens and completions of these lengths; token values
    count up.
    """
    ids = [chr(ord("a") + i) for i in range(len(groups))]
    total = sum(sum(g) for g in groups)
    lengths: dict[str, Any] = {"prompt": [[2]] * len(groups), "completion": groups}
    data: dict[str, Any] = {
        "prompt": torch.arange(2 * len(groups)),
        "completion": torch.arange(total),
    }
    for key, values in keys.items():
        lengths[key] = groups if len(values) == total else [[1] * len(g) for g in groups]
        data[key] = torch.tensor(values)
    return SequenceSample.from_groups(ids, lengths, data, {"answer": [f"{id}!" for id in ids]})


class Engine_:
    """Remembers what it was asked to train on; scores every token -1."""

    def __init__(self) -> None:
        self.version, self.trained, self.temperatures = (
            0,
            list[list[SequenceSample]](),
            list[float](),
        )
        self.limits = list[int]()

    def train(
        self,
        parts: list[SequenceSample],
        loss: Loss,
        *,
        veto: Any,
        temperature: float,
        max_tokens: int,
    ) -> list[StepStats]:
        self.trained.append(parts)
        self.temperatures.append(temperature)
        self.limits.append(max_tokens)
        self.version += 1
        return [
            StepStats({"loss": float(i), "num_tokens": 10.0, "seconds": 2.0})
            for i in range(len(parts))
        ]

    def evaluate(
        self, batch: SequenceSample, loss: Loss, *, temperature: float, max_tokens: int
    ) -> dict[str, float]:
        return {
            "loss": 2.5,
            "ids": float(batch.num_ids),
            "temperature": temperature,
            "max_tokens": float(max_tokens),
        }


def model_of(engine: Engine_, step: int = 0, schedule: Schedule | None = None) -> Model:
    tokenizer = cast(Any, None)
    return Model(
        "actor", cast(Engine, engine), tokenizer, tokenizer, "cpu", "float32", step, 7, schedule
    )


def train_step(interface: TrainInterface, model: Model, batch: SequenceSample) -> MFCResult:
    """As the Master and a worker do."""
    parts = split(
        batch, interface.minibatches(), 1, seed=model.seed, role=model.role, step=model.step
    )
    return interface.train_step(model, [part for (part,) in parts])


def test_every_minibatch_is_a_step_of_the_engine() -> None:
    engine, batch = Engine_(), batch_of([[1]] * 8)
    model = replace(model_of(engine), max_tokens=9)
    train_step(TrainInterface("sft", num_minibatches=4, epochs=3, temperature=0.7), model, batch)
    assert (engine.temperatures, engine.limits) == ([0.7], [9])
    assert [part.num_ids for part in engine.trained[0]] == [2] * 12


def test_a_role_sits_out_its_frozen_steps() -> None:
    schedule = OptimizerSpec(frozen_epochs=1).build_schedule(total_steps=12, steps_per_epoch=8)
    assert (schedule.frozen_steps, schedule.total_steps) == (8, 4)
    engine, batch = Engine_(), batch_of([[1]] * 4)
    interface = TrainInterface("sft", num_minibatches=2, epochs=2)  # four optimizer steps a call
    results = [train_step(interface, model_of(engine, step, schedule), batch) for step in range(3)]
    assert [r.metrics.get("frozen") for r in results] == [1.0, 1.0, None]
    assert len(engine.trained) == 1


@pytest.mark.parametrize(
    ("sizes", "per_epoch"),
    [([4, 1, 4, 1, 4, 1], 8), ([2, 2, 2], 4), ([1, 1, 1], 4)],
    ids=["short last batches", "every batch is short", "one completion"],
)
def test_a_warm_up_of_an_epoch_lasts_an_epoch_whatever_the_last_batch_holds(
    sizes: list[int], per_epoch: int
) -> None:
    """Four minibatches are asked for; a batch of fewer completions makes fewer, and the schedule
    counts it as whole.
    """
    engine, interface = Engine_(), TrainInterface("sft", num_minibatches=4)
    schedule = OptimizerSpec(frozen_epochs=1).build_schedule(
        total_steps=100, steps_per_epoch=per_epoch
    )
    results = [
        train_step(interface, model_of(engine, step, schedule), batch_of([[1]] * size))
        for step, size in enumerate(sizes)
    ]
    frozen = per_epoch // 4
    assert ["frozen" in r.metrics for r in results] == [True] * frozen + [False] * (
        len(sizes) - frozen
    )


def test_no_steps_left_after_the_frozen_ones_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 epochs without training"):
        OptimizerSpec(frozen_epochs=1).build_schedule(total_steps=8, steps_per_epoch=8)


def test_metrics_of_steps_are_joined_by_what_they_mean() -> None:
    first = {
        "loss": 1.0,
        "num_tokens": 10.0,
        "seconds": 1.0,
        "importance_ratio_max": 3.0,
        "sampler_logprob_diff": 0.1,
    }
    second = {
        "loss": 3.0,
        "num_tokens": 30.0,
        "seconds": 3.0,
        "importance_ratio_max": 2.0,
        "sampler_logprob_diff": 9.0,
    }
    steps = [
        StepStats({**first, "learning_rate": 0.5}),
        StepStats({**second, "learning_rate": 0.4}, skipped="veto"),
    ]
    assert merge_metrics(steps) == {
        "loss": 2.0,
        "num_tokens": 40.0,
        "tokens_per_second": 10.0,
        "importance_ratio_max": 3.0,
        "sampler_logprob_diff": 0.1,
        "learning_rate": 0.4,
        "skipped_updates": 1.0,
    }


def test_evaluate_asks_the_engine_and_makes_no_step() -> None:
    engine = Engine_()
    model = replace(model_of(engine), max_tokens=7)
    metrics = TrainInterface("sft", temperature=0.7).evaluate(model, batch_of([[2], [3]])).metrics
    assert engine.trained == []
    assert metrics == {"loss": 2.5, "ids": 2.0, "temperature": 0.7, "max_tokens": 7.0}


@pytest.mark.parametrize(
    "wrong", [{"num_minibatches": 0}, {"epochs": 0}, {"mini_batch_size": 0}, {"loss": "sftt"}]
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"at least 1|sft"):
        TrainInterface(**{"loss": "sft", **wrong})


class Ranks_(Engine_):
    """The rank beside this one trains on two tokens that are 4 steps old, and on none of this
    rank's.
    """

    def gather(self, own: Any) -> list[Any]:
        return [own, (8.0, 2, 4.0)]


def test_the_age_of_the_weights_that_sampled_is_told_over_trained_tokens() -> None:
    batch = batch_of([[2], [3]], versions=[5, 6, 6, 7, 0], loss_mask=[1.0, 1.0, 1.0, 1.0, 0.0])
    for engine, mean, most in ((Engine_(), 1.0, 2.0), (Ranks_(), 2.0, 4.0)):
        engine.version = 7
        metrics = train_step(
            TrainInterface("sft", num_minibatches=2), model_of(engine), batch
        ).metrics
        assert (metrics["staleness"], metrics["staleness_max"]) == (mean, most)
    assert (
        "staleness"
        not in train_step(
            TrainInterface("sft"), model_of(Engine_()), batch.select(keys=["prompt", "completion"])
        ).metrics
    )
