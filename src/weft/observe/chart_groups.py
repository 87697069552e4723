"""Which metrics share a chart, so that each is drawn once: the same measure of several nodes, in training and in evaluation,
chosen beside rejected, a mean beside its largest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from weft.observe.metrics import COUNTERS, EVAL, TIME, last_part

RUN = "run"
SECONDS = "seconds by call"
PAIRED = ("chosen", "rejected")
BY_NODE = ("loss",)  # means another thing in every node
MAX = "_max"
ALIKE = 1e-6  # relative: the same number, summed in another order

Series = Callable[[str], tuple[Sequence[float], Sequence[float]]]


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
    for name in names:
        if name in COUNTERS:
            continue
        node, measure = parts(name, names)
        own = node if measure in BY_NODE else ""
        found.setdefault((own, measure), Grouped(measure)).add(node, name)
    return _with_evaluation(found)


def parts(name: str, names: Sequence[str] = ()) -> tuple[str, str]:
    """(node, measure) of a metric."""
    if name.startswith(TIME):
        return RUN, SECONDS
    node, _, rest = name.partition("/")
    if not rest:
        return RUN, name
    if node == EVAL.rstrip("/"):
        pieces = rest.split("/")
        rest = "/".join(pieces[-2:]) if pieces[-1] in PAIRED and len(pieces) > 1 else pieces[-1]
    last = last_part(rest)
    if last in PAIRED:
        return node, rest.removesuffix(last) + "|".join(PAIRED)
    if rest.endswith(MAX) and name.removesuffix(MAX) in names:
        return node, rest.removesuffix(MAX)
    return node, rest


def _with_evaluation(found: dict[tuple[str, str], Grouped]) -> list[Grouped]:
    """What was measured in training and in evaluation is one chart."""
    evaluation = EVAL.rstrip("/")
    for key, group in list(found.items()):
        if group.nodes != [evaluation]:
            continue
        other = next(
            (each for each in found.values() if each is not group and last_part(each.measure) == last_part(key[1])),
            None,
        )
        if other is not None:
            other.nodes += group.nodes
            other.names += group.names
            del found[key]
    return list(found.values())


def without_repeats(groups: Iterable[Grouped], series: Series, rank: Callable[[str], tuple[int, int]]) -> list[Grouped]:
    """The groups, the most telling first, without lines that repeat one of the same chart, or one of the same node that moves
    as it does (`policy_loss` beside `loss`)."""
    kept: list[Grouped] = []
    ordered = sorted(groups, key=lambda group: min(rank(name) for name in group.names))
    for group in ordered:
        shown = [name for other in kept for name in other.names]
        names: list[str] = []
        for name in sorted(group.names, key=_wholes_first):
            own, values = node_of(name), series(name)
            within = any(same(values, series(other)) for other in names)
            if not within and not any(
                node_of(other) == own and same(values, series(other)) and moves(values[1]) for other in shown
            ):
                names.append(name)
        if names:
            nodes = list(dict.fromkeys(node_of(name) for name in names))
            kept.append(Grouped(group.measure, nodes, names))
    return kept


def _wholes_first(name: str) -> tuple[bool, int]:
    """Training, then evaluation as a whole, then its sources."""
    return name.startswith(EVAL), name.count("/") if name.startswith(EVAL) else 0


def node_of(name: str) -> str:
    return name.partition("/")[0] if "/" in name and not name.startswith(TIME) else RUN


def moves(values: Sequence[float]) -> bool:
    return bool(values) and min(values) < max(values)


def same(one: tuple[Sequence[float], Sequence[float]], other: tuple[Sequence[float], Sequence[float]]) -> bool:
    """Whether two series are the same numbers at the same steps."""
    if len(one[0]) != len(other[0]) or one[0][:1] != other[0][:1] or one[0][-1:] != other[0][-1:]:
        return False
    return all(abs(a - b) <= ALIKE * max(abs(a), abs(b)) for a, b in zip(one[1], other[1], strict=True))
