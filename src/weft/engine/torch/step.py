"""One optimizer step: passes over the micro-batches of a minibatch, checks, and the update.

If a loss declares `Loss.by_row`, the gradient of a row doesn't depend on the outputs of other rows,
so the output head can compute gradients during the forward pass. The declaration is checked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from weft.algorithms.base import Loss, Output, Stat, Sum, count_trained_rows, reduce_stats
from weft.data.sample import SequenceSample
from weft.engine.base import StepStats
from weft.engine.collectives import Collectives, Outputs, PreparedPass
from weft.engine.device import BestMatmulRate, TokenCost, wait_for_device
from weft.engine.rows import (
    PackLayout,
    SampleRows,
    choose_ids,
    keep_outputs,
    list_sample_ids,
    split_batch,
)
from weft.engine.torch.prepare import PassSettings, mask_read_rows, prepare, prepare_filler
from weft.errors import ConfigError, NotFinite
from weft.kernels import put
from weft.models.network.moe import MoE, MoEAuxLoss
from weft.models.network.packed import RowGradient
from weft.observe.expert_loads import EXPERT_LOAD

T = TypeVar("T")
Veto = Callable[[Mapping[str, float]], str | None]
SHOWN = 8  # maximum number of sample ids in an error message
# Denominators added to the loss's: the divisor of the experts' auxiliary loss, and the number of
# trained rows, to find out whether there is anything to train.
SEQUENCES = "sequences of the minibatch"
TRAINED = "trained rows of the minibatch"
NOTHING = "no trained token: every loss mask of the minibatch is 0"
# outputs to which the declaration `Loss.by_row` applies
BY_ROW: tuple[Output, ...] = ("logprobs", "entropy", "given_logprobs")
TOLERANCE = 1e-5  # relative to the largest gradient; kernels may differ in rounding


@dataclass
class PassResults:
    """Results of one minibatch's micro-batches on one rank.

    Tensors stay on the device until `collect` is called.
    """

    losses: list[Tensor] = field(default_factory=list)
    stats: list[Mapping[str, Stat]] = field(default_factory=list)
    ids: list[list[str]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    operations: list[float] = field(default_factory=list)
    chosen: Sequence[str] = ()  # ids whose outputs are kept
    seen: list[SequenceSample] = field(default_factory=list)  # outputs of `chosen`, by micro-batch

    def collect(self, norm: Tensor | None = None) -> tuple[MinibatchSums, float]:
        """Return the results and the gradient norm as Python numbers.

        The host waits for each device only once.
        """
        operations = sum(self.operations)
        readback = BatchedReadback()
        losses = [readback.register(loss) for loss in self.losses]
        stats = _register_stats(self.stats, readback)
        grad_norm = readback.register(0.0 if norm is None else norm)
        readback.read_all()
        values = [float(loss) for loss in losses]
        not_finite: dict[str, None] = {}  # ids, in order and without duplicates
        for value, ids in zip(values, self.ids, strict=True):
            if not math.isfinite(value):
                not_finite |= dict.fromkeys(ids)
        sums = MinibatchSums(
            sum(values), _resolve_stats(stats), tuple(not_finite), sum(self.tokens), operations
        )
        return sums, float(grad_norm)


@dataclass(frozen=True)
class MinibatchSums:
    """Results of one rank for a minibatch.

    The loss, the numbers of tokens and the `operations` (floating-point operations) are summed over
    the micro-batches. `stats` has the statistics of each micro-batch. `not_finite` lists the ids of
    the samples in micro-batches whose loss is NaN or infinite.
    """

    loss: float
    stats: Sequence[Mapping[str, Stat]]
    not_finite: tuple[str, ...] = ()
    tokens: int = 0
    operations: float = 0.0

    @classmethod
    def join(cls, ranks: Sequence[MinibatchSums]) -> MinibatchSums:
        """Return the sums over all ranks."""
        return cls(
            sum(rank.loss for rank in ranks),
            [stats for rank in ranks for stats in rank.stats],
            tuple(id for rank in ranks for id in rank.not_finite),
            sum(rank.tokens for rank in ranks),
            sum(rank.operations for rank in ranks),
        )


@dataclass
class _PendingNumber:
    """Placeholder for a number that `BatchedReadback.read_all` reads from a device."""

    value: float = 0.0

    def __float__(self) -> float:
        return self.value


class BatchedReadback:
    """Collection of numbers on devices, which are all read with a single transfer per device.

    `register` adds a number, and `read_all` reads all of them.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, _PendingNumber]] = []

    def register(self, value: Any) -> _PendingNumber:
        """Register a number, and return a placeholder that has its value after `read_all`."""
        placeholder = _PendingNumber()
        if isinstance(value, Tensor):
            self._waiting.append((value.detach(), placeholder))
        else:
            placeholder.value = float(value)
        return placeholder

    def read_all(self) -> None:
        """Copy the registered numbers to the host, into the objects that `register` returned."""
        by_device: dict[torch.device, list[tuple[Tensor, _PendingNumber]]] = {}
        for value, placeholder in self._waiting:
            by_device.setdefault(value.device, []).append((value, placeholder))
        for waiting in by_device.values():
            numbers = torch.stack([value.reshape(()).double() for value, _ in waiting]).tolist()
            for (_, placeholder), number in zip(waiting, numbers, strict=True):
                placeholder.value = number


