"""Host functions: nodes of the graph without a role.

CPU code on a whole batch, with state and a deadline.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError, UserError, nearest
from weft.registry import functions


@dataclass
class HostContext:
    """What a host function is told besides its batch.

    `record` adds to the node's metrics, logged as `{node}/{name}`.
    """

    step: int = 0  # the firing's index, counted from 0
    seed: int = 0
    # of the node's `tokenizer_role`, or of the role that reads the data
    tokenizer: Tokenizer | None = None
    deadline_s: float | None = None  # seconds the node has, or no bound
    metrics: dict[str, float] = field(default_factory=dict)

    def record(self, name: str, value: float) -> None:
        self.metrics[name] = float(value)

    def require_tokenizer(self, function: str) -> Tokenizer:
        """The tokenizer. Raises `UserError` naming the function where the node has none."""
        if self.tokenizer is None:
            raise UserError(
                f"host function {function!r} reads text; set tokenizer_role of its node"
            )
        return self.tokenizer


@runtime_checkable
class HostCallable(Protocol):
    """Called with the node's input keys; returns a sample with its output keys, for all ids or (a
    filter) fewer.

    `state_dict` holds nested plain values and numpy arrays, and is part of every recovery point.
    """

    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample | None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class SupportsPrefetch(HostCallable, Protocol):
    """A host function that can begin with some ids while others are still sampled.

    `begin` is called with the keys `begins_with` (the function's own names) of ids for which a
    running call has made them, in threads, also beside each other and beside a call with another
    batch; never where two nodes, or a host function, make these keys. The call with these ids comes
    when it is over, and raises what it raised. It is a head start and no more: the ids may never
    come, may come with other values, and the result is the same without it. `context.step` is not
    known yet (0), and what is recorded is not logged.
    """

    begins_with: Sequence[str]

    def begin(self, batch: SequenceSample, context: HostContext) -> None: ...


@runtime_checkable
class KeepsAll(HostCallable, Protocol):
    """A host function that never drops an id: what comes next need not wait until it is known what
    it keeps.
    """

    keeps_all: Literal[True]


@runtime_checkable
class HasNotes(HostCallable, Protocol):
    """A host function with lines for people at the start of a run."""

    notes: Sequence[str]


class Stateless:
    """For host functions whose result depends on the batch alone: nothing to save."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return None


@runtime_checkable
class Short(Protocol):
    """A host function that was registered in a shorter form (`weft.host._functions`)."""

    def build(self, args: Mapping[str, Any]) -> HostCallable: ...


@dataclass
class PlainFunction(Stateless):
    """A registered function `fn(batch, context, **args)` as a `HostCallable`."""

    fn: Callable[..., SequenceSample | None]
    args: Mapping[str, Any]

    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample | None:
        return self.fn(batch, context, **self.args)


def make_host_function(name: str, args: Mapping[str, Any]) -> HostCallable:
    """The host function registered as `name`: a class is built with `args`, a function is called
    with them every time. `name` may also be `module:thing` or `FILE.py:thing`.

    Raises `ConfigError` for an unknown name and for arguments that the thing does not take or that
    are missing.
    """
    thing = functions.get(name)
    if isinstance(thing, Short):
        return thing.build(args)
    is_class = inspect.isclass(thing)
    check_arguments(f"host function {name!r}", thing, args, given=0 if is_class else 2)
    made = thing(**args) if is_class else PlainFunction(thing, dict(args))
    if not isinstance(made, HostCallable):
        raise ConfigError(
            f"host function {name!r}: {thing.__name__} lacks __call__, state_dict or "
            f"load_state_dict; "
            "a class without state derives from weft.host.base.Stateless"
        )
    return made


def check_arguments(
    what: str, thing: Callable[..., Any], args: Mapping[str, Any], given: int
) -> None:
    """Refuse keyword arguments that `thing` does not take or lacks, beside its first `given`
    positional ones.
    """
    parameters = list(inspect.signature(thing).parameters.values())[given:]
    takes = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        takes += [name for name in args if name not in takes]
    for name in args:
        if name not in takes:
            close = nearest(name, takes)
            if close:
                hint = f"did you mean {' or '.join(close)}?"
            else:
                hint = f"it takes {', '.join(takes) or 'none'}"
            raise ConfigError(f"{what} has no argument {name!r}; {hint}")
    missing = [
        p.name
        for p in parameters
        if p.name in takes and p.default is p.empty and p.name not in args
    ]
    if missing:
        raise ConfigError(
            f"{what} needs the argument {', '.join(map(repr, missing))}; give it in its args"
        )
