"""The generic training call: a batch becomes minibatches, each of them one optimizer step on a loss: the algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from weft import randomness
from weft.algorithms.base import Loss
from weft.data.sample import SequenceSample
from weft.engine.base import StepStats
from weft.errors import ConfigError
from weft.interfaces.base import MFCResult, Model
from weft.registry import losses, register_interface

FIRST = ("sampler_logprob_diff", "sampler_logprob_diff_max")  # mean something before the first update of a batch only
LAST = ("learning_rate",)
ADDED = ("num_tokens", "seconds")


@register_interface("train")
class Train:
    """`loss` is a registered loss, built with `loss_args`. A batch is cut into `num_minibatches`, or into minibatches of
    `mini_batch_size` completions, and gone through `epochs` times. `temperature` divides the logits, as in the sampler.

    A role whose schedule has frozen steps sits out its first calls.
    """

    def __init__(
        self,
        loss: str,
        loss_args: Mapping[str, Any] | None = None,
        num_minibatches: int = 1,
        mini_batch_size: int | None = None,
        epochs: int = 1,
        temperature: float = 1.0,
    ) -> None:
        for name, value in (
            ("num_minibatches", num_minibatches),
            ("mini_batch_size", mini_batch_size),
            ("epochs", epochs),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        self.loss: Loss = losses.get(loss)(**(loss_args or {}))
        self.num_minibatches, self.mini_batch_size = num_minibatches, mini_batch_size
        self.epochs, self.temperature = epochs, temperature

    def train_step(self, model: Model, batch: SequenceSample) -> MFCResult:
        """One pass or several over the batch; metrics of all its optimizer steps together, no outputs."""
        wanted = self._wanted(batch)
        frozen = model.schedule.frozen_steps if model.schedule else 0
        # The schedule counts whole batches, so a short one stands for as many steps; a warm-up that has ended stays ended.
        if model.version == 0 and model.step * wanted * self.epochs < frozen:
            return MFCResult(metrics={"frozen": 1.0})
        # Fewer where the last batch of an epoch holds less than one thing for each.
        count = min(wanted, batch.num_ids if self.loss.unit == "group" else batch.num_sequences("completion"))
        parts = [
            part
            for epoch in range(self.epochs)
            for part in minibatches(_shuffled(batch, model, epoch) if epoch else batch, count, self.loss.unit)
        ]
        steps = model.engine.train(
            parts, self.loss, veto=self.loss.veto, temperature=self.temperature, max_tokens=model.max_tokens
        )
        return MFCResult(metrics=merged(steps))

    def evaluate(self, model: Model, batch: SequenceSample) -> MFCResult:
        """The loss and its statistics on a batch, without a step."""
        metrics = model.engine.evaluate(batch, self.loss, temperature=self.temperature, max_tokens=model.max_tokens)
        return MFCResult(metrics=metrics)

    def _wanted(self, batch: SequenceSample) -> int:
        """Minibatches that the options ask for."""
        if self.mini_batch_size is None:
            return self.num_minibatches
        return -(-batch.num_sequences("completion") // self.mini_batch_size)


def minibatches(batch: SequenceSample, count: int, unit: Literal["sequence", "group"]) -> list[SequenceSample]:
    """`count` parts of consecutive ids, as equal in number as can be; before any cut by tokens, devices or micro-batches.

    Groups stay whole where that gives parts of one size, or where the loss needs it; else completions are dealt out singly.
    """
    if count == 1:
        return [batch]
    if unit == "sequence" and batch.num_ids % count:
        batch = single_completions(batch)
    return [batch.select(ids=list(ids)) for ids in np.array_split(np.asarray(batch.ids), count)]


def single_completions(batch: SequenceSample) -> SequenceSample:
    """The same completions, one an id (`id[k]`), each with its prompt; what an id holds once is repeated for each."""
    counts = np.diff(batch.offsets["completion"])
    if (counts == 1).all():
        return batch
    ids = [f"{id}[{k}]" for id, count in zip(batch.ids, counts, strict=True) for k in range(count)]
    lengths, data = {}, {}
    for key in batch.data:
        held = np.diff(batch.offsets[key])
        sequences = batch.sequences(key)
        if not np.array_equal(held, counts):
            assert (held == 1).all(), f"key {key!r} has neither one sequence a completion nor one an id"
            sequences = [each for each, count in zip(sequences, counts, strict=True) for _ in range(count)]
        lengths[key] = [[len(each)] for each in sequences]
        data[key] = torch.cat(sequences)
    metadata = {
        name: [value for value, count in zip(values, counts, strict=True) for _ in range(count)]
        for name, values in batch.metadata.items()
    }
    return SequenceSample.from_groups(ids, lengths, data, metadata)


def _shuffled(batch: SequenceSample, model: Model, epoch: int) -> SequenceSample:
    """The ids in another order for every pass but the first, the same after a restart and on every layout."""
    order = randomness.permutation(batch.num_ids, model.seed, f"minibatches/{model.role}/{epoch}", model.step)
    return batch.select(ids=[batch.ids[index] for index in order])


def merged(steps: Sequence[StepStats]) -> dict[str, float]:
    """Metrics of several optimizer steps as one: sums of tokens, largest of `*_max`, means of the rest."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for step in steps for name in step.metrics):
        values = [step.metrics[name] for step in steps if name in step.metrics]
        if name in FIRST:
            metrics[name] = values[0]
        elif name in LAST:
            metrics[name] = values[-1]
        elif name in ADDED:
            metrics[name] = sum(values)
        elif name.endswith("_max"):
            metrics[name] = max(values)
        else:
            metrics[name] = sum(values) / len(values)
    seconds = metrics.pop("seconds", 0.0)
    if seconds > 0 and "num_tokens" in metrics:
        metrics["tokens_per_second"] = metrics["num_tokens"] / seconds
    skipped = sum(step.skipped is not None for step in steps)
    return {**metrics, "skipped_updates": float(skipped)} if skipped else metrics