def to_plain_stats(parts: Iterable[Mapping[str, Stat]]) -> list[Mapping[str, Stat]]:
    """Return the statistics with Python numbers instead of tensors."""
    readback = BatchedReadback()
    waiting = _register_stats(parts, readback)
    readback.read_all()
    return _resolve_stats(waiting)


def _register_stats(
    parts: Iterable[Mapping[str, Stat]], readback: BatchedReadback
) -> list[Mapping[str, Stat]]:
    result: list[Mapping[str, Stat]] = []
    for part in parts:
        result.append({name: _map_fields(stat, readback.register) for name, stat in part.items()})
    return result


def _resolve_stats(parts: Iterable[Mapping[str, Stat]]) -> list[Mapping[str, Stat]]:
    return [{name: _map_fields(stat, float) for name, stat in part.items()} for part in parts]


def _map_fields(stat: Stat, make: Callable[[Any], Any]) -> Stat:
    if isinstance(stat, Sum):
        return Sum(make(stat.value), make(stat.weight))
    return replace(stat, value=make(stat.value))


@dataclass(frozen=True)
class AuxLoss:
    """Settings of the experts' load-balancing loss, which is averaged over sequences.

    Attributes:
        weight: Weight of the loss; 0 turns it off.
        ranks: Number of tensor-parallel ranks. They all compute the same loss, and their
            gradients are summed, so each rank divides its gradient by `ranks`.
        num_layers: Number of layers with experts in the whole network. Can be None if this rank has
            all of them.
    """

    weight: float = 0.0
    ranks: int = 1
    num_layers: int | None = None

    def compute(self, imbalance: Tensor) -> Tensor:
        """Return `weight * imbalance`, where `imbalance` is the load imbalance of the experts.

        The gradient of the result, but not its value, is divided by the number of ranks, because
        the gradients of all ranks are summed.
        """
        value = self.weight * imbalance
        if self.ranks == 1:
            return value
        return value.detach() + (value - value.detach()) / self.ranks


NO_AUX_LOSS = AuxLoss()


class StepOptimizer(Protocol):
    """Interface of the optimizer of a step; `weft.engine.torch.optimizer.Optimizer` describes it."""

    steps: int
    attempts: int
    loss_scale: float

    @property
    def learning_rate(self) -> float: ...
    @property
    def parameters(self) -> list[nn.Parameter]: ...
    def collect_gradients(self) -> dict[str, Tensor]: ...
    def step(self, norm: Tensor) -> None: ...
    def zero_grad(self) -> None: ...
    def handle_overflow(self) -> bool: ...


def require_optimizer(optimizer: T | None) -> T:
    """Return the optimizer of a role. Raises `ConfigError` if the role is not trained."""
    if optimizer is None:
        raise ConfigError(
            "this role is not trained: its weights are frozen and it has no optimizer"
        )
    return optimizer


