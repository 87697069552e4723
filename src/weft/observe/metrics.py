"""Interpretation of metric names in `metrics.jsonl`: titles, directions, and grouping into charts.

Each metric is drawn in one chart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

TIME = "time/"
PREDICTED = "predicted/"  # forecasts, written next to the measured values
ABOUT_MACHINE = (TIME, PREDICTED)  # depend on the speed of the machine, not on the model
EVAL = "eval/"
NOT_TRAINING = (*ABOUT_MACHINE, EVAL)  # all other metrics come from calls of the training graph
ROWS = "eval/num_rows"  # number of validation rows of all sources
COUNTERS = ("step", "epoch", ROWS)
LAST_STEP = 2**53  # the largest step; floats are exact up to here
LAST_TIME = 2.0**36  # the latest time, in seconds since the epoch: the year 4147
LARGEST = 1e100  # bound of the numbers shown; their squares and sums stay finite

# Last parts of names; the first one that a run has is its headline.
HEADLINES = ("reward", "loss", "accuracy")
# Reward models and DPO have an accuracy as headline instead of the loss: by algorithm, or, if the
# algorithm is unknown, by the last part of a metric that only they have.
ACCURACY_HEADLINES = {"rw": "accuracy", "dpo": "accuracies"}
ACCURACY_MARKERS = {"kendalltau": "accuracy", "accuracies": "accuracies"}
# Last parts of metrics that are shown without a click, in this order.
INFORMATIVE = (
    "reward",
    "accuracy",
    "accuracies",
    "token_accuracy",
    "loss",
    "value_loss",
    "perplexity",
    "kl",
    "kl_exact",
    "margin",
    "margins",
    "kendalltau",
    "response_length",
    "entropy",
    "reward_std",
    "frac_reward_zero_std",
    "truncated_fraction",
    "clip_ratio",
    "explained_variance",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
)
RISING = (
    "reward",
    "accuracy",
    "accuracies",
    "margin",
    "margins",
    "kendalltau",
    "tokens_per_second",
    "explained_variance",
)
FALLING = ("loss", "perplexity")
# Titles of metrics whose title is not the name with spaces.
TITLES = {
    "kl": "KL",
    "kl_exact": "KL (exact)",
    "approx_kl": "approx. KL",
    "kl_coef": "KL coefficient",
    "mfu": "MFU",
    "accuracies": "accuracy",
    "margins": "margin",
    "kendalltau": "Kendall's tau",
    "grad_norm": "gradient norm",
    "reward_std": "reward, standard deviation",
    "frac_reward_zero_std": "groups without reward spread",
}

Line = Mapping[str, float | None]


def get_last_part(name: str) -> str:
    """Return the last part of a metric's name, such as `kl` of `actor_train/kl`."""
    return name.rsplit("/", 1)[-1]


def is_finite(value: object) -> bool:
    """Return whether a value is a number that can be shown.

    NaN, infinities, booleans and numbers that are too large do not count.
    """
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -LARGEST < value < LARGEST
    )


def is_step(value: object) -> bool:
    """Return whether a value is a valid step: a whole number from 0 to `LAST_STEP`."""
    return is_finite(value) and 0 <= value <= LAST_STEP and value == int(value)  # type: ignore[operator,call-overload]


def get_direction(name: str) -> int:
    """Return 1 if higher values of a metric are better, -1 if lower values are, and 0 otherwise."""
    last = get_last_part(name)
    if name.startswith(ABOUT_MACHINE):
        return 0
    if any(last == part or last.endswith(f"_{part}") for part in RISING):
        return 1
    if any(last == part or last.endswith(f"_{part}") for part in FALLING):
        return -1
    return 0


def find_headline(names: Iterable[str], algorithm: str | None = None) -> str | None:
    """Return the headline metric: the training metric that best shows the quality of the model.

    A run's reward is preferred to all other metrics. Without a reward, the accuracy is preferred to
    the loss for reward models and DPO, and the loss to the accuracy for other algorithms. Returns
    None if the run has none of these metrics.
    """
    training_names = [name for name in names if not name.startswith(NOT_TRAINING)]
    last_parts = [get_last_part(name) for name in training_names]
    accuracy = ACCURACY_HEADLINES.get(algorithm or "")
    if algorithm is None:
        accuracy = next(
            (ACCURACY_MARKERS[last] for last in last_parts if last in ACCURACY_MARKERS), None
        )
    if accuracy is None:
        headlines: tuple[str, ...] = HEADLINES
    else:
        headlines = (HEADLINES[0], accuracy, *HEADLINES[1:])
    return next(
        (training_names[last_parts.index(last)] for last in headlines if last in last_parts), None
    )


