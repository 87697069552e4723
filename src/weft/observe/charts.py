"""Charts of one or several runs as HTML and SVG, most informative first.

The lines of a chart are one SVG that is stretched to the chart's box. The axis labels are HTML, so
that they keep their size on any screen. The page's script redraws the lines when the reader zooms
or selects another x axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

from weft.observe.metric_help import MetricHelp, find
from weft.observe.metrics import (
    EVAL,
    PAIRED,
    RUN,
    SECONDS,
    TIME,
    TITLES,
    MetricGroup,
    compute_rank,
    drop_repeats,
    find_node,
    find_title,
    format_number,
    get_direction,
    get_last_part,
    group_metrics,
    split_metric_name,
)
from weft.observe.page import GREY, HUES, ORANGE, ROLE_HUES, ColourPair
from weft.observe.run_files import RunFiles

FIRST_VIEW_POINTS = 400  # maximum points of a line in the first view
MAX_POINTS = 1000  # maximum points of a line in the page's data, shown when the reader zooms
PAGE_POINTS = 200_000  # maximum points of all lines of a page
MIN_POINTS = 100  # maximum points of a line even on a page with very many lines
MAX_DOTS = 12  # a line with at most this many points shows each point as a dot
NUM_VISIBLE_CHARTS = 12  # number of charts shown without a click
NEVER_SMOOTHED = ("learning_rate", "kl_coef", "version", "num_tokens")  # set, not measured


@dataclass(frozen=True)
class ChartLine:
    """Line of a chart, drawn through points with the coordinates `x` and `y`.

    `x` are training steps, and `y` are the values of the metric `name` at these steps; only some of
    the points of a long series are kept. On a page that compares several runs, `run` is the index
    of the run to which the line belongs.
    """

    name: str
    label: str
    hue: ColourPair
    x: Sequence[float]
    y: Sequence[float]
    run: int = 0


@dataclass(frozen=True)
class Chart:
    """Line chart with one or more lines that share a pair of axes.

    `node` is the name of the graph node or nodes whose metrics the lines show. `missing` is the
    number of values that are left out because they are not finite. If `of_runs` is True, each line
    belongs to a different run, and the legend shows the names of the runs.
    """

    title: str
    node: str
    lines: Sequence[ChartLine]
    missing: int = 0
    of_runs: bool = False

    @property
    def help(self) -> MetricHelp | None:
        return find(self.lines[0].name)

    @cached_property
    def x_range(self) -> tuple[float, float]:
        xs = []
        for line in self.lines:
            for x in (line.x[0], line.x[-1]):
                xs.append(x)
        return (min(xs), max(xs)) if min(xs) < max(xs) else (xs[0] - 1, xs[0] + 1)

    @cached_property
    def y_range(self) -> tuple[float, float]:
        ys = []
        for line in self.lines:
            for y in line.y:
                ys.append(y)
        low = min(ys)
        high = max(ys)
        pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        return low - pad, high + pad


def build_charts(run: RunFiles) -> list[Chart]:
    """Return all charts of a run, most informative first."""
    groups = drop_repeats(group_metrics(run.metric_names), run.get_series, compute_rank)
    max_points = compute_points_per_line(sum(len(group.names) for group in groups))
    return [_build_chart(run, group, max_points) for group in groups]


def compute_points_per_line(num_lines: int) -> int:
    """Return the maximum number of points per line, given the number of lines on a page.

    Because of this limit, even a page with a thousand metrics is quick to build and to open.
    """
    return max(MIN_POINTS, min(MAX_POINTS, PAGE_POINTS // max(1, num_lines)))


def split_charts(charts: Sequence[Chart]) -> tuple[list[Chart], list[Chart]]:
    """Split charts into those shown immediately and those shown after a click."""
    informative = [chart for chart in charts if _is_informative(chart)][:NUM_VISIBLE_CHARTS]
    visible_ids = {id(chart) for chart in informative}
    return informative, [chart for chart in charts if id(chart) not in visible_ids]


def choose_hue(node: str, roles: Mapping[str, ColourPair] | None = None) -> ColourPair:
    """Return the colour of a graph node, which is the colour of the node's role.

    `roles` maps the names of nodes to the colours of their roles. For a node that is not in
    `roles`, the role is inferred from the node's name: `actor_train` belongs to `actor`. If the
    role is unknown, the colour is grey.
    """
    known_hues = roles or {}
    return (
        known_hues.get(node)
        or ROLE_HUES.get(node.split("_")[0])
        or (ROLE_HUES["model"] if node in ("train", "sft", "gen") else GREY)
    )


def thin_series(
    x: Sequence[float], y: Sequence[float], count: int = FIRST_VIEW_POINTS
) -> tuple[list[float], list[float]]:
    """Reduce a series to at most `count` points, keeping every spike.

    The series is divided into segments, and the lowest and the highest value of each segment are
    kept.
    """
    if len(x) <= count:
        return list(x), list(y)
    kept_indices = {0, len(x) - 1}
    edges = [round(index * len(x) / (count // 2 - 1)) for index in range(count // 2)]
    for start, stop in itertools.pairwise(edges):
        segment = y[start:stop]
        kept_indices |= {start + segment.index(min(segment)), start + segment.index(max(segment))}
    indices = sorted(kept_indices)
    return [x[i] for i in indices], [y[i] for i in indices]


def choose_ticks(low: float, high: float, max_ticks: int, *, integers: bool = False) -> list[float]:
    """Return at most `max_ticks` equally spaced round numbers within [low, high].

    The distance between neighbouring numbers is also round. If `integers` is True, it is a whole
    number.
    """
    power = 10.0 ** math.floor(math.log10((high - low) / max_ticks))
    for factor in (1, 2, 2.5, 5, 10, 20):
        step = max(1.0, round(power * factor)) if integers else power * factor
        first = math.ceil(low / step - 1e-9)
        last = math.floor(high / step + 1e-9)
        if last - first < max_ticks:
            break
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def read_axes(run: RunFiles) -> dict[str, list[float]]:
    """Return the values of the x axes of a run's charts: `step`, `tokens` and `time`.

    `tokens` is the number of tokens trained on, and `time` is the training time in seconds, both
    summed from the start of the run. All three lists have one value for each step; of a long run,
    only some steps are included.
    """
    tokens = 0.0
    seconds = 0.0
    rows = []
    token_metrics = []
    for name in run.metric_names:
        if get_last_part(name) == "num_tokens":
            token_metrics.append(name)
    for line in run.lines:
        tokens += max((float(line.get(name) or 0.0) for name in token_metrics), default=0.0)
        seconds += float(line.get("step_seconds") or 0.0)
        rows.append((float(line["step"]), tokens, round(seconds, 3)))
    stride = max(1, len(rows) // MAX_POINTS)
    thinned_rows = rows if stride == 1 else [*rows[::stride], rows[-1]]
    axes: dict[str, list[float]] = {}
    for column, name in enumerate(("step", "tokens", "time")):
        axes[name] = [row[column] for row in thinned_rows]
    return axes


def build_page_data(charts: Sequence[Chart], runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Return the JSON data for the page's script: the charts, and the x axes of each run."""
    drawn = []
    for chart in charts:
        lines = []
        for line in chart.lines:
            y = [float(f"{y:.6g}") for y in line.y]
            lines.append({"run": line.run, "x": [int(x) for x in line.x], "y": y})
        drawn.append(
            {"exact": get_last_part(chart.lines[0].name) in NEVER_SMOOTHED, "lines": lines}
        )
    return {"axes": [read_axes(run) for run in runs], "charts": drawn}


