"""Wrappers that turn a plain Python function into a host function.

`register_advantage` and `register_filter` use them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.algorithms.base import to_host_array
from weft.data.sample import SequenceSample
from weft.errors import ConfigError, DataError, UserError, build_unknown_name_error
from weft.host._results import MAX_REWARD
from weft.host._rows import CompletionRows, Vector
from weft.host.base import HostContext, StatelessHostFunction

PER = ("completion", "token")


@dataclass(frozen=True)
class HostFunctionBuilder:
    """Builder of a host function from a registered plain function.

    `build(args)` returns `host_class(function, input_names, args, **extra_arguments)`. The
    parameters of `function` without a default are the inputs of the host function (`input_names`).
    Those with a default are its options, which `args` can set.
    """

    host_class: Callable[..., Any]
    function: Callable[..., Any]
    name: str
    input_names: tuple[str, ...]
    extra_arguments: Mapping[str, Any]

    @classmethod
    def from_function(
        cls,
        host_class: Callable[..., Any],
        function: Callable[..., Any],
        name: str,
        **extra_arguments: Any,
    ) -> HostFunctionBuilder:
        """Return a builder that wraps a plain Python function in a host function.

        `host_class` is the class of the host function, and `extra_arguments` are additional keyword
        arguments of its constructor. `name` is the name under which `function` is registered.
        Raises `ConfigError` if `function` has `*args`, `**kwargs` or positional-only parameters.
        """
        parameters = inspect.signature(function).parameters.values()
        if any(p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
            raise ConfigError(
                f"host function {name!r}: its parameters must be listed one by one, without "
                f"*, ** and /"
            )
        return cls(
            host_class,
            function,
            name,
            tuple(p.name for p in parameters if p.default is p.empty),
            extra_arguments,
        )

    def build(self, args: Mapping[str, Any]) -> Any:
        """Return the host function with the options `args`.

        Raises `ConfigError` for an unknown option.
        """
        options = inspect.signature(self.function).parameters
        for name in args:
            if name in self.input_names or name not in options:
                raise build_unknown_name_error(
                    f"argument of host function {self.name!r}:",
                    name,
                    [o for o in options if o not in self.input_names],
                )
        return self.host_class(self.function, self.input_names, dict(args), **self.extra_arguments)


def build_advantage_function(
    function: Callable[..., Any], name: str, *, per: str = "completion"
) -> HostFunctionBuilder:
    """Return a builder for a host function that computes `advantages` by calling `function`.

    `function` returns one number per completion or, with `per="token"`, one number per completion
    token. The output has one value per token: the number returned for the token or its completion,
    and 0 for tokens that are not trained.

    Each parameter of `function` without a default is an input. The names `group` (int64 [S], the
    index of each completion's prompt), `lengths` (int64 [S], in tokens), `mask` ([T], 1 for trained
    tokens) and `context` have a fixed meaning; any other name is a key of the batch. S is the
    number of completions and T the total number of their tokens. The values of a key are float64:
    [S] if the key has one value per completion or prompt, [T] if it has one per token.
    """
    if per not in PER:
        raise build_unknown_name_error(f"per of advantage {name!r}", per, PER)
    return HostFunctionBuilder.from_function(AdvantageFunction, function, name, per=per)


def build_filter_function(function: Callable[..., Any], name: str) -> HostFunctionBuilder:
    """Return a builder for a filter that keeps the prompts for which `function` returns true.

    The output of the filter has only the ids of these prompts, with the key `kept` set to 1. The
    loader supplies new prompts in place of the dropped ones.

    `function` is called once per prompt. Each parameter of `function` without a default is an
    input: a key of the batch (float64, only the values of this prompt), a column of the data, or
    `context`.
    """
    return HostFunctionBuilder.from_function(FilterFunction, function, name)


@dataclass
class AdvantageFunction(StatelessHostFunction):
    """Host function that gets advantages from a plain function; see `build_advantage_function`."""

    function: Callable[..., Any]
    input_names: tuple[str, ...]
    options: Mapping[str, Any]
    per: str

    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample:
        rows = CompletionRows(batch)
        # Call the function.
        fixed_inputs: dict[str, Any] = {
            "group": rows.group,
            "lengths": rows.lengths,
            "mask": rows.mask,
            "context": context,
        }
        arguments = {}
        for name in self.input_names:
            arguments[name] = (
                fixed_inputs[name] if name in fixed_inputs else rows.read_tokens_or_sequences(name)
            )
        values: Vector = np.asarray(self.function(**arguments, **self.options), dtype=np.float64)
        # Check the result, and expand it to tokens.
        if self.per == "completion":
            count = len(rows.lengths)
        else:
            count = int(rows.lengths.sum())
        if values.shape != (count,):
            raise ConfigError(
                f"{self.function.__name__} returned advantages of shape {values.shape}; it must "
                f"return one number per {self.per}, "
                f"{count} here (register_advantage(.., per=..))"
            )
        if "rewards" in arguments:
            context.record("reward", float(np.mean(arguments["rewards"])))
        context.record("advantage_std", float(values.std()))
        token_values = np.repeat(values, rows.lengths) if self.per == "completion" else values
        advantages = np.where(rows.mask != 0.0, token_values, 0.0)
        self._check_size(advantages, rows)
        return rows.build_token_sample(advantages=advantages)

    def _check_size(self, advantages: Vector, rows: CompletionRows) -> None:
        """Raise `UserError` if an advantage is NaN, or is so large that the loss would overflow."""
        invalid = np.flatnonzero(~(np.abs(advantages) <= MAX_REWARD))
        if len(invalid):
            completion = int(np.searchsorted(np.cumsum(rows.lengths), invalid[0], side="right"))
            raise UserError(
                f"{self.function.__name__} returned the advantage {advantages[invalid[0]]:g} for a "
                f"completion of "
                f"{rows.batch.ids[int(rows.group[completion])]}; it must be a number of absolute "
                f"value at most {MAX_REWARD:g}, or the loss is not finite"
            )


@dataclass
class FilterFunction(StatelessHostFunction):
    """Host function that filters prompts with a plain function; see `build_filter_function`."""

    function: Callable[..., Any]
    input_names: tuple[str, ...]
    options: Mapping[str, Any]

    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample:
        columns = {name: _read_values_by_id(batch, name, context) for name in self.input_names}
        kept_ids = []
        for index, id in enumerate(batch.ids):
            if self.function(
                **{name: values[index] for name, values in columns.items()}, **self.options
            ):
                kept_ids.append(id)
        context.record("kept_fraction", len(kept_ids) / max(batch.num_ids, 1))
        return SequenceSample.from_default(
            kept_ids, [1] * len(kept_ids), {"kept": np.ones(len(kept_ids), dtype=np.float32)}
        )


def _read_values_by_id(batch: SequenceSample, name: str, context: HostContext) -> Any:
    """Return the values for one parameter of a filter function, with one entry per id.

    If `name`, the parameter's name, is "context", each entry is `context`. Otherwise, the values
    come from the key or data column `name` of the batch. Raises `DataError` if the batch has
    neither.
    """
    if name == "context":
        return [context] * batch.num_ids
    if name in batch.data:
        values = to_host_array(batch.data[name]).astype(np.float64)
        ends = np.concatenate([[0], np.cumsum(batch.lengths[name], dtype=np.int64)])[
            batch.offsets[name]
        ]
        return np.split(values, ends[1:-1])
    if name in batch.metadata:
        return batch.metadata[name]
    available = ", ".join([*batch.data, *batch.metadata]) or "none"
    raise DataError(
        f"a filter reads {name!r}, which is neither a key of its node nor a column; available: "
        f"{available}"
    )
