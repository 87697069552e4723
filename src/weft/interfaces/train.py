"""Interface `train`: takes one optimizer step on a loss for every minibatch of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.algorithms.base import Loss, to_host_array
from weft.data.sample import SequenceSample
from weft.engine.base import StepStats
from weft.errors import ConfigError
from weft.interfaces.base import MFCResult, Minibatches, Model
from weft.registry import losses, register_interface

# Metrics that are only meaningful before the first update of a batch
FIRST = ("sampler_logprob_diff", "sampler_logprob_diff_max")
LAST = ("learning_rate",)
ADDED = ("num_tokens", "seconds")


@register_interface("train")
class TrainInterface:
    """Interface that trains a role.

    `loss` is the name of a registered loss, and `loss_args` are the arguments of its constructor. A
    batch is split into `num_minibatches` minibatches, or into minibatches of `mini_batch_size`
    completions if this is set. Training makes `epochs` passes over the batch. `temperature` divides
    the logits, as in the sampler.

    The learning-rate schedule can begin with frozen steps, in which the role is not trained. The
    key `versions` of a batch, if present, contains the weight version that sampled each token. The
    metrics `staleness` and `staleness_max` are then logged (see `compute_staleness`).
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
        self._cut = Minibatches(num_minibatches, mini_batch_size, epochs, self.loss.unit)
        self.temperature = temperature

    def minibatches(self) -> Minibatches:
        """Return the settings for splitting batches into minibatches."""
        return self._cut

    def train_step(self, model: Model, minibatches: Sequence[SequenceSample]) -> MFCResult:
        """Take one optimizer step for each minibatch.

        The result has metrics over all minibatches, and no outputs.
        """
        frozen = model.schedule.frozen_steps if model.schedule else 0
        # The schedule counts whole batches, so a short batch counts as many steps as a whole one;
        # frozen steps that have ended do not resume.
        if model.version == 0 and model.step * self._count_requested_steps(minibatches) < frozen:
            return MFCResult(metrics={"frozen": 1.0})
        lag = compute_staleness(model, minibatches)
        steps = model.engine.train(
            minibatches,
            self.loss,
            veto=self.loss.veto,
            temperature=self.temperature,
            max_tokens=model.max_tokens,
        )
        return MFCResult(
            metrics={**merge_metrics(steps), **lag}, seen=steps[0].seen if steps else None
        )

    def evaluate(self, model: Model, batch: SequenceSample) -> MFCResult:
        """Compute the loss and its statistics on a batch, without an optimizer step."""
        metrics = model.engine.evaluate(
            batch, self.loss, temperature=self.temperature, max_tokens=model.max_tokens
        )
        return MFCResult(metrics=metrics)

    def _count_requested_steps(self, minibatches: Sequence[SequenceSample]) -> int:
        """Return the number of optimizer steps that the options request for one batch.

        This is the requested number of minibatches times the number of epochs. A batch that is too
        small can be split into fewer minibatches than requested.
        """
        if self._cut.size:
            completions = sum(part.num_sequences() for part in minibatches) // self._cut.epochs
        else:
            completions = 0
        return self._cut.count_requested(completions) * self._cut.epochs


def compute_staleness(model: Model, minibatches: Sequence[SequenceSample]) -> dict[str, float]:
    """Return the metrics `staleness` and `staleness_max`: the mean and maximum over trained tokens.

    Staleness is the number of train steps by which the role's weights are newer than the weights
    that sampled a token. Returns {} if the batch has no key `versions` or no trained tokens.
    """
    if not all("versions" in part.data for part in minibatches):
        return {}
    ages = []
    for part in minibatches:
        ages.append(
            model.version - to_host_array(part.data["versions"])[_find_trained_tokens(part)]
        )
    own = np.concatenate(ages)
    ranks = model.gather((float(own.sum()), len(own), float(own.max(initial=0))))
    count = sum(number for _, number, _ in ranks)
    if not count:
        return {}
    return {
        "staleness": sum(total for total, _, _ in ranks) / count,
        "staleness_max": max(most for _, _, most in ranks),
    }


def _find_trained_tokens(part: SequenceSample) -> npt.NDArray[np.bool_]:
    """Return a boolean mask of the tokens that are trained.

    These are all tokens if the batch has no `loss_mask`.
    """
    if "loss_mask" not in part.data:
        return np.ones(len(part.data["versions"]), bool)
    return to_host_array(part.data["loss_mask"]) != 0


def merge_metrics(steps: Sequence[StepStats]) -> dict[str, float]:
    """Combine the metrics of several optimizer steps into one value per metric.

    Metrics in `ADDED` are summed. The first value is kept for metrics in `FIRST`, the last value
    for metrics in `LAST`, and the maximum for names that end in `_max`. All other metrics are
    averaged. If the duration in seconds is known, it is replaced by `tokens_per_second`. If any
    steps were skipped, their number is added as `skipped_updates`.
    """
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for step in steps for name in step.metrics):
        values = []
        for step in steps:
            if name in step.metrics:
                values.append(step.metrics[name])
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
    if skipped:
        return {**metrics, "skipped_updates": float(skipped)}
    return metrics