def render_chart(chart: Chart, index: int, *, large: bool = False) -> str:
    """Render the chart as a figure.

    `index` is the chart's index in the data for the page's script.
    """
    headline = next((line for line in chart.lines if line.name.startswith(EVAL)), chart.lines[0])
    last_value = "" if chart.of_runs else format_number(headline.y[-1])
    has_legend = chart.of_runs or len(chart.lines) > 1
    if has_legend:
        legend = "".join(
            _render_legend(index_in_chart, line) for index_in_chart, line in enumerate(chart.lines)
        )
    else:
        legend = ""
    if chart.missing:
        missing = f'<span class="warn">{chart.missing} not finite</span>'
    else:
        missing = ""
    unit = f" · {chart.help.unit}" if chart.help and chart.help.unit else ""
    title = (
        f'<span class="chart-title">{escape(chart.title)}</span> '
        f'<span class="chart-node">{escape(chart.node)}{escape(unit)}</span>'
    )
    # With several runs the readout shows only the step; the values are in the legend.
    step_attribute = " data-step" if chart.of_runs else ""
    readout = (
        f'<output class="readout" aria-live="off"{step_attribute}>{escape(last_value)}</output>'
    )
    return (
        f'<figure class="chart{" large" if large else ""}" data-chart="{index}">'
        f"<figcaption><div>{title}</div>{missing}{readout}{_render_help(chart)}</figcaption>"
        f'<div class="plot" tabindex="0" role="img" aria-label="{escape(describe_chart(chart))}">'
        f"{_render_plot(chart, large)}</div>"
        f"{f'<ul class=legend>{legend}</ul>' if legend else ''}</figure>"
    )


