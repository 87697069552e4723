"""Interface of losses, and losses that are written as a single function.

Losses are written against the array API standard, so the same function runs on arrays of several
frameworks, such as numpy and torch.

A loss reads one micro-batch, laid out in rows. Each of the [N] rows is one trained position. Rows
belong to sequences ([S], one completion each), and sequences to groups ([G], one sample id each). A
loss returns a sum over samples, divided by a total over the whole minibatch on all ranks
(`Loss.denominators`). Gradients therefore do not depend on how the minibatch was split into
micro-batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import array_api_compat
import numpy as np
import numpy.typing as npt

from weft.errors import ConfigError, build_unknown_name_error

Array = Any
# Outputs of the network that a loss can read. Less obvious ones:
# - `top1` [N]: 1 where the label is the most likely token, else 0; no gradient. For token accuracy.
# - `top_ids` [N, K]: the K most likely ids.
# - `top_logprobs` [N, K + 1]: the log-probs of `top_ids`, then the log of the total probability of
#   all other ids; no gradient.
# - `given_logprobs` [N, K + 1]: the same for the batch's `given_ids`, with a gradient.
Output = Literal[
    "logprobs", "entropy", "values", "scores", "top1", "top_ids", "top_logprobs", "given_logprobs"
]

# Log-ratios are clipped to +-20 before `exp`: the square of e^20 = 5e8 still fits into float32.
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class Sum:
    """Statistic reported as a weighted mean: the sum of `value` divided by the sum of `weight`.

    Both sums are over the micro-batches of all ranks. The statistic is omitted if the total weight
    is 0.
    """

    value: Any
    weight: Any = 1.0


@dataclass(frozen=True)
class Max:
    """Statistic reported as the maximum over all micro-batches and ranks."""

    value: Any


@dataclass(frozen=True)
class Min:
    """Statistic reported as the minimum over all micro-batches and ranks."""

    value: Any


Stat = Sum | Max | Min


@runtime_checkable
class RowBatch(Protocol):
    """Interface of the micro-batch that is passed to a loss, with one row per completion token.

    `batch[key]` is [N] for a key with one value per row (`loss_mask`, `advantages`, `logprobs`,
    ...), [N, K] for a key with K values per row, and [S] for a key with one value per sequence
    (`rank`, `rewards`, ...). All are arrays of the network's framework on the network's device.
    """

    num_rows: int
    num_sequences: int
    sequence: Array  # [N] int64, the sequence of each row
    # [S] int64, the group of each sequence, counted from 0 within the micro-batch
    group: Array
    lengths: Array  # [S] float, number of trained rows of each sequence (sum of its mask)
    # [N] float, 1 for trained rows: the sample's `loss_mask` if it has one, else all ones
    mask: Array

    def __getitem__(self, key: str) -> Array: ...
    def __contains__(self, key: object) -> bool: ...
    def sum(self, rows: Array) -> Array:
        """Return the sum of `rows` [N] over each sequence, [S].

        The sum is differentiable.
        """
        ...

    def spread(self, sequences: Array) -> Array:
        """Return each sequence's value repeated for all rows of the sequence, [N].

        `sequences` has one value per sequence, [S].
        """
        ...

    def pairs(self) -> tuple[Array, Array]:
        """Return the better and the worse sequences of all P pairs, as two index arrays, each [P].

        Two sequences of a group form a pair if they have the same `comparison` and different ranks;
        the one with the smaller `rank` is the better one. The key `comparison` separates several
        rankings within a group. Without this key, each group is a single ranking.
        """
        ...


@runtime_checkable
class Sample(Protocol):
    """Interface of the minibatch that is passed to `Loss.denominators`.

    `SequenceSample` implements it. This module cannot import that class, which belongs to a higher
    layer.
    """

    @property
    def num_ids(self) -> int: ...
    @property
    def lengths(self) -> Mapping[str, npt.NDArray[np.int32]]: ...
    @property
    def data(self) -> Mapping[str, Array]: ...
    def group_of(self, key: str) -> npt.NDArray[np.int64]: ...


class Loss(Protocol):
    """Interface of a training objective.

    The built-in losses are frozen dataclasses whose fields are their options. They inherit the
    default implementations of `veto` and `summary`.
    """

    outputs: frozenset[Output]
    # "group": all completions of an id must be in the same micro-batch
    unit: Literal["sequence", "group"]

    @property
    def by_row(self) -> bool:
        """True if each row's gradient depends only on the network's outputs for that row.

        In that case, the gradient with respect to a row's log-prob and entropy can be computed as
        soon as these two outputs are known.
        """
        return False

    def denominators(self, minibatch: Sample) -> Mapping[str, float]:
        """Return the totals by which `__call__` divides the loss, as a mapping from name to total.

        For example, `tokens` is the number of trained tokens. Each total is a sum of one number per
        sample, which depends only on that sample. The totals of several ranks can therefore be
        added.
        """
        ...

    def __call__(
        self, out: Mapping[str, Array], batch: RowBatch, total: Mapping[str, float]
    ) -> tuple[Array, Mapping[str, Stat]]:
        """Return (loss, statistics) of one micro-batch.

        `out` has the network's outputs: logprobs, entropy and values [N], scores [S], and
        given_logprobs [N, K + 1]. The last are the log-probs of the K token ids that the batch
        lists for each row under the key `given_ids`, followed by the log-prob of all other ids
        together. `total` has the totals that `denominators` returns for the whole minibatch.
        """
        ...

    def veto(self, stats: Mapping[str, float]) -> str | None:
        """Return a reason to skip the optimizer step of this minibatch, or None to take the step.

        `stats` are the reduced statistics of the minibatch.
        """
        return None

    def summary(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics to log, computed from the reduced statistics.

        The statistics of all micro-batches and ranks are already combined, so metrics that are not
        sums over samples (perplexity, explained variance) can be computed.
        """
        return dict(stats)


