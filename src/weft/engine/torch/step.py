"""One optimizer step: forward and backward over the micro-batches of a minibatch, the checks before
the step, the step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from weft.algorithms.base import Loss, Stat, Sum, reduce_stats, trained_rows
from weft.data.sample import SequenceSample
from weft.engine import microbatches
from weft.engine.base import StepStats
from weft.engine.device import synchronise
from weft.engine.flops import Cost, ProductRate
from weft.engine.rows import PackLayout, SampleRows
from weft.engine.seen import choose_ids, keep_outputs
from weft.engine.spread import Outputs, Prepared, Spread
from weft.engine.torch import by_row
from weft.engine.torch.optimizer import Optimizer
from weft.engine.torch.prepare import Pass, counting_rows, filler, prepare
from weft.errors import NotFinite
from weft.kernels import put
from weft.models.network.aux_loss import MoEAuxLoss

Veto = Callable[[Mapping[str, float]], str | None]
SHOWN = 8  # sample ids that an error names
# Beside the loss's own denominators: what the experts' auxiliary loss is divided by, and whether
# there is anything to train.
SEQUENCES = "sequences of the minibatch"
TRAINED = "trained rows of the minibatch"
NOTHING = "no trained token: every loss mask of the minibatch is 0"


@dataclass
class PassResults:
    """What the micro-batches of one minibatch leave behind; tensors stay on the device until all
    are through.
    """

    losses: list[Tensor] = field(default_factory=list)
    stats: list[Mapping[str, Stat]] = field(default_factory=list)
    ids: list[list[str]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    operations: list[float] = field(default_factory=list)
    chosen: Sequence[str] = ()  # ids of which outputs are kept
    seen: list[SequenceSample] = field(default_factory=list)  # these outputs, by micro-batch

    def result(self, norm: Tensor | None = None) -> tuple[Accumulated, float]:
        """(the same in plain values, the gradient's norm), for which the host waits once."""
        operations = sum(self.operations)
        read = Reading()
        losses = [read.later(loss) for loss in self.losses]
        stats = _later(self.stats, read)
        grad_norm = read.later(0.0 if norm is None else norm)
        read.now()
        values = [float(loss) for loss in losses]
        wrong = tuple(
            dict.fromkeys(
                id
                for x, ids in zip(values, self.ids, strict=True)
                if not math.isfinite(x)
                for id in ids
            )
        )
        made = Accumulated(sum(values), _numbers(stats), wrong, sum(self.tokens), operations)
        return made, float(grad_norm)


@dataclass(frozen=True)
class Accumulated:
    """What one rank's micro-batches of a minibatch amount to; `not_finite` are the ids whose loss
    is NaN or infinite.
    """

    loss: float
    stats: Sequence[Mapping[str, Stat]]
    not_finite: tuple[str, ...] = ()
    tokens: int = 0
    operations: float = 0.0

    @classmethod
    def join(cls, ranks: Sequence[Accumulated]) -> Accumulated:
        return cls(
            sum(rank.loss for rank in ranks),
            [stats for rank in ranks for stats in rank.stats],
            tuple(id for rank in ranks for id in rank.not_finite),
            sum(rank.tokens for rank in ranks),
            sum(rank.operations for rank in ranks),
        )


@dataclass
class _Later:
    """A number that stands on a device until it is read."""

    value: float = 0.0

    def __float__(self) -> float:
        return self.value


class Reading:
    """Numbers of a device that come to the host together, by one copy."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, _Later]] = []

    def later(self, value: Any) -> _Later:
        """The number, once `now` has been called."""
        made = _Later()
        if isinstance(value, Tensor):
            self._waiting.append((value.detach(), made))
        else:
            made.value = float(value)
        return made

    def now(self) -> None:
        by_device: dict[torch.device, list[tuple[Tensor, _Later]]] = {}
        for value, made in self._waiting:
            by_device.setdefault(value.device, []).append((value, made))
        for waiting in by_device.values():
            found = torch.stack([value.reshape(()).double() for value, _ in waiting]).tolist()
            for (_, made), number in zip(waiting, found, strict=True):
                made.value = number


def plain(parts: Iterable[Mapping[str, Stat]]) -> list[Mapping[str, Stat]]:
    """Statistics with numbers in place of tensors."""
    read = Reading()
    waiting = _later(parts, read)
    read.now()
    return _numbers(waiting)


def _later(parts: Iterable[Mapping[str, Stat]], read: Reading) -> list[Mapping[str, Stat]]:
    return [{name: _of_fields(stat, read.later) for name, stat in part.items()} for part in parts]


def _numbers(parts: Iterable[Mapping[str, Stat]]) -> list[Mapping[str, Stat]]:
    return [{name: _of_fields(stat, float) for name, stat in part.items()} for part in parts]


def _of_fields(stat: Stat, make: Callable[[Any], Any]) -> Stat:
    if isinstance(stat, Sum):
        return Sum(make(stat.value), make(stat.weight))
    return replace(stat, value=make(stat.value))


@dataclass(frozen=True)
class AuxLoss:
    """The experts' balance: its weight, a mean over sequences, and how many ranks compute it and
    sum its gradient.
    """

    weight: float = 0.0
    ranks: int = 1
    num_layers: int | None = None  # that have experts, where this rank has a part of them

    def of(self, uneven: Tensor) -> Tensor:
        """Its part of the loss."""
        value = self.weight * uneven
        if self.ranks == 1:
            return value
        return value.detach() + (value - value.detach()) / self.ranks


NO_AUX_LOSS = AuxLoss()


@dataclass(frozen=True)
class Step:
    """What a minibatch needs besides its samples.

    `on_nonfinite` is "stop" (`NotFinite`) or "skip" (no step, counted).
    """

    network: nn.Module
    optimizer: Optimizer
    spread: Spread
    device: torch.device
    cost: Cost
    max_tokens: int
    on_nonfinite: str
    temperature: float
    dropout_seed: int | None  # None where the network drops nothing
    aux_loss: AuxLoss
    rate: ProductRate
    checked: list[Loss]  # whose `by_row` has been found to be true; the engine keeps them
    ready: Callable[[], None]  # what passes left on its way is there then: gradients, masters

    def __call__(self, minibatch: SequenceSample, loss: Loss, veto: Veto | None) -> StepStats:
        """Accumulate the gradient of the minibatch, look at its statistics, and step unless
        something speaks against it.
        """
        started = time.perf_counter()
        total = self._denominators(minibatch, loss)
        if total is None:
            return StepStats(
                {"num_tokens": 0.0, "learning_rate": self.optimizer.learning_rate}, skipped=NOTHING
            )
        passes = PassResults(chosen=choose_ids(minibatch.ids))
        parts = microbatches.cut(minibatch, self.max_tokens, loss.unit)
        self.spread.run(self.network, parts, _Training(self, loss, total, passes), trains=True)
        self.ready()
        self.spread.reduce_gradients(self.optimizer.parameters)
        norm = self.spread.gradient_norm(self.optimizer.gradients())
        own, grad_norm = passes.result(norm)
        ranks = self.spread.gather_values(own, stages=True)
        done = Accumulated.join(ranks)
        reduced = reduce_stats(done.stats)
        metrics = {
            **{
                name: value for name, value in loss.summary(reduced).items() if math.isfinite(value)
            },
            "loss": done.loss,
            "grad_norm": grad_norm,
            "learning_rate": self.optimizer.learning_rate,
        }
        skipped = self._objection(done.not_finite, metrics, reduced, minibatch, veto)
        if skipped is None:
            self.optimizer.step(norm)
        self.optimizer.zero_grad()
        self.optimizer.attempts += 1
        synchronise(self.device)
        seconds = time.perf_counter() - started
        tokens = float(done.tokens)
        speed = {"num_tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
        speed["mfu"] = self.rate.share(done.operations / len(ranks), seconds)
        seen = SequenceSample.gather(passes.seen) if passes.seen else None
        return StepStats({**metrics, **speed}, skipped=skipped, seen=seen)

    def _denominators(self, minibatch: SequenceSample, loss: Loss) -> dict[str, float] | None:
        """What the loss divides by, over all ranks; None where there is nothing to train."""
        own = loss.denominators(minibatch)
        reads_tokens = "scores" not in loss.outputs
        trained = np.count_nonzero(trained_rows(minibatch)) if reads_tokens else 0
        counts = {SEQUENCES: float(minibatch.num_sequences("completion")), TRAINED: float(trained)}
        total = self.spread.reduce_denominators({**own, **counts})
        if not any(total[name] for name in own) or (reads_tokens and not total[TRAINED]):
            return None
        return total

    def _objection(
        self,
        not_finite: Sequence[str],
        metrics: dict[str, float],
        reduced: Mapping[str, float],
        minibatch: SequenceSample,
        veto: Veto | None,
    ) -> str | None:
        """Why the optimizer must not step, or None.

        Takes what is not finite out of the metrics. Raises `NotFinite`.
        """
        ids = list(not_finite)
        what = "loss"
        if not ids and not math.isfinite(metrics["grad_norm"]):
            if self.optimizer.overflowed():
                del metrics["grad_norm"]
                return f"float16 gradients overflowed; they are scaled by {self.optimizer.loss_scale:g} from now on"
            ids = list(minibatch.ids)
            what = "gradient"
        if ids:
            shown = ", ".join(ids[:SHOWN]) + (
                f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
            )
            reason = f"the {what} is not finite at optimizer step {self.optimizer.steps + 1}; samples: {shown}"
            if self.on_nonfinite == "stop":
                raise NotFinite(
                    f"{reason}; lower the learning rate, look at these samples, or set "
                    f"on_nonfinite=skip"
                )
            for name in [name for name, value in metrics.items() if not math.isfinite(value)]:
                del metrics[name]
            metrics["nonfinite"] = 1.0
            return reason
        return veto(reduced) if veto else None


@dataclass(frozen=True)
class _Training:
    """Implements `Work`: a micro-batch's share of the loss, and what it leaves behind."""

    step: Step
    loss: Loss
    total: Mapping[str, float]
    passes: PassResults

    def prepare(self, part: SequenceSample) -> Prepared:
        step = self.step
        loss = self.loss
        if step.dropout_seed is None:
            dropout = None
        else:
            dropout = (step.dropout_seed, step.optimizer.attempts)
        aux_loss = None
        if step.aux_loss.weight:
            aux_loss = MoEAuxLoss(
                put(PackLayout.of(part).lengths, step.device), step.aux_loss.num_layers
            )
        rows = SampleRows(part, PackLayout.of(part), step.device, self._floats)
        gradient = None
        if loss.by_row:
            gradient = by_row.row_gradient(loss, rows, self.total, step.optimizer.loss_scale)
        how = Pass(
            loss.outputs,
            step.temperature,
            dropout=dropout,
            aux_loss=aux_loss,
            trained_only=True,
            gradient=gradient,
        )
        prepared = prepare(step.network, part, how, step.device)
        layout = prepared.layout
        scores = "scores" in loss.outputs
        if scores:
            counted = float(len(layout.length))
        else:
            counted = float(np.count_nonzero(counting_rows(part, layout, how)))
        self.passes.operations.append(
            step.cost.training(layout.segments, rows=counted, across=layout.pairs_across)
        )
        return replace(prepared, rows=rows)

    def filler(self) -> Prepared:
        return filler(self.step.network, self.loss.outputs, self.step.device)

    def finish(self, prepared: Prepared, out: Outputs) -> Tensor:
        part = prepared.part
        step = self.step
        loss = self.loss
        batch = prepared.rows
        if part is None or batch is None:
            return torch.stack([each.sum() for each in out.values()]).sum() * 0.0
        value, stats = loss(cast(dict[str, Tensor], out), batch, self.total)
        unchecked = loss.by_row and not any(loss is known for known in step.checked)
        if unchecked and by_row.check(loss, out, batch, self.total):
            step.checked.append(loss)
        if (uneven := _uneven(prepared)) is not None:
            value = value + step.aux_loss.of(uneven) / self.total[SEQUENCES]
            stats = {**stats, "balance_loss": Sum(uneven.detach(), len(prepared.layout.lengths))}
        if (kept := keep_outputs(part, out, self.passes.chosen)) is not None:
            self.passes.seen.append(kept)
        self.passes.losses.append(value.detach())
        self.passes.stats.append(stats)
        self.passes.ids.append(microbatches.sample_ids(part))
        self.passes.tokens.append(int(prepared.layout.lengths.sum()))
        return value * step.optimizer.loss_scale

    def stage_loss(self, prepared: Prepared) -> Tensor | None:
        if (uneven := _uneven(prepared)) is None:
            return None
        value = self.step.aux_loss.of(uneven) / self.total[SEQUENCES]
        self.passes.losses.append(value.detach())
        # the last stage counts the sequences
        self.passes.stats.append({"balance_loss": Sum(uneven.detach(), 0.0)})
        self.passes.ids.append([])
        return value * self.step.optimizer.loss_scale

    @property
    def _floats(self) -> torch.dtype:
        return torch.promote_types(next(self.step.network.parameters()).dtype, torch.float32)


def _uneven(prepared: Prepared) -> Tensor | None:
    """How unevenly the layers that the pack went through use their experts, over its sequences;
    None where nobody asks. What a recomputed layer adds later is of the same pass and not counted
    again.
    """
    aux_loss = prepared.given.x.aux_loss
    if aux_loss is None or not aux_loss.layers:
        return None
    uneven = aux_loss.by_sequence().sum()
    aux_loss.layers = []
    return uneven
