"""Which metrics share a chart, so that each is drawn once: the same measure of several nodes, in
training and in evaluation, chosen beside rejected, a mean beside its largest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from weft.observe.metrics import COUNTERS, EVAL, TIME, last_part

RUN = "run"
SECONDS = "seconds by call"
PAIRED = ("chosen", "rejected")
BY_NODE = ("loss",)  # means another thing in every node
MAX = "_max"
ALIKE = 1e-6  # relative: the same number, summed in another order

Values = tuple[Sequence[float], Sequence[float]]  # steps, values
Series = Callable[[str], Values]
Scope = TypeVar("Scope")


@dataclass
class Grouped:
    """What one chart shows: `measure` by the names of its lines, of one or several nodes."""

    measure: str
    nodes: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def add(self, node: str, name: str) -> None:
        if node not in self.nodes:
            self.nodes.append(node)
        self.names.append(name)


def grouped(names: Sequence[str]) -> list[Grouped]:
    """Every metric in one chart."""
    found: dict[tuple[str, str], Grouped] = {}
    known = frozenset(names)
    for name in names:
        if name in COUNTERS:
            continue
        node, measure = parts(name, known)
        own = node if measure in BY_NODE else ""
        found.setdefault((own, measure), Grouped(measure)).add(node, name)
    return _with_evaluation(found)


def parts(name: str, names: Collection[str] = ()) -> tuple[str, str]:
    """(node, measure) of a metric."""
    if name.startswith(TIME):
        return RUN, SECONDS
    node, _, rest = name.partition("/")
    if not rest:
        return RUN, name
    if node == EVAL.rstrip("/"):
        pieces = rest.split("/")
        if pieces[-1] in PAIRED and len(pieces) > 1:
            rest = "/".join(pieces[-2:])
        else:
            rest = pieces[-1]
    last = last_part(rest)
    if last in PAIRED:
        return node, rest.removesuffix(last) + "|".join(PAIRED)
    if rest.endswith(MAX) and name.removesuffix(MAX) in names:
        return node, rest.removesuffix(MAX)
    return node, rest


def _with_evaluation(found: dict[tuple[str, str], Grouped]) -> list[Grouped]:
    """What was measured in training and in evaluation is one chart."""
    evaluation = EVAL.rstrip("/")
    by_last: dict[str, list[Grouped]] = {}
    for group in found.values():
        by_last.setdefault(last_part(group.measure), []).append(group)
    for key, group in list(found.items()):
        if group.nodes != [evaluation]:
            continue
        alike = by_last[last_part(key[1])]
        other = next((each for each in alike if each is not group), None)
        if other is not None:
            other.nodes += group.nodes
            other.names += group.names
            alike[:] = (each for each in alike if each is not group)
            del found[key]
    return list(found.values())


def without_repeats(
    groups: Iterable[Grouped], series: Series, rank: Callable[[str], tuple[int, int]]
) -> list[Grouped]:
    """The groups, the most telling first, without lines that repeat one of the same chart, or one
    of the same node that moves as it does (`policy_loss` beside `loss`).
    """
    kept: list[Grouped] = []
    ordered = sorted(groups, key=lambda group: min(rank(name) for name in group.names))
    shown = Curves[str]()  # of the charts so far, by node
    for group in ordered:
        names: list[str] = []
        own = Curves[None]()  # of this chart
        for name in sorted(group.names, key=_wholes_first):
            values = series(name)
            if own.like(None, values) or (moves(values[1]) and shown.like(node_of(name), values)):
                continue
            names.append(name)
            own.add(None, values)
        for name in names:
            shown.add(node_of(name), series(name))
        if names:
            nodes = list(dict.fromkeys(node_of(name) for name in names))
            kept.append(Grouped(group.measure, nodes, names))
    return kept


class Curves(Generic[Scope]):
    """Series to find those that are the same as another one, without comparing each with each: a
    report of thousands of metrics takes seconds, not minutes.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], list[tuple[Values, int]]] = {}

    def add(self, scope: Scope, values: Values, number: int = 0) -> None:
        """Keep a series in a scope, such as its node, under a number that `like` gives back."""
        key = (*_ends(scope, values), *map(_bin, _probes(values)))
        self._found.setdefault(key, []).append((values, number))

    def like(self, scope: Scope, values: Values) -> list[int]:
        """Return the numbers of the series of a scope that are the same as this one."""
        near = (
            [(sign, place + by) for by in (-1, 0, 1)] for sign, place in map(_bin, _probes(values))
        )
        keys = ((*_ends(scope, values), *bins) for bins in itertools.product(*near))
        return [
            number
            for key in keys
            for other, number in self._found.get(key, ())
            if same(values, other)
        ]


def _ends(scope: object, values: Values) -> tuple[Any, ...]:
    return scope, len(values[0]), *values[0][:1], *values[0][-1:]


def _probes(values: Values) -> list[float]:
    """The first, the middle and the last value; none of an empty series."""
    y = values[1]
    return [y[0], y[len(y) // 2], y[-1]] if y else []


def _bin(value: float) -> tuple[int, int]:
    """The sign of a value and a bin of its size, in which or beside which every number is that
    counts as the same.
    """
    if value == 0:
        return (0, 0)
    return (1 if value > 0 else -1, math.floor(math.log(abs(value)) / (2 * ALIKE)))


def _wholes_first(name: str) -> tuple[bool, int]:
    """Training, then evaluation as a whole, then its sources."""
    return name.startswith(EVAL), name.count("/") if name.startswith(EVAL) else 0


def node_of(name: str) -> str:
    if "/" in name and not name.startswith(TIME):
        return name.partition("/")[0]
    return RUN


def moves(values: Sequence[float]) -> bool:
    return bool(values) and min(values) < max(values)


def same(
    one: tuple[Sequence[float], Sequence[float]], other: tuple[Sequence[float], Sequence[float]]
) -> bool:
    """Whether two series are the same numbers at the same steps."""
    if len(one[0]) != len(other[0]) or one[0][:1] != other[0][:1] or one[0][-1:] != other[0][-1:]:
        return False
    return all(
        abs(a - b) <= ALIKE * max(abs(a), abs(b)) for a, b in zip(one[1], other[1], strict=True)
    )