def find_evaluation(name: str | None, names: Iterable[str]) -> str | None:
    """Return the name of the validation metric that matches the training metric `name`.

    The metric covers all validation sources. If no metric matches, the validation reward, accuracy
    or loss is returned, in this order of preference. Returns None if `names` contains none of
    these.
    """
    known_names = set(names)
    matching = () if name is None else (name.partition("/")[2], get_last_part(name))
    return next(
        (
            f"{EVAL}{measure}"
            for measure in (*matching, "reward", "accuracy", "loss")
            if f"{EVAL}{measure}" in known_names
        ),
        None,
    )


def find_leading(names: Iterable[str], algorithm: str | None = None) -> str | None:
    """Return the metric to show if there is room for only one, or None.

    This is the validation metric if the run has one, else the headline metric. Returns None if the
    run has neither.
    """
    all_names = list(names)
    name = find_headline(all_names, algorithm)
    return find_evaluation(name, all_names) or name


def compute_rank(name: str) -> tuple[int, int]:
    """Return a sort key that puts informative metrics first, and evaluation before training."""
    last = get_last_part(name)
    if last in INFORMATIVE and not name.startswith(ABOUT_MACHINE):
        position = INFORMATIVE.index(last)
    else:
        position = len(INFORMATIVE)
    return position, 0 if name.startswith(EVAL) else 1


def find_title(name: str) -> str:
    """Return the title of a metric for display.

    For example, the title of `rew_inf/reward` is `reward`, that of `actor_train/clip_ratio` is
    `clip ratio`, and that of `eval/reward` is `eval reward`.
    """
    last = get_last_part(name)
    title = TITLES.get(last) or last.replace("_", " ")
    return f"eval {title}" if name.startswith(EVAL) else title


def compute_tokens_per_second(line: Line) -> float | None:
    """Return the training speed of one step in tokens per second, or None if it is unknown.

    This is the largest number of tokens counted by a node, divided by the duration of the whole
    step. If one of these numbers is missing, returns the highest speed that a node reports.
    """
    seconds = line.get("step_seconds")
    counts = []
    for name, value in line.items():
        if get_last_part(name) == "num_tokens" and value is not None:
            counts.append(value)
    if counts and seconds:
        return max(counts) / seconds
    rates = []
    for name, value in line.items():
        if get_last_part(name) == "tokens_per_second" and value is not None:
            rates.append(value)
    return max(rates) if rates else None


def read_call_seconds(line: Line) -> dict[str, float]:
    """Return the duration in seconds of each call in one step, keyed by the name of the call.

    A call is one execution of a graph node. `line` has the metrics of the step. The calls are in
    the order in which `line` lists them.
    """
    call_seconds: dict[str, float] = {}
    for name, value in line.items():
        if name.startswith(TIME) and value is not None:
            call_seconds[name.removeprefix(TIME)] = value
    return call_seconds


