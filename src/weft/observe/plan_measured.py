"""Plan in a run's report: times of a simulated step next to those of a typical measured step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median_low

from weft.observe.charts import format_hue
from weft.observe.metrics import PREDICTED, is_finite
from weft.observe.page import GREY, render_folded
from weft.observe.plan_page import (
    find_call_styles,
    format_seconds,
    render_assumptions,
    render_bounds,
    render_memory,
    render_placement,
    render_time_axis,
)
from weft.observe.predicted import STEP_SECONDS, render_comparison, select_compared
from weft.observe.run_files import RunFiles
from weft.observe.shown_plan import ShownPlan, list_nodes
from weft.observe.timeline import HOST, ROLES

Bar = tuple[float, float]  # start and duration in seconds, from the start of the step


@dataclass(frozen=True)
class TypicalStep:
    """Step of median duration in a run; see `find_typical_step`.

    `seconds` is the measured duration, and `predicted` the predicted one, or None. `bars` maps the
    names of nodes to their activities in the step.
    """

    step: int
    seconds: float
    predicted: float | None
    bars: Mapping[str, Sequence[Bar]]


def find_typical_step(run: RunFiles) -> TypicalStep | None:
    """Return the step whose duration is the median of all steps except the first.

    Only steps in which all nodes ran are considered; if sampling is ahead of training, the last
    steps sample nothing. Returns None if no step has both a duration and a timeline.
    """
    # Activities of each step as (name, start, seconds).
    activities: dict[int, list[tuple[str, float, float]]] = {}
    for span in run.spans:
        if span.step is not None and span.group in (ROLES, HOST):
            activities.setdefault(span.step, []).append((span.name, span.start, span.seconds))
    lines = [line for line in select_compared(run.lines) if line["step"] in activities]
    if not lines:
        return None
    # Keep the steps with all nodes, and take the one of median duration.
    num_nodes = {}
    for line in lines:
        num_nodes[line["step"]] = len({name for name, *_ in activities[line["step"]]})
    max_nodes = max(num_nodes.values())
    lines = [line for line in lines if num_nodes[line["step"]] == max_nodes]
    seconds_of_step = median_low([float(line[STEP_SECONDS]) for line in lines])
    line = next(line for line in lines if float(line[STEP_SECONDS]) == seconds_of_step)
    step = int(line["step"])
    begin = min(start for _, start, _ in activities[step])
    bars: dict[str, list[Bar]] = {}
    for name, start, seconds in activities[step]:
        bars.setdefault(name, []).append((start - begin, seconds))
    predicted = line.get(f"{PREDICTED}{STEP_SECONDS}")
    if not is_finite(predicted):
        predicted = None
    return TypicalStep(step, seconds_of_step, predicted, bars)


def render_run_plan(run: RunFiles, plan: ShownPlan | None) -> str:
    """Render the plan of a run with the measured times; "" if the run has no plan."""
    if plan is None:
        return ""
    typical = find_typical_step(run)
    comparison = render_comparison(run)
    parts = []
    if typical is not None:
        lanes = _render_lanes(plan, typical)
        parts.append(f'<div class="card"><h3>When calls ran in a step</h3>{lanes}</div>')
    if comparison:
        parts.append(f'<div class="card"><h3>Predicted and measured</h3>{comparison}</div>')
    for heading, content in (
        ("Placement", render_placement(plan)),
        ("Memory over time, as predicted", render_memory(plan)),
        ("What takes the time, as predicted", render_bounds(plan)),
        ("Assumptions", render_assumptions(plan)),
    ):
        if content:
            parts.append(render_folded(f"<b>{heading}</b>", content, heading))
    return "".join(parts)


def _render_lanes(plan: ShownPlan, typical: TypicalStep) -> str:
    """Render two tracks for each node: the predicted time above, the measured time below."""
    predicted = _collect_predicted(plan)
    # Sort the nodes by their first start.
    begins = {name: bars[0][0] for name, bars in typical.bars.items()}
    for name in list_nodes(plan.spans):
        begins.setdefault(name, predicted.get(name, [(0.0, 0.0)])[0][0])
    names = sorted(begins, key=lambda name: begins[name])
    ends = [start + seconds for bars in predicted.values() for start, seconds in bars]
    ends += [start + seconds for bars in typical.bars.values() for start, seconds in bars]
    length = max([typical.seconds, plan.step_seconds, *ends])
    styles = find_call_styles(plan)
    rows = []
    for name in names:
        style = styles.get(name, format_hue(GREY))
        tracks = ""
        for kind, bars in (
            ("predicted", predicted.get(name, ())),
            ("measured", typical.bars.get(name, ())),
        ):
            tracks += _render_bars(name, kind, bars, length, style)
        rows.append(
            f'<div class="lane"><span class="lane-name">{escape(name)}</span>'
            f'<div class="versus-tracks">{tracks}</div></div>'
        )
    return (
        f'<p class="note">The upper bar of each call is predicted, the lower bar measured in step '
        f"{typical.step}, the median of the steps after the first: predicted "
        f"{escape(format_seconds(typical.predicted or plan.step_seconds))} a step, measured "
        f"{escape(format_seconds(typical.seconds))}.</p>"
        f'<div class="gantt pairs">{"".join(rows)}{render_time_axis(length)}</div>'
    )


def _collect_predicted(plan: ShownPlan) -> dict[str, list[Bar]]:
    """Return the activities of each node in the last simulated step, from the start of the step."""
    last = len(plan.step_ends)
    spans = [span for span in plan.spans if span.step == last]
    begin = min((span.start for span in spans), default=0.0)
    bars: dict[str, list[Bar]] = {}
    for span in spans:
        bars.setdefault(span.name, []).append((span.start - begin, span.seconds))
    return bars


def _render_bars(name: str, kind: str, bars: Sequence[Bar], length: float, style: str) -> str:
    """Render a track of `length` seconds; `kind` is `predicted` or `measured`."""
    elements = []
    for start, seconds in bars:
        left, width = 100 * start / length, 100 * seconds / length
        text = f"{name}, {kind}: {format_seconds(seconds)}, begins at {format_seconds(start)}"
        elements.append(
            f'<i style="left:{left:.3f}%;width:{width:.3f}%;{style}" title="{escape(text)}"></i>'
        )
    total = sum(seconds for _, seconds in bars)
    label = f"{kind} {format_seconds(total)}" if bars else f"not {kind}"
    return (
        f'<div class="track {kind}" role="img" aria-label="{escape(f"{name}: {label}")}">'
        f"{''.join(elements)}</div>"
    )