def reduce_stats(parts: Iterable[Mapping[str, Stat]]) -> dict[str, float]:
    """Combine the statistics of micro-batches into weighted means, maxima and minima.

    Weighted means with a total weight of 0, and statistics that are NaN, are omitted.
    """
    values: dict[str, list[Stat]] = {}
    for part in parts:
        for name, stat in part.items():
            values.setdefault(name, []).append(stat)
    reduced = {name: _reduce(stats) for name, stats in values.items()}
    return {name: value for name, value in reduced.items() if value == value}


def _reduce(stats: list[Stat]) -> float:
    first = stats[0]
    if isinstance(first, Sum):
        weight = sum(float(s.weight) for s in stats if isinstance(s, Sum))
        if weight:
            return sum(float(s.value) for s in stats) / weight
        return float("nan")
    pick = max if isinstance(first, Max) else min
    return pick(float(s.value) for s in stats)


def fixed(array: Array) -> Array:
    """Return an array with the same values as `array`, through which no gradient flows.

    The array API standard has no function for this.
    """
    if array_api_compat.is_jax_array(array):
        import jax  # installed, since the array is a jax array

        return jax.lax.stop_gradient(array)
    return array.detach() if array_api_compat.is_torch_array(array) else array


def exp_ratio(log_ratio: Array) -> Array:
    """Return exp(log_ratio), after clipping the log-ratio to +-`LOG_RATIO_BOUND`.

    Arrays can have any shape. The gradient is 0 outside the bound.
    """
    xp = array_api_compat.array_namespace(log_ratio)
    return xp.exp(xp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def log_sigmoid(x: Array) -> Array:
    """Return log(1 / (1 + exp(-x))) elementwise, numerically stable for large |x|.

    The gradient at 0 is exactly 1/2.
    """
    xp = array_api_compat.array_namespace(x)
    return -xp.logaddexp(xp.zeros_like(x), -x)


def compute_masked_sum(values: Array, mask: Array) -> Array:
    """Return the sum of `values` [N] * `mask` [N], a scalar.

    Values of rows with mask 0 are ignored, even if they are infinite or NaN.
    """
    xp = array_api_compat.array_namespace(values, mask)
    return xp.sum(xp.where(mask != 0, values, xp.zeros_like(values)) * mask)


def masked_mean(values: Array, mask: Array) -> Sum:
    """Return the mean of `values` [N] over the rows with mask 1, to be reported as a metric.

    The values are detached, so no gradient flows through the mean.
    """
    xp = array_api_compat.array_namespace(values, mask)
    return Sum(compute_masked_sum(fixed(values), mask), xp.sum(mask))


def to_host_array(array: Array) -> npt.NDArray[Any]:
    """Return `array` as a numpy array in host memory, without a gradient."""
    return np.asarray(array_api_compat.to_device(fixed(array), "cpu"))


def count_trained_rows(minibatch: Sample) -> npt.NDArray[np.float64]:
    """Return the number of trained rows of each completion, float64 [S].

    The counts equal `RowBatch.lengths`, but are computed from the data alone: each is the sum of
    the completion's `loss_mask`, or its length if there is no `loss_mask`. The first token is not
    counted if no prompt precedes it, because nothing predicts it.
    """
    lengths = minibatch.lengths["completion"].astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    mask = np.ones(int(lengths.sum()))
    if "loss_mask" in minibatch.data:
        mask = to_host_array(minibatch.data["loss_mask"]).astype(np.float64)
    prompts = np.zeros(minibatch.num_ids, dtype=np.int64)
    if "prompt" in minibatch.lengths:
        prompts = minibatch.lengths["prompt"].astype(np.int64)
    unpredicted = (prompts[minibatch.group_of("completion")] == 0) & (lengths > 0)
    mask[starts[unpredicted]] = 0.0
    sums = np.concatenate([[0.0], np.cumsum(mask)])
    return sums[starts + lengths] - sums[starts]


OUTPUTS: tuple[Output, ...] = get_args(Output)
PER = ("token", "completion")


def make_loss_constructor(
    function: Callable[..., Any], name: str, *, per: str, by_row: bool = False
) -> Callable[..., FunctionLoss]:
    """Return a constructor that takes the options of `function` and returns a `FunctionLoss`.

    Parameters of the function without a default are its inputs. An input is named after an output
    of the network (`logprobs` [N], `entropy` [N], `values` [N], `scores` [S], ...) or a key of the
    batch (`advantages` [N], ...), for N tokens in S completions. An input called `batch` is the
    `RowBatch` itself. Parameters with a default are options of the loss.

    The function returns the loss of each token [N] or, with `per="completion"`, of each completion
    [S]. It can also return `(losses, statistics)`, where `statistics` maps names to arrays of the
    same shape. The loss of a minibatch is the mean over its trained tokens or completions;
    statistics are averaged in the same way. `name` is the name of the loss in error messages. See
    `Loss.by_row` for `by_row`.

    Raises `ConfigError` if the function reads no output of the network, or has `*`, `**` or
    positional-only parameters.
    """
    if per not in PER:
        raise build_unknown_name_error(f"per of loss {name!r}", per, PER)
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
        raise ConfigError(
            f"loss {name!r}: its function cannot have *, ** or positional-only parameters"
        )
    input_names = tuple(p.name for p in parameters if p.default is p.empty)
    option_names = [p.name for p in parameters if p.default is not p.empty]
    outputs = frozenset(output for output in OUTPUTS if output in input_names)
    if not outputs:
        raise ConfigError(
            f"loss {name!r} reads no output of the network; name one of {', '.join(OUTPUTS)} as a "
            f"parameter"
        )

    def build(**options: Any) -> FunctionLoss:
        for option in options:
            if option not in option_names:
                raise build_unknown_name_error(f"option of loss {name!r}:", option, option_names)
        return FunctionLoss(function, name, input_names, outputs, per, options, by_row)

    build.__module__ = function.__module__
    build.__qualname__ = function.__qualname__
    build.__doc__ = function.__doc__
    return build


@dataclass(frozen=True)
class FunctionLoss(Loss):
    """Loss computed by `function`, averaged over trained tokens or completions.

    The mean is over trained tokens if `per` is "token", and over completions if it is "completion".
    """

    function: Callable[..., Any]
    name: str
    input_names: tuple[str, ...]
    outputs: frozenset[Output]
    per: str
    options: Mapping[str, Any] = field(default_factory=dict)
    by_row: bool = False

    unit: Literal["sequence", "group"] = "sequence"

    def denominators(self, minibatch: Sample) -> Mapping[str, float]:
        """Return the number of tokens or completions over which the loss is averaged.

        With `per="token"`, the key is `tokens`, and all trained tokens are counted. With
        `per="completion"`, the key is `completions`. Completions without trained tokens are then
        counted only if the loss reads `scores`.
        """
        rows = count_trained_rows(minibatch)
        if self.per == "token":
            return {"tokens": float(rows.sum())}
        return {
            "completions": float(len(rows) if "scores" in self.outputs else np.count_nonzero(rows))
        }

    def __call__(
        self, out: Mapping[str, Array], batch: RowBatch, total: Mapping[str, float]
    ) -> tuple[Array, Mapping[str, Stat]]:
        result = self.function(
            **{name: self._find_argument(name, out, batch) for name in self.input_names},
            **self.options,
        )
        losses, statistics = result if isinstance(result, tuple) else (result, {})
        if self.per == "token":
            weights = batch.mask
        else:
            xp = array_api_compat.array_namespace(batch.lengths)
            if "scores" in self.outputs:
                counted = batch.lengths >= 0
            else:
                counted = batch.lengths > 0
            weights = xp.astype(counted, batch.mask.dtype)
        for label, values in {"the loss": losses, **statistics}.items():
            if tuple(getattr(values, "shape", ())) != tuple(weights.shape):
                raise ConfigError(
                    f"loss {self.name!r}: {label} has the shape "
                    f"{tuple(getattr(values, 'shape', ()))}; it must have one value per "
                    f"{self.per}, {tuple(weights.shape)} here (per={self.per!r})"
                )
        return compute_masked_sum(losses, weights) / max(total[f"{self.per}s"], 1.0), {
            name: masked_mean(values, weights) for name, values in statistics.items()
        }

    def _find_argument(self, name: str, out: Mapping[str, Array], batch: RowBatch) -> Any:
        if name == "batch":
            return batch
        return out[name] if name in self.outputs else batch[name]
