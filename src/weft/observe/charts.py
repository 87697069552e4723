"""Curves for the report: which metrics share a chart, which come first, and the chart itself as HTML and SVG.

A chart's lines are one SVG stretched to its box; the words on its axes are HTML, so they keep their size on any screen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from weft.observe.metrics import COUNTERS, EVAL, TIME, last_part, number, rank, title
from weft.observe.palette import GREY, HUES, KNOWN, ORANGE, Hue
from weft.observe.run_files import RunFiles

POINTS = 400  # most points of a drawn line
DOTTED = 12  # points up to which a line shows each
FIRST = 9  # charts that are seen without a click
RUN = "run"
PAIRED = ("chosen", "rejected")
EXACT = ("learning_rate", "kl_coef", "version")  # set, not measured: never smoothed


@dataclass(frozen=True)
class Line:
    """One line of a chart: steps and values, thinned."""

    name: str
    label: str
    hue: Hue
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """Lines over one pair of axes. `node` is what they belong to, `missing` counts values that were not finite."""

    title: str
    node: str
    lines: Sequence[Line]
    missing: int = 0

    @property
    def x_range(self) -> tuple[float, float]:
        xs = [x for line in self.lines for x in (line.x[0], line.x[-1])]
        return (min(xs), max(xs)) if min(xs) < max(xs) else (xs[0] - 1, xs[0] + 1)

    @property
    def y_range(self) -> tuple[float, float]:
        ys = [y for line in self.lines for y in line.y]
        low, high = min(ys), max(ys)
        pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        return low - pad, high + pad


def all_charts(run: RunFiles) -> list[Chart]:
    """Every chart of a run, the most telling first."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in run.names:
        if name not in COUNTERS:
            groups.setdefault(_group(name), []).append(name)
    _join_evaluation(groups)
    ordered = sorted(groups.items(), key=lambda item: (min(rank(name) for name in item[1]), hue_of(item[0][0]) == GREY))
    return [_chart(run, key, names) for key, names in ordered]


def split(charts: Sequence[Chart]) -> tuple[list[Chart], dict[str, list[Chart]]]:
    """(charts to see at once, node -> its other charts)."""
    telling: list[Chart] = []
    rest: dict[str, list[Chart]] = {}
    for chart in charts:
        if _telling(chart) and len(telling) < FIRST and not any(_repeats(chart, other) for other in telling):
            telling.append(chart)
        else:
            rest.setdefault(chart.node, []).append(chart)
    return telling, dict(sorted(rest.items(), key=lambda item: item[0] == RUN))


def hue_of(node: str, roles: Mapping[str, Hue] | None = None) -> Hue:
    """A node's colour: its role's, by the timeline or by its name (`actor_train`)."""
    known = roles or {}
    return (
        known.get(node)
        or KNOWN.get(node.split("_")[0])
        or (KNOWN["model"] if node in ("train", "sft", "gen") else GREY)
    )


