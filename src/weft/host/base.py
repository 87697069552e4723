"""Interfaces of host functions, the nodes of the graph that run CPU code instead of a model.

A host function processes a whole batch, and can have state and a deadline.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from weft.algorithms.advantages import compute_group_stds, find_zero_variance
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError, UserError, find_nearest
from weft.registry import functions


@dataclass
class HostContext:
    """Everything that a host function receives in addition to its batch.

    Metrics recorded by `record` are logged as `{node}/{name}`.
    """

    step: int = 0  # index of the node's firing, from 0
    seed: int = 0
    # tokenizer of the node's `tokenizer_role`, or of the role that reads the data
    tokenizer: Tokenizer | None = None
    deadline_s: float | None = None  # time limit of the node in seconds; None: no limit
    metrics: dict[str, float] = field(default_factory=dict)

    def record(self, name: str, value: float) -> None:
        """Set the node's metric `name` to `value`."""
        self.metrics[name] = float(value)

    def require_tokenizer(self, function: str) -> Tokenizer:
        """Return the tokenizer of the node.

        Raises `UserError` if there is none. `function` is the name of the host function, for the
        message.
        """
        if self.tokenizer is None:
            raise UserError(
                f"host function {function!r} needs a tokenizer; set tokenizer_role of its node"
            )
        return self.tokenizer


@runtime_checkable
class HostCallable(Protocol):
    """Interface of host functions.

    A host function is called with a sample that has the node's input keys, and returns one with the
    node's output keys. The result has all ids or, if the function is a filter, only those that it
    keeps.

    `state_dict` returns nested plain values and numpy arrays, which are saved in every recovery
    point. `load_state_dict` restores them.
    """

    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample | None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class SupportsPrefetch(HostCallable, Protocol):
    """Host function that can start on some ids while others are still being sampled.

    `begins_with` lists the input keys that `begin` reads. Apart from keys of the dataset, all of
    them must be outputs of the same model function call; otherwise `begin` is never called. When
    this call has completed some ids, `begin` is called in a new thread with a batch of these ids.

    Several calls of `begin` and a `__call__` on another batch may run at the same time. In `begin`,
    `context.step` is always 0, because the step is not known yet, and recorded metrics are not
    logged.

    A `__call__` waits until `begin` has finished for all of its ids, and raises the error if
    `begin` failed. The result of `__call__` must not depend on `begin`, because ids can be dropped
    and values can change between the two calls.
    """

    begins_with: Sequence[str]

    def begin(self, batch: SequenceSample, context: HostContext) -> None: ...


@runtime_checkable
class KeepsAll(HostCallable, Protocol):
    """Host function that never drops an id.

    Later nodes therefore need not wait for its result to learn which ids remain.
    """

    keeps_all: Literal[True]


@runtime_checkable
class HasNotes(HostCallable, Protocol):
    """Host function with notes to print at the start of a run."""

    notes: Sequence[str]


class StatelessHostFunction:
    """Base class of host functions that keep no state from one batch to the next."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return None


class ConfiguredHostFunction(StatelessHostFunction, ABC):
    """Base class of host functions whose options are part of the configuration.

    The node's arguments are the fields of `options_class`, a dataclass; the function gets an
    instance of it. A function with a state overrides `state_dict` and `load_state_dict`.
    """

    options_class: ClassVar[type[Any]]

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample | None: ...


@runtime_checkable
class ShortHostFunction(Protocol):
    """Interface of builders that make a host function from a plain function.

    The implementation is `weft.host._functions.HostFunctionBuilder`.
    """

    def build(self, args: Mapping[str, Any]) -> HostCallable: ...


@dataclass
class PlainFunction(StatelessHostFunction):
    """Host function that calls a registered function as `fn(batch, context, **args)`."""

    fn: Callable[..., SequenceSample | None]
    args: Mapping[str, Any]

    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample | None:
        return self.fn(batch, context, **self.args)


def make_host_function(name: str, args: Mapping[str, Any]) -> HostCallable:
    """Return a new instance of the host function registered as `name`.

    `name` can also be the location of a class or function: `MODULE:NAME` or `FILE.py:NAME`. A class
    is constructed with `args`; a plain function gets `args` in every call.

    Raises `ConfigError` for an unknown name and for unknown or missing arguments.
    """
    registered = functions.get(name)
    if isinstance(registered, ShortHostFunction):
        return registered.build(args)
    is_class = inspect.isclass(registered)
    if is_class and issubclass(registered, ConfiguredHostFunction):
        check_arguments(f"host function {name!r}", registered.options_class, args, num_positional=0)
        return registered(registered.options_class(**args))
    check_arguments(
        f"host function {name!r}", registered, args, num_positional=0 if is_class else 2
    )
    host_function = registered(**args) if is_class else PlainFunction(registered, dict(args))
    if not isinstance(host_function, HostCallable):
        raise ConfigError(
            f"host function {name!r}: {registered.__name__} lacks __call__, state_dict or "
            f"load_state_dict; "
            "derive a class without state from weft.host.base.StatelessHostFunction"
        )
    return host_function


def check_arguments(
    label: str, target: Callable[..., Any], args: Mapping[str, Any], num_positional: int
) -> None:
    """Raise `ConfigError` if `args` has an argument unknown to `target`, or lacks a required one.

    The first `num_positional` parameters of `target` are positional and are not checked. `label`
    names `target` in the error message.
    """
    parameters = list(inspect.signature(target).parameters.values())[num_positional:]
    accepted = []
    for p in parameters:
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            accepted.append(p.name)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        accepted += [name for name in args if name not in accepted]
    for name in args:
        if name not in accepted:
            close = find_nearest(name, accepted)
            if close:
                hint = f"did you mean {' or '.join(close)}?"
            else:
                hint = f"it takes {', '.join(accepted) or 'none'}"
            raise ConfigError(f"{label} has no argument {name!r}; {hint}")
    missing = []
    for p in parameters:
        if p.name in accepted and p.default is p.empty and p.name not in args:
            missing.append(p.name)
    if missing:
        raise ConfigError(
            f"{label} needs the argument {', '.join(map(repr, missing))}; set it in args"
        )


def record_rewards(
    rewards: npt.NDArray[np.float64], group: npt.NDArray[np.int64], context: HostContext
) -> None:
    """Record the metrics `reward`, `reward_std` and `frac_reward_zero_std`.

    They are described in `weft.host.reward.RewardFunction`. `group` [S] is the index of each
    completion's prompt.
    """
    if (np.bincount(group) < 2).all():
        group = np.zeros_like(group)
    first = np.unique(group, return_index=True)[1]
    context.record("reward", float(rewards.mean()))
    context.record("reward_std", float(compute_group_stds(rewards, group)[first].mean()))
    context.record("frac_reward_zero_std", float(find_zero_variance(rewards, group).mean()))