def format_number(value: float | None) -> str:
    """Format a number with four significant digits, such as `0.0213`, `1,234` or `3.1e-5`."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    magnitude = abs(value)
    if 10000 <= magnitude < 1e15:
        return f"{value:,.0f}"
    if magnitude < 1e-4 or magnitude >= 1e15:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    text = f"{value:,.{max(0, 3 - math.floor(math.log10(magnitude)))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_three_digits(value: float) -> str:
    """Format a number with three significant digits; from 1,000 on as a whole number: `2,807`."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """Format a duration, such as `12.3 s`, `4:05`, `1:02:03` or `2 d 3 h`."""
    if seconds < 60 or seconds >= 1e12:
        return f"{seconds:.1f} s" if seconds < 1e12 else f"{format_number(seconds)} s"
    total_seconds = round(seconds)
    minutes = total_seconds // 60
    hours = total_seconds // 3600
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    if hours:
        return f"{hours}:{minutes % 60:02}:{total_seconds % 60:02}"
    return f"{minutes}:{total_seconds % 60:02}"


RUN = "run"
SECONDS = "seconds by call"
PAIRED = ("chosen", "rejected")
BY_NODE = ("loss",)  # measures with a different meaning for each node
MAX = "_max"
TOLERANCE = 1e-6  # relative, for equal values that were summed in different orders

Values = tuple[Sequence[float], Sequence[float]]  # steps, values
Series = Callable[[str], Values]  # returns the series of a metric
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

    Each name is in exactly one chart, except for counters such as the step and for predicted
    values, which are in no chart.
    """
    groups: dict[tuple[str, str], MetricGroup] = {}
    all_names = frozenset(names)
    for name in names:
        if name in COUNTERS or name.startswith(PREDICTED):
            continue
        node, measure = split_metric_name(name, all_names)
        separate_node = node if measure in BY_NODE else ""
        groups.setdefault((separate_node, measure), MetricGroup(measure)).add(node, name)
    return _merge_evaluations(groups)


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
        parts = rest.split("/")
        if parts[-1] in PAIRED and len(parts) > 1:
            rest = "/".join(parts[-2:])
        else:
            rest = parts[-1]
    last = get_last_part(rest)
    if last in PAIRED:
        return node, rest.removesuffix(last) + "|".join(PAIRED)
    if rest.endswith(MAX) and name.removesuffix(MAX) in names:
        return node, rest.removesuffix(MAX)
    return node, rest


def _merge_evaluations(groups: dict[tuple[str, str], MetricGroup]) -> list[MetricGroup]:
    """Merge charts of evaluation metrics into the training charts of the same measure.

    Returns the remaining charts. Evaluation metrics without a matching training chart stay in a
    separate chart.
    """
    evaluation = EVAL.rstrip("/")
    by_last: dict[str, list[MetricGroup]] = {}
    for group in groups.values():
        by_last.setdefault(get_last_part(group.measure), []).append(group)
    for key, group in list(groups.items()):
        if group.nodes != [evaluation]:
            continue
        same_measure = by_last[get_last_part(key[1])]
        other = next((candidate for candidate in same_measure if candidate is not group), None)
        if other is not None:
            other.nodes += group.nodes
            other.names += group.names
            same_measure[:] = (candidate for candidate in same_measure if candidate is not group)
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
        chart_lines = SeriesIndex[None]()
        for name in sorted(group.names, key=_compute_sort_key):
            values = series(name)
            if chart_lines.find_equal(None, values) or (
                is_changing(values[1]) and earlier_lines.find_equal(find_node(name), values)
            ):
                continue
            names.append(name)
            chart_lines.add(None, values)
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
        neighbours = (
            [(sign, bin_index + offset) for offset in (-1, 0, 1)]
            for sign, bin_index in map(_find_bin, _pick_probes(values))
        )
        keys = ((*_build_key(scope, values), *bins) for bins in itertools.product(*neighbours))
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
    return (1 if value > 0 else -1, math.floor(math.log(abs(value)) / (2 * TOLERANCE)))


def _compute_sort_key(name: str) -> tuple[bool, int]:
    """Return a key that sorts training metrics before evaluation metrics.

    Evaluation metrics over all sources are sorted before those of a single source.
    """
    return name.startswith(EVAL), name.count("/") if name.startswith(EVAL) else 0


def find_node(name: str) -> str:
    """Return the node in a metric's name.

    Returns `run` for metrics without a node and for `time/` and `predicted/` metrics.
    """
    if "/" in name and not name.startswith(ABOUT_MACHINE):
        return name.partition("/")[0]
    return RUN


def is_changing(values: Sequence[float]) -> bool:
    """Return whether the values are not all equal; False for an empty series."""
    return bool(values) and min(values) < max(values)


def is_same_series(series: Values, other: Values) -> bool:
    """Return whether two series, each given as steps and values, are equal.

    Series are equal if they have the same number of steps, the same first and last step, and values
    whose relative differences are at most `TOLERANCE`. Steps between the first and the last are not
    compared.
    """
    steps, values = series
    other_steps, other_values = other
    if len(steps) != len(other_steps):
        return False
    if steps[:1] != other_steps[:1] or steps[-1:] != other_steps[-1:]:
        return False
    return all(
        abs(a - b) <= TOLERANCE * max(abs(a), abs(b))
        for a, b in zip(values, other_values, strict=True)
    )