@dataclass(frozen=True)
class OptimizerStep:
    """Callable that runs one optimizer step of a role on a minibatch.

    If `on_nonfinite` is "stop", a loss or gradient that is not finite raises `NotFinite`. If it is
    "skip", the weights are not updated, and the step is counted in the metric `nonfinite`.
    """

    network: nn.Module
    optimizer: StepOptimizer
    collectives: Collectives
    device: torch.device
    cost: TokenCost
    max_tokens: int
    on_nonfinite: str
    temperature: float
    rate: BestMatmulRate
    checked: list[Loss]  # losses whose `by_row` declaration was verified; shared with the engine
    dropout_seed: int | None = None  # None without dropout
    aux_loss: AuxLoss = NO_AUX_LOSS
    expert_layers: Sequence[MoE] = ()  # of `network`, to report their load
    # waits for pending copies of gradients and masters
    ready: Callable[[], None] = lambda: None

    def __call__(self, minibatch: SequenceSample, loss: Loss, veto: Veto | None) -> StepStats:
        """Accumulate the gradient of a minibatch, and update the weights unless a check fails.

        Returns the step's metrics and, if the update was skipped, the reason.
        """
        started = time.perf_counter()
        total = self._sum_denominators(minibatch, loss)
        if total is None:
            return StepStats(
                {"num_tokens": 0.0, "learning_rate": self.optimizer.learning_rate}, skipped=NOTHING
            )
        # Accumulate gradients over the micro-batches, then over the ranks.
        passes = PassResults(chosen=choose_ids(minibatch.ids))
        parts = split_batch(minibatch, self.max_tokens, loss.unit)
        self.collectives.run(
            self.network, parts, _TrainingProcessor(self, loss, total, passes), trains=True
        )
        loads = [load for layer in self.expert_layers for load in layer.take_loads()]
        if loads:
            passes.stats.append({EXPERT_LOAD: Sum(torch.stack(loads).sum(), len(loads))})
        self.ready()
        self.collectives.reduce_gradients(self.optimizer.parameters)
        norm = self.collectives.compute_gradient_norm(self.optimizer.collect_gradients())
        # Collect the statistics of all ranks.
        sums, grad_norm = passes.collect(norm)
        ranks = self.collectives.gather_values(sums, stages=True)
        joined = MinibatchSums.join(ranks)
        reduced = reduce_stats(joined.stats)
        metrics = {}
        for name, value in loss.summary(reduced).items():
            if math.isfinite(value):
                metrics[name] = value
        metrics["loss"] = joined.loss
        metrics["grad_norm"] = grad_norm
        metrics["learning_rate"] = self.optimizer.learning_rate
        if EXPERT_LOAD in reduced:
            metrics[EXPERT_LOAD] = reduced[EXPERT_LOAD]
        # Update the weights, unless the loss is not finite or `veto` objects.
        skipped = self._find_objection(joined.not_finite, metrics, reduced, minibatch, veto)
        if skipped is None:
            self.optimizer.step(norm)
        self.optimizer.zero_grad()
        self.optimizer.attempts += 1
        # Measure the speed.
        wait_for_device(self.device)
        seconds = time.perf_counter() - started
        tokens = float(joined.tokens)
        speed = {"num_tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
        speed["mfu"] = self.rate.compute_mfu(joined.operations / len(ranks), seconds)
        seen = SequenceSample.gather(passes.seen) if passes.seen else None
        return StepStats({**metrics, **speed}, skipped=skipped, seen=seen)

    def _sum_denominators(self, minibatch: SequenceSample, loss: Loss) -> dict[str, float] | None:
        """Return the sum over all ranks of each denominator of the loss.

        Returns None if the minibatch has no tokens or samples to train on.
        """
        denominators = loss.denominators(minibatch)
        reads_tokens = "scores" not in loss.outputs
        trained = np.count_nonzero(count_trained_rows(minibatch)) if reads_tokens else 0
        counts = {SEQUENCES: float(minibatch.num_sequences("completion")), TRAINED: float(trained)}
        total = self.collectives.reduce_denominators({**denominators, **counts})
        if not any(total[name] for name in denominators) or (reads_tokens and not total[TRAINED]):
            return None
        return total

    def _find_objection(
        self,
        not_finite: Sequence[str],
        metrics: dict[str, float],
        reduced: Mapping[str, float],
        minibatch: SequenceSample,
        veto: Veto | None,
    ) -> str | None:
        """Return the reason to skip the update, or None if the weights should be updated.

        An update is skipped for one of these reasons:

        - The float16 gradients overflow. The loss scale is then reduced.
        - A loss or the gradient is not finite for another reason. If `on_nonfinite` is "stop",
          `NotFinite` is raised. Otherwise, values that are not finite are removed from `metrics`.
        - `veto` returns a reason. It is called with `reduced`, the loss statistics of all ranks.

        `not_finite` lists the ids whose loss is not finite.
        """
        ids = list(not_finite)
        quantity = "loss"
        if not ids and not math.isfinite(metrics["grad_norm"]):
            if self.optimizer.handle_overflow():
                del metrics["grad_norm"]
                scale = self.optimizer.loss_scale
                return f"float16 gradients overflowed; they are scaled by {scale:g} from now on"
            ids = list(minibatch.ids)
            quantity = "gradient"
        if ids:
            id_list = ", ".join(ids[:SHOWN]) + (
                f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
            )
            step = self.optimizer.steps + 1
            reason = f"the {quantity} is not finite at optimizer step {step}; samples: {id_list}"
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
class _TrainingProcessor:
    """Implementation of `MicrobatchProcessor` for training, which collects the results in `passes`.

    `finish` returns the micro-batch's contribution to the loss, multiplied by the optimizer's loss
    scale. `total` contains the denominators of the loss.
    """

    step: OptimizerStep
    loss: Loss
    total: Mapping[str, float]
    passes: PassResults

    def prepare(self, part: SequenceSample) -> PreparedPass:
        step = self.step
        loss = self.loss
        if step.dropout_seed is None:
            dropout = None
        else:
            dropout = (step.dropout_seed, step.optimizer.attempts)
        # Prepare the auxiliary loss, the batch's rows and the loss's gradient by row.
        aux_loss = None
        if step.aux_loss.weight:
            aux_loss = MoEAuxLoss(
                put(PackLayout.from_sample(part).lengths, step.device), step.aux_loss.num_layers
            )
        rows = SampleRows(part, PackLayout.from_sample(part), step.device, self._float_dtype)
        gradient = None
        if loss.by_row:
            gradient = build_row_gradient(loss, rows, self.total, step.optimizer.loss_scale)
        # Copy the batch to the device.
        settings = PassSettings(
            loss.outputs,
            step.temperature,
            dropout=dropout,
            aux_loss=aux_loss,
            trained_only=True,
            gradient=gradient,
        )
        prepared = prepare(step.network, part, settings, step.device)
        # Count the operations, for the FLOP/s shown: the head computes read rows only.
        layout = prepared.layout
        scores = "scores" in loss.outputs
        if scores:
            counted = float(len(layout.length))
        else:
            counted = float(np.count_nonzero(mask_read_rows(part, layout, settings)))
        self.passes.operations.append(
            step.cost.count_training_flops(
                layout.segment_lengths, rows=counted, across=layout.num_cross_pairs
            )
        )
        return replace(prepared, rows=rows)

    def build_filler(self) -> PreparedPass:
        return prepare_filler(self.step.network, self.loss.outputs, self.step.device)

    def finish(self, prepared: PreparedPass, out: Outputs) -> Tensor:
        part = prepared.part
        step = self.step
        loss = self.loss
        batch = prepared.rows
        if part is None or batch is None:
            return torch.stack([output.sum() for output in out.values()]).sum() * 0.0
        value, stats = loss(cast(dict[str, Tensor], out), batch, self.total)
        unchecked = loss.by_row and not any(loss is known for known in step.checked)
        if unchecked and is_row_separable(loss, out, batch, self.total):
            step.checked.append(loss)
        if (imbalance := _compute_imbalance(prepared)) is not None:
            value = value + step.aux_loss.compute(imbalance) / self.total[SEQUENCES]
            stats = {**stats, "balance_loss": Sum(imbalance.detach(), len(prepared.layout.lengths))}
        if (chosen_outputs := keep_outputs(part, out, self.passes.chosen)) is not None:
            self.passes.seen.append(chosen_outputs)
        self.passes.losses.append(value.detach())
        self.passes.stats.append(stats)
        self.passes.ids.append(list_sample_ids(part))
        self.passes.tokens.append(int(prepared.layout.lengths.sum()))
        return value * step.optimizer.loss_scale

    def compute_stage_loss(self, prepared: PreparedPass) -> Tensor | None:
        if (imbalance := _compute_imbalance(prepared)) is None:
            return None
        value = self.step.aux_loss.compute(imbalance) / self.total[SEQUENCES]
        self.passes.losses.append(value.detach())
        # the last stage counts the sequences
        self.passes.stats.append({"balance_loss": Sum(imbalance.detach(), 0.0)})
        self.passes.ids.append([])
        return value * self.step.optimizer.loss_scale

    @property
    def _float_dtype(self) -> torch.dtype:
        return torch.promote_types(next(self.step.network.parameters()).dtype, torch.float32)


def _compute_imbalance(prepared: PreparedPass) -> Tensor | None:
    """Return the imbalance of expert use in a micro-batch, summed over sequences and layers.

    Returns None without an auxiliary loss. The data that the layers recorded is discarded
    afterwards: layers that are recomputed in the backward pass record it again, and must not be
    counted twice.
    """
    aux_loss = prepared.given.x.aux_loss
    if aux_loss is None or not aux_loss.layers:
        return None
    imbalance = aux_loss.compute_by_sequence().sum()
    aux_loss.layers = []
    return imbalance


def build_row_gradient(
    loss: Loss, rows: SampleRows, total: Mapping[str, float], scale: float
) -> RowGradient:
    """Return a function that maps outputs to the gradients of the loss with respect to them.

    The gradients are multiplied by `scale`. The network's head calls the function after each chunk
    of rows, with outputs of 0 for the rows that it has not computed yet.
    """

    def compute_scaled_gradient(out: Mapping[Output, Tensor]) -> Mapping[Output, Tensor]:
        return {
            "logprobs": torch.zeros_like(out["logprobs"]),
            **_compute_gradients(loss, out, rows, total, scale),
        }

    return compute_scaled_gradient


def is_row_separable(
    loss: Loss, out: Mapping[Output, Tensor], rows: SampleRows, total: Mapping[str, float]
) -> bool:
    """Return whether a check shows that no row's gradient depends on other rows' outputs.

    The check is for a loss that declares `by_row`, whose gradients are computed before the outputs
    of all rows are known. The gradient over all rows is compared with gradients for which the
    outputs of half of the rows are set to 0. If they differ, training would silently be wrong, so
    `ConfigError` is raised with the loss's name.

    Returns False if these rows allow no conclusion: if fewer than two rows have a gradient, or if a
    gradient is not finite.
    """
    gradients = {}
    for key, gradient in _compute_gradients(loss, out, rows, total, 1.0).items():
        if key in BY_ROW:
            gradients[key] = gradient
    if not all(
        bool(gradient.isfinite().all()) for gradient in gradients.values()
    ) or not _has_several_rows(gradients):
        return False
    every_other = torch.arange(rows.num_rows) % 2 == 0
    random = torch.rand(rows.num_rows, generator=torch.Generator().manual_seed(0)) < 0.5
    for mask in (every_other, ~every_other, random, ~random):
        mask = mask.to(rows.mask.device)
        masked_out = {}
        for key, value in out.items():
            masked_out[key] = value
            if key in BY_ROW:
                rows_mask = mask.view(-1, *(1,) * (value.dim() - 1))
                masked_out[key] = torch.where(rows_mask, value, torch.zeros_like(value))
        masked_gradients = _compute_gradients(loss, masked_out, rows, total, 1.0)
        for key, gradient in gradients.items():
            if not _is_equal(
                gradient[mask], masked_gradients[key][mask] if key in masked_gradients else None
            ):
                name = str(getattr(loss, "name", type(loss).__name__))
                raise ConfigError(
                    f"loss {name!r} declares by_row=True, but its gradient by the "
                    f"{key} of a row depends on the "
                    "outputs of other rows; set by_row to False"
                )
    return True


def _has_several_rows(gradients: Mapping[Output, Tensor]) -> bool:
    """Return whether more than one row has a nonzero gradient."""
    return any(
        int((gradient.flatten(1) if gradient.dim() > 1 else gradient[:, None]).any(1).sum()) > 1
        for gradient in gradients.values()
    )


def _compute_gradients(
    loss: Loss,
    out: Mapping[Output, Tensor],
    rows: SampleRows,
    total: Mapping[str, float],
    scale: float,
) -> dict[Output, Tensor]:
    """Return the gradients of `scale` times the loss, one for each output that the loss depends on."""
    with torch.enable_grad():
        leaves = {key: value.detach().requires_grad_() for key, value in out.items()}
        zeros = torch.zeros_like(rows.mask)
        value, _ = loss({key: leaves.get(key, zeros) for key in loss.outputs}, rows, total)
        if not value.requires_grad:
            return {}
        optional_gradients = torch.autograd.grad(
            value * scale, list(leaves.values()), allow_unused=True
        )
    gradients: dict[Output, Tensor] = {}
    for key, gradient in zip(leaves, optional_gradients, strict=True):
        if gradient is not None:
            gradients[key] = gradient
    return gradients


def _is_equal(one: Tensor, other: Tensor | None) -> bool:
    if other is None:
        return not bool(one.any())
    if one.numel():
        return bool((one - other).abs().max() <= TOLERANCE * one.abs().max())
    return True
