"""Grouping of metrics into charts, so that each metric is drawn once.

The name of a metric consists of a node of the run's graph and a measure: `actor_train/loss` is the
measure `loss` of the node `actor_train`. One chart can show the same measure of several nodes,
training and evaluation values of a measure, values for chosen and rejected answers, or a mean and
the corresponding maximum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from weft.observe.metrics import COUNTERS, EVAL, TIME, get_last_part

RUN = "run"
SECONDS = "seconds by call"
PAIRED = ("chosen", "rejected")
BY_NODE = ("loss",)  # means something different for each node
MAX = "_max"
ALIKE = 1e-6  # relative tolerance for equal values, which may be summed in another order

Values = tuple[Sequence[float], Sequence[float]]  # steps, values
Series = Callable[[str], Values]
Scope = TypeVar("Scope")


@dataclass
class MetricGroup:
    """Metrics that share one chart.

    `measure` is their common name without the node, `nodes` are the graph nodes that report them,
    and `names` are the full names, one for each line of the chart.
    """

    measure: str
    nodes: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def add(self, node: str, name: str) -> None:
        """Add the metric `name`, which `node` reports."""
        if node not in self.nodes:
            self.nodes.append(node)
        self.names.append(name)


def group_metrics(names: Sequence[str]) -> list[MetricGroup]:
    """Group metric names into charts.

    Each name is in exactly one chart, except for counters such as the step, which are in no chart.
    """
    groups: dict[tuple[str, str], MetricGroup] = {}
    known = frozenset(names)
    for name in names:
        if name in COUNTERS:
            continue
        node, measure = split_metric_name(name, known)
        own = node if measure in BY_NODE else ""
        groups.setdefault((own, measure), MetricGroup(measure)).add(node, name)
    return _with_evaluation(groups)


def split_metric_name(name: str, names: Collection[str] = ()) -> tuple[str, str]:
    """Split a metric's name into the node and the measure, such as `actor_train` and `loss`.

    Metrics of `chosen` and `rejected` answers have the same measure. A maximum, with the suffix
    `_max`, has the same measure as the corresponding mean if the mean is in `names`. All `time/`
    metrics belong to the node `run` and have one common measure.
    """
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
    last = get_last_part(rest)
    if last in PAIRED:
        return node, rest.removesuffix(last) + "|".join(PAIRED)
    if rest.endswith(MAX) and name.removesuffix(MAX) in names:
        return node, rest.removesuffix(MAX)
    return node, rest


def _with_evaluation(groups: dict[tuple[str, str], MetricGroup]) -> list[MetricGroup]:
    """Merge charts of evaluation metrics into the training charts of the same measure.

    Returns all charts that remain. Evaluation metrics without a matching training chart keep their
    own chart.
    """
    evaluation = EVAL.rstrip("/")
    by_last: dict[str, list[MetricGroup]] = {}
    for group in groups.values():
        by_last.setdefault(get_last_part(group.measure), []).append(group)
    for key, group in list(groups.items()):
        if group.nodes != [evaluation]:
            continue
        alike = by_last[get_last_part(key[1])]
        other = next((each for each in alike if each is not group), None)
        if other is not None:
            other.nodes += group.nodes
            other.names += group.names
            alike[:] = (each for each in alike if each is not group)
            del groups[key]
    return list(groups.values())


def drop_repeats(
    groups: Iterable[MetricGroup], series: Series, rank: Callable[[str], tuple[int, int]]
) -> list[MetricGroup]:
    """Return the groups, most informative first, without lines that repeat another line.

    A line is dropped if it equals another line of the same chart. A line whose values vary is also
    dropped if it equals a line of the same node in an earlier chart; for example, `policy_loss` can
    equal `loss`. `series` returns a metric's steps and values. `rank` returns the sort key of a
    metric.
    """
    distinct_groups: list[MetricGroup] = []
    ordered = sorted(groups, key=lambda group: min(rank(name) for name in group.names))
    earlier_lines = SeriesIndex[str]()  # lines of the charts so far, by node
    for group in ordered:
        names: list[str] = []
        own = SeriesIndex[None]()  # lines of this chart
        for name in sorted(group.names, key=_compute_sort_key):
            values = series(name)
            if own.find_equal(None, values) or (
                is_changing(values[1]) and earlier_lines.find_equal(find_node(name), values)
            ):
                continue
            names.append(name)
            own.add(None, values)
        for name in names:
            earlier_lines.add(find_node(name), series(name))
        if names:
            nodes = list(dict.fromkeys(find_node(name) for name in names))
            distinct_groups.append(MetricGroup(group.measure, nodes, names))
    return distinct_groups


class SeriesIndex(Generic[Scope]):
    """Index that finds equal series without comparing every pair.

    With thousands of metrics, a report takes seconds to build with the index, and minutes without.
    """

    def __init__(self) -> None:
        self._series: dict[tuple[Any, ...], list[tuple[Values, int]]] = {}

    def add(self, scope: Scope, values: Values, number: int = 0) -> None:
        """Add the series `values`, which consists of steps and values.

        Series are compared only with other series of the same `scope`, for example the same graph
        node. `number` identifies the series in the results of `find_equal`.
        """
        key = (*_build_key(scope, values), *map(_find_bin, _pick_probes(values)))
        self._series.setdefault(key, []).append((values, number))

    def find_equal(self, scope: Scope, values: Values) -> list[int]:
        """Return the `number` passed to `add` for each series in `scope` that equals `values`."""
        near = (
            [(sign, place + by) for by in (-1, 0, 1)]
            for sign, place in map(_find_bin, _pick_probes(values))
        )
        keys = ((*_build_key(scope, values), *bins) for bins in itertools.product(*near))
        equal: list[int] = []
        for key in keys:
            for other, number in self._series.get(key, ()):
                if is_same_series(values, other):
                    equal.append(number)
        return equal


def _build_key(scope: object, values: Values) -> tuple[Any, ...]:
    return scope, len(values[0]), *values[0][:1], *values[0][-1:]


def _pick_probes(values: Values) -> list[float]:
    """Return the first, the middle and the last value of a series; an empty list if it is empty.

    `SeriesIndex` looks up series by these three values instead of comparing all values.
    """
    y = values[1]
    return [y[0], y[len(y) // 2], y[-1]] if y else []


def _find_bin(value: float) -> tuple[int, int]:
    """Return the sign of a value and the index of its bin on a logarithmic scale.

    Two values that count as equal are in the same bin or in neighbouring bins.
    """
    if value == 0:
        return (0, 0)
    return (1 if value > 0 else -1, math.floor(math.log(abs(value)) / (2 * ALIKE)))


def _compute_sort_key(name: str) -> tuple[bool, int]:
    """Return a key that sorts training metrics before evaluation metrics.

    Evaluation metrics over all sources are sorted before those of a single source.
    """
    return name.startswith(EVAL), name.count("/") if name.startswith(EVAL) else 0


def find_node(name: str) -> str:
    """Return the node in a metric's name.

    Returns `run` for metrics without a node and for `time/` metrics.
    """
    if "/" in name and not name.startswith(TIME):
        return name.partition("/")[0]
    return RUN


def is_changing(values: Sequence[float]) -> bool:
    """Return whether the values are not all equal; False for an empty series."""
    return bool(values) and min(values) < max(values)


def is_same_series(
    one: tuple[Sequence[float], Sequence[float]], other: tuple[Sequence[float], Sequence[float]]
) -> bool:
    """Return whether two series, each given as steps and values, are equal.

    Series are equal if they have the same number of steps, the same first and last step, and values
    whose relative differences are at most `ALIKE`. Steps between the first and the last are not
    compared.
    """
    if len(one[0]) != len(other[0]) or one[0][:1] != other[0][:1] or one[0][-1:] != other[0][-1:]:
        return False
    return all(
        abs(a - b) <= ALIKE * max(abs(a), abs(b)) for a, b in zip(one[1], other[1], strict=True)
    )
