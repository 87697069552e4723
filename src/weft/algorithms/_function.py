"""Losses that are written as a single function and registered by `register_loss(name, per=...)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import array_api_compat
import numpy as np

from weft.algorithms.base import (
    Array,
    Loss,
    Output,
    RowBatch,
    Sample,
    Stat,
    compute_masked_sum,
    count_trained_rows,
    masked_mean,
)
from weft.errors import ConfigError, build_unknown_name_error

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
    reads = tuple(p.name for p in parameters if p.default is p.empty)
    takes = [p.name for p in parameters if p.default is not p.empty]
    outputs = frozenset(output for output in OUTPUTS if output in reads)
    if not outputs:
        raise ConfigError(
            f"loss {name!r} reads no output of the network; name one of {', '.join(OUTPUTS)} as a "
            f"parameter"
        )

    def build(**options: Any) -> FunctionLoss:
        for option in options:
            if option not in takes:
                raise build_unknown_name_error(f"option of loss {name!r}:", option, takes)
        return FunctionLoss(function, name, reads, outputs, per, options, by_row)

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
        losses, named = result if isinstance(result, tuple) else (result, {})
        if self.per == "token":
            weights = batch.mask
        else:
            xp = array_api_compat.array_namespace(batch.lengths)
            if "scores" in self.outputs:
                counted = batch.lengths >= 0
            else:
                counted = batch.lengths > 0
            weights = xp.astype(counted, batch.mask.dtype)
        for what, values in {"the loss": losses, **named}.items():
            if tuple(getattr(values, "shape", ())) != tuple(weights.shape):
                raise ConfigError(
                    f"loss {self.name!r}: {what} has the shape "
                    f"{tuple(getattr(values, 'shape', ()))}; it must have one value per "
                    f"{self.per}, {tuple(weights.shape)} here (per={self.per!r})"
                )
        return compute_masked_sum(losses, weights) / max(total[f"{self.per}s"], 1.0), {
            name: masked_mean(values, weights) for name, values in named.items()
        }

    def _find_argument(self, name: str, out: Mapping[str, Array], batch: RowBatch) -> Any:
        if name == "batch":
            return batch
        return out[name] if name in self.outputs else batch[name]