def thinned(x: Sequence[float], y: Sequence[float], count: int = POINTS) -> tuple[list[float], list[float]]:
    """At most `count` points: of each stretch the lowest and the highest value, so that no spike is lost."""
    if len(x) <= count:
        return list(x), list(y)
    keep = {0, len(x) - 1}
    edges = [round(index * len(x) / (count // 2 - 1)) for index in range(count // 2)]
    for a, b in itertools.pairwise(edges):
        keep |= {min(range(a, b), key=lambda i: y[i]), max(range(a, b), key=lambda i: y[i])}
    order = sorted(keep)
    return [x[i] for i in order], [y[i] for i in order]


def ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Round numbers within a range, at most `most` of them, as many as a round distance allows."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for factor in (1, 2, 2.5, 5, 10, 20):
        step = max(1.0, round(power * factor)) if whole else power * factor
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            break
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def data(chart: Chart) -> dict[str, Any]:
    """What the page's script needs of a chart."""
    return {
        "exact": last_part(chart.lines[0].name) in EXACT,
        "x": chart.x_range,
        "y": chart.y_range,
        "lines": [{"x": [int(x) for x in line.x], "y": [float(f"{y:.6g}") for y in line.y]} for line in chart.lines],
    }


def html(chart: Chart, index: int, *, large: bool = False) -> str:
    """The chart as a figure; `index` is its place in the script's data."""
    last = chart.lines[0].y[-1]
    legend = "".join(_legend(place, line) for place, line in enumerate(chart.lines)) if len(chart.lines) > 1 else ""
    missing = f'<span class="warn">{chart.missing} not finite</span>' if chart.missing else ""
    named = (
        f'<span class="chart-title">{escape(chart.title)}</span> <span class="chart-node">{escape(chart.node)}</span>'
    )
    readout = f'<output class="readout" aria-live="off">{escape(number(last))}</output>'
    return (
        f'<figure class="chart{" large" if large else ""}" data-chart="{index}">'
        f"<figcaption>{named}{missing}{readout}</figcaption>"
        f'<div class="plot" tabindex="0" role="img" aria-label="{escape(spoken(chart))}">{_plot(chart, large)}</div>'
        f"{f'<ul class=legend>{legend}</ul>' if legend else ''}</figure>"
    )


def spoken(chart: Chart) -> str:
    """The chart in words."""
    parts = []
    for line in chart.lines:
        what = f"{line.label}: " if len(chart.lines) > 1 else ""
        parts.append(
            f"{what}from {number(line.y[0])} at step {number(line.x[0])} to {number(line.y[-1])} at step {number(line.x[-1])}, "
            f"lowest {number(min(line.y))}, highest {number(max(line.y))}"
        )
    return f"Chart of {chart.title}, {chart.node}. " + "; ".join(parts)


def _plot(chart: Chart, large: bool) -> str:
    (x0, x1), (y0, y1) = chart.x_range, chart.y_range
    rows = [(y, 100 - 100 * (y - y0) / (y1 - y0)) for y in ticks(y0, y1, 6 if large else 4)]
    columns = [(x, 100 * (x - x0) / (x1 - x0)) for x in ticks(x0, x1, 7 if large else 5, whole=True)]
    grid = "".join(f'<path class="grid" d="M0 {at:.2f}H100"/>' for _, at in rows)
    lines = "".join(
        f'<path class="raw" data-line="{place}" style="{css(line.hue)}" d="{_path(line, chart)}"/>'
        for place, line in reversed(list(enumerate(chart.lines)))
    )
    dots = "".join(
        _dot(chart, line, x, y)
        for line in chart.lines
        if len(line.x) <= DOTTED
        for x, y in zip(line.x, line.y, strict=True)
    )
    return (
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">{grid}{lines}</svg>{dots}'
        + "".join(f'<span class="tick y" style="top:{at:.2f}%">{escape(number(y))}</span>' for y, at in rows)
        + "".join(
            f'<span class="tick x" style="left:{at:.2f}%">{"step " if place == 0 else ""}{escape(number(x))}</span>'
            for place, (x, at) in enumerate(columns)
        )
    )


def _path(line: Line, chart: Chart) -> str:
    (x0, x1), (y0, y1) = chart.x_range, chart.y_range
    points = (
        f"{100 * (x - x0) / (x1 - x0):.2f} {100 - 100 * (y - y0) / (y1 - y0):.2f}"
        for x, y in zip(line.x, line.y, strict=True)
    )
    return "M" + "L".join(points)


def _dot(chart: Chart, line: Line, x: float, y: float) -> str:
    """One measured point; a line of few points shows where they are."""
    (x0, x1), (y0, y1) = chart.x_range, chart.y_range
    left, top = 100 * (x - x0) / (x1 - x0), 100 - 100 * (y - y0) / (y1 - y0)
    return f'<i class="dot small" style="left:{left:.2f}%;top:{top:.2f}%;{css(line.hue)}"></i>'


def _legend(place: int, line: Line) -> str:
    value = f"<b>{escape(number(line.y[-1]))}</b>"
    return f'<li data-line="{place}"><i style="{css(line.hue)}"></i>{escape(line.label)} {value}</li>'


def css(hue: Hue) -> str:
    """A colour for both schemes, as an inline style that the style sheet picks from."""
    return f"--light:{hue.light};--dark:{hue.dark}"


def _group(name: str) -> tuple[str, str]:
    """(node, what is measured): names with the same pair share a chart."""
    if name.startswith(TIME):
        return RUN, name
    node, _, rest = name.partition("/")
    if not rest:
        return RUN, name
    last = last_part(name)
    if node == EVAL.rstrip("/"):
        return node, last  # every source beside the whole
    if last in PAIRED:
        return node, rest.removesuffix(last) + "|".join(PAIRED)
    return node, rest


def _join_evaluation(groups: dict[tuple[str, str], list[str]]) -> None:
    """What was measured in training and in evaluation is one chart."""
    for key in [key for key in groups if key[0] == "eval"]:
        others = [other for other in groups if other[0] != "eval" and last_part(other[1]) == key[1]]
        if others:
            groups[others[0]] += groups.pop(key)


def _chart(run: RunFiles, key: tuple[str, str], names: Iterable[str]) -> Chart:
    node, what = key
    listed = sorted(names, key=lambda name: (name.startswith(EVAL), name.count("/") if name.startswith(EVAL) else 0))
    hues = list(dict.fromkeys([hue_of(node), ORANGE, *HUES]))
    lines: list[Line] = []
    for name in listed:
        x, y = thinned(*run.series(name))
        if not any((list(line.x), list(line.y)) == (x, y) for line in lines):  # one source is also the whole
            lines.append(Line(name, _label(name), hues[len(lines) % len(hues)], x, y))
    shown = what.removesuffix("|".join(PAIRED)).strip("/") if "|" in what else what
    heading = (
        shown.replace(TIME, "seconds of ").replace("_", " ").replace("/", " ")
        if node == RUN or "|" in what
        else title(what)
    )
    return Chart(heading, node, lines, sum(run.not_finite(name) for name in listed))


def _label(name: str) -> str:
    """How a line is called among others of its chart."""
    if name.startswith(EVAL):
        source = name.removeprefix(EVAL).rpartition("/")[0]
        return f"eval {source}" if source else "eval"
    return last_part(name) if last_part(name) in PAIRED else "training"


def _telling(chart: Chart) -> bool:
    known, _ = rank(chart.lines[0].name)
    return known < rank("unknown")[0] and chart.node != RUN and any(min(line.y) < max(line.y) for line in chart.lines)


def _repeats(chart: Chart, other: Chart) -> bool:
    """Whether a chart shows what another has shown: the same values, or the same measure of another node but for losses."""
    if chart.title == other.title and "loss" not in chart.title:
        return True
    return chart.node == other.node and chart.lines[0].y == other.lines[0].y