def _render_help(chart: Chart) -> str:
    """Render a question mark that opens the description of the chart's metric when clicked."""
    if chart.help is None:
        return ""
    direction = {1: "Higher is better. ", -1: "Lower is better. "}.get(
        get_direction(chart.lines[0].name), ""
    )
    if chart.help.healthy:
        healthy = f"<p><b>Healthy:</b> {escape(chart.help.healthy)}</p>"
    else:
        healthy = ""
    names = ", ".join(dict.fromkeys(line.name for line in chart.lines))
    return (
        f'<details class="help"><summary aria-label="What {escape(chart.title)} means">?</summary><div>'
        f"<p>{direction}{escape(chart.help.what)}</p>{healthy}<p><code>{escape(names)}</code></p></div></details>"
    )


def describe_chart(chart: Chart) -> str:
    """Describe the chart in words for screen readers."""
    descriptions = []
    for line in chart.lines:
        prefix = f"{line.label}: " if len(chart.lines) > 1 else ""
        descriptions.append(
            f"{prefix}from {format_number(line.y[0])} at step {format_number(line.x[0])} to {format_number(line.y[-1])} "
            f"at step {format_number(line.x[-1])}, "
            f"lowest {format_number(min(line.y))}, highest {format_number(max(line.y))}"
        )
    return f"Chart of {chart.title}, {chart.node}. " + "; ".join(descriptions)


def _render_plot(chart: Chart, large: bool) -> str:
    """Render the grid, the lines and the tick labels of a chart."""
    (x0, x1), (y0, y1) = chart.x_range, chart.y_range
    rows = [(y, 100 - 100 * (y - y0) / (y1 - y0)) for y in choose_ticks(y0, y1, 6 if large else 4)]
    columns = []
    for x in choose_ticks(x0, x1, 7 if large else 5, integers=True):
        columns.append((x, 100 * (x - x0) / (x1 - x0)))
    grid = "".join(f'<path class="grid" d="M0 {position:.2f}H100"/>' for _, position in rows)
    lines = "".join(
        f'<path class="raw" data-line="{index}" style="{format_hue(line.hue)}" d="{_render_path(line, chart)}"/>'
        for index, line in reversed(list(enumerate(chart.lines)))
    )
    dots = "".join(
        _render_dot(chart, line, x, y)
        for line in chart.lines
        if len(line.x) <= MAX_DOTS
        for x, y in zip(line.x, line.y, strict=True)
    )
    return (
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">{grid}{lines}</svg>{dots}'
        + "".join(
            f'<span class="tick y" style="top:{position:.2f}%">{escape(format_number(y))}</span>'
            for y, position in rows
        )
        + "".join(
            f'<span class="tick x{_choose_edge_class(position)}" style="left:{position:.2f}%">'
            f"{'step ' if index == 0 else ''}{escape(format_number(x))}</span>"
            for index, (x, position) in enumerate(columns)
        )
    )


def _choose_edge_class(position: float) -> str:
    """Return the CSS class that keeps a tick's label inside the chart near the ends of the axis.

    `position` is the position of the tick in percent of the axis. Returns "" for a tick that is not
    near an end.
    """
    if position < 4:
        return " first"
    if position > 96:
        return " last"
    return ""


def _render_path(line: ChartLine, chart: Chart) -> str:
    """Return the SVG path of a line, in percent of the chart's width and height."""
    (x0, x1), (y0, y1) = chart.x_range, chart.y_range
    x_scale = 100 / (x1 - x0)
    y_scale = 100 / (y1 - y0)
    points = []
    for x, y in zip(*thin_series(line.x, line.y), strict=True):
        points.append((x_scale * (x - x0), y_scale * (y1 - y)))
    return ("M" + "L".join(["%.2f %.2f"] * len(points))) % tuple(
        itertools.chain.from_iterable(points)
    )


def _render_dot(chart: Chart, line: ChartLine, x: float, y: float) -> str:
    """Render a dot at the point (x, y) of a line. Only lines with few points have dots."""
    (x0, x1), (y0, y1) = chart.x_range, chart.y_range
    left = 100 * (x - x0) / (x1 - x0)
    top = 100 - 100 * (y - y0) / (y1 - y0)
    return (
        f'<i class="dot small" style="left:{left:.2f}%;top:{top:.2f}%;{format_hue(line.hue)}"></i>'
    )


def _render_legend(index: int, line: ChartLine) -> str:
    value = f"<b>{escape(format_number(line.y[-1]))}</b>"
    return f'<li data-line="{index}"><i style="{format_hue(line.hue)}"></i>{escape(line.label)} {value}</li>'


def format_hue(hue: ColourPair) -> str:
    """Return an inline style with the light and the dark variant of a colour as CSS variables."""
    return f"--light:{hue.light};--dark:{hue.dark}"


def _build_chart(run: RunFiles, group: MetricGroup, max_points: int) -> Chart:
    """Build the chart of a group of metrics, with at most `max_points` points per line."""
    names = group.names
    nodes = list(dict.fromkeys(find_node(name) for name in names if not name.startswith(EVAL)))
    hues = list(
        dict.fromkeys([*(choose_hue(node) for node in nodes if node != RUN), ORANGE, *HUES])
    )
    if group.measure == SECONDS:
        hues = list(HUES)
    lines = []
    for index, name in enumerate(names):
        lines.append(
            ChartLine(
                name,
                _choose_label(name, nodes),
                hues[index % len(hues)],
                *thin_series(*run.get_series(name), max_points),
            )
        )
    missing = sum(run.count_not_finite(name) for name in names)
    return Chart(find_heading(group.measure), ", ".join(nodes or ["eval"]), lines, missing)


def find_heading(measure: str) -> str:
    """Return the title of the chart that shows a measure, such as `clip ratio` for `clip_ratio`."""
    if "|" in measure:
        return (
            measure.removesuffix("|".join(PAIRED)).strip("/").replace("_", " ").replace("/", " ")
            or "chosen, rejected"
        )
    if "/" not in measure or get_last_part(measure) in TITLES:
        return find_title(measure)
    return measure.replace("_", " ").replace("/", " ")


def _choose_label(name: str, nodes: Sequence[str]) -> str:
    """Return the legend label of the metric `name`.

    `nodes` are the graph nodes whose training metrics the chart shows. If there are several, the
    label of a training metric contains its node.
    """
    if name.startswith(TIME):
        return name.removeprefix(TIME)
    last = get_last_part(name)
    if name.startswith(EVAL):
        source = (
            name.removeprefix(EVAL).removesuffix(last).strip("/").removesuffix("rewards").strip("/")
        )
        label = f"eval {source}" if source else "eval"
        return f"{label}, {last}" if last in PAIRED else label
    node, measure = split_metric_name(name)
    if last in PAIRED:
        return last if len(nodes) == 1 else f"{node} {last}"
    if measure.endswith("_max"):
        return "largest" if len(nodes) == 1 else f"{node}, largest"
    return node if len(nodes) > 1 or node == RUN else "training"


def _is_informative(chart: Chart) -> bool:
    rank, _ = compute_rank(chart.lines[0].name)
    return rank < compute_rank("unknown")[0] and any(
        min(line.y) < max(line.y) for line in chart.lines
    )
