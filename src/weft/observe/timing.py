"""Time section of a report: each call's share of a step, and a step's spans as bars on tracks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from weft.observe.charts import choose_hue, choose_ticks, format_hue
from weft.observe.metrics import TIME, format_duration, format_number
from weft.observe.page import GREY, ColourPair, assign_role_hues
from weft.observe.run_files import RunFiles
from weft.observe.sample_rows import pick_evenly
from weft.observe.timeline import HOST, ROLES, RUN, TimelineSpan

NUM_LAST_STEPS = 3  # number of last steps shown without the page's script
NUM_LAST_SPANS = 60  # number of last spans shown if no span has a step
MAX_SPANS = 20_000  # maximum spans in a page
OUTSIDE_CALLS = "between the calls"  # name of the time of a step outside of all calls
GROUPS = (ROLES, HOST, RUN)  # order of the tracks


def find_node_hues(spans: Sequence[TimelineSpan]) -> dict[str, ColourPair]:
    """Return the colour of each graph node that appears in the timeline.

    This is the colour of the node's role, or grey for a host function.
    """
    roles = assign_role_hues(span.lane for span in spans if span.group == ROLES)
    node_hues: dict[str, ColourPair] = {}
    for span in spans:
        if span.group in (ROLES, HOST):
            node_hues[span.name] = roles.get(span.lane, GREY)
    return node_hues


def compute_shares(run: RunFiles) -> list[tuple[str, float, float]]:
    """Return each call's name, its mean seconds per step, and its fraction of the step's time.

    A call is one execution of a graph node. The last item, named `OUTSIDE_CALLS`, is the time of
    the step outside of all calls. If calls are concurrent and together take as long as the step or
    longer, this item is missing, and the fractions are relative to the total time of the calls.
    """
    means = {
        name.removeprefix(TIME): sum(values) / len(run.lines)
        for name in run.metric_names
        if name.startswith(TIME) and (values := run.get_series(name)[1])
    }
    if not means:
        return []
    step_seconds = sum(run.get_series("step_seconds")[1]) / len(run.lines)
    if step_seconds > sum(means.values()) * 1.005:
        means[OUTSIDE_CALLS] = step_seconds - sum(means.values())
    total = sum(means.values()) or 1.0
    return [(name, seconds, seconds / total) for name, seconds in means.items()]


def render_shares(run: RunFiles) -> str:
    """Render each call's share of the step's time, as one stacked bar and as a table."""
    rows = compute_shares(run)
    hues = find_node_hues(run.spans)
    call_hues = {
        name: GREY if name == OUTSIDE_CALLS else choose_hue(name, hues) for name, _, _ in rows
    }
    tones = assign_tones([(name, call_hues[name]) for name, _, _ in rows])
    bar = "".join(
        f'<i style="flex:{share:.5f};{format_hue(call_hues[name])};--tone:{tones[name]}%" '
        f'title="{escape(name)} {share:.1%}"></i>'
        for name, _, share in rows
    )
    body = "".join(
        f'<tr><th scope="row"><i class="swatch" style="{format_hue(call_hues[name])};'
        f'--tone:{tones[name]}%"></i>{escape(name)}</th>'
        f"<td>{escape(format_number(seconds))} s</td><td>{share:.1%}</td></tr>"
        for name, seconds, share in rows
    )
    return (
        f'<div class="stack" aria-hidden="true">{bar}</div><table class="shares"><thead><tr><th scope="col">call</th>'
        f'<th scope="col">per step</th><th scope="col">share</th></tr></thead><tbody>{body}</tbody></table>'
    )


@dataclass(frozen=True)
class SpansByStep:
    """Timed spans of a run, grouped by step.

    `by_step` maps each step that the page can show to the spans of the step. `left_out` is the
    number of steps that are not included because the run is very long. `hues` maps the names of
    graph nodes to their colours.
    """

    by_step: Mapping[int | None, Sequence[TimelineSpan]]
    left_out: int = 0  # steps
    hues: Mapping[str, ColourPair] = field(default_factory=dict)

    @classmethod
    def from_spans(cls, spans: Sequence[TimelineSpan]) -> SpansByStep:
        """Group spans by step; `spans` must be sorted by start.

        A span without a step is assigned to the preceding step. Spans before the first step are
        left out, unless no span has a step. If there are too many spans, only a selection of steps
        is kept.
        """
        by_step: dict[int | None, list[TimelineSpan]] = {}
        current_step: int | None = None
        for span in spans:
            current_step = current_step if span.step is None else span.step
            by_step.setdefault(current_step, []).append(span)
        if len(by_step) > 1:
            by_step.pop(None, None)
        selected = _choose_steps(by_step)
        return cls(selected, len(by_step) - len(selected), find_node_hues(spans))

    @property
    def steps(self) -> list[int]:
        return sorted(step for step in self.by_step if step is not None)

    def get_last(self) -> list[TimelineSpan]:
        """Return the spans of the last `NUM_LAST_STEPS` steps, sorted by start.

        If no span belongs to a step, the last `NUM_LAST_SPANS` spans are returned.
        """
        if not self.steps:
            return [span for spans in self.by_step.values() for span in spans][-NUM_LAST_SPANS:]
        recent = [span for step in self.steps[-NUM_LAST_STEPS:] for span in self.by_step[step]]
        return sorted(recent, key=lambda span: span.start)

    def build_data(self) -> dict[str, Any]:
        """Return the JSON data for the page's script.

        The data contain the names of the spans, the colour of each name, the lanes, and the spans
        of each step. Each span is a list `[name, lane, start, seconds]`: the index of its name, the
        index of its lane, the seconds from the start of the step, and the duration.
        """
        # Names, lanes in the order of `GROUPS`, and colours.
        names = list(dict.fromkeys(span.name for spans in self.by_step.values() for span in spans))
        lanes = list(
            dict.fromkeys(
                (span.group, span.lane) for spans in self.by_step.values() for span in spans
            )
        )
        lanes.sort(key=lambda lane: GROUPS.index(lane[0]) if lane[0] in GROUPS else len(GROUPS))
        tones = assign_tones([(name, self.hues.get(name, GREY)) for name in names])
        name_indices = {name: index for index, name in enumerate(names)}
        lane_indices = {lane: index for index, lane in enumerate(lanes)}
        # Spans of each step, with times relative to its start.
        steps = []
        for step in self.steps:
            spans = self.by_step[step]
            begin = min(span.start for span in spans)
            rows = []
            for span in spans:
                rows.append(
                    [
                        name_indices[span.name],
                        lane_indices[span.group, span.lane],
                        round(span.start - begin, 4),
                        round(span.seconds, 4),
                    ]
                )
            steps.append({"step": step, "spans": rows})
        styles = []
        for name in names:
            styles.append(f"{format_hue(self.hues.get(name, GREY))};--tone:{tones[name]}%")
        return {
            "names": names,
            "styles": styles,
            "lanes": [lane for _, lane in lanes],
            "steps": steps,
        }


def _choose_steps(
    by_step: dict[int | None, list[TimelineSpan]],
) -> dict[int | None, list[TimelineSpan]]:
    """Return the spans of all steps or, if there are too many spans, of a selection of steps.

    The selection includes the first, the last and the longest steps, and evenly spaced others.
    """
    total = sum(len(spans) for spans in by_step.values())
    if total <= MAX_SPANS:
        return by_step
    count = max(20, MAX_SPANS * len(by_step) // total)
    steps = sorted(step for step in by_step if step is not None)
    longest = sorted(steps, key=lambda step: -sum(span.seconds for span in by_step[step]))[
        : count // 4
    ]
    chosen = {*longest, *steps[-count // 4 :], *pick_evenly(steps, count // 2)}
    return {step: by_step[step] for step in steps if step in chosen}


def render_gantt(spans: SpansByStep) -> str:
    """Render the spans of the last steps as bars on tracks, with a description for screen readers.

    The page's script can show other steps.
    """
    recent = spans.get_last()
    begin = min(span.start for span in recent)
    end = max(span.start + span.seconds for span in recent)
    length = max(end - begin, 1e-6)
    # One row per track, in the order of `GROUPS`, with its bars.
    lanes: dict[tuple[str, str], list[TimelineSpan]] = {}
    for span in sorted(
        recent, key=lambda span: GROUPS.index(span.group) if span.group in GROUPS else len(GROUPS)
    ):
        lanes.setdefault((span.group, span.lane), []).append(span)
    rows = "".join(
        _render_track(lane, lane_spans, begin, length, spans.hues)
        for (_, lane), lane_spans in lanes.items()
    )
    # Time axis and title.
    marks = "".join(
        f'<span style="left:{100 * tick / length:.2f}%">{escape(format_number(tick))} s</span>'
        for tick in choose_ticks(0.0, length, 5)
        if tick <= length
    )
    steps = sorted({span.step for span in recent if span.step is not None})
    if not steps:
        shown_steps = "the last calls"
    elif len(steps) == 1:
        shown_steps = f"step {steps[0]}"
    else:
        shown_steps = f"steps {steps[0]} to {steps[-1]}"
    heading = shown_steps[0].upper() + shown_steps[1:]
    return (
        f"{_render_step_chooser(spans)}"
        f'<p class="note"><span id="which">{heading}, {escape(format_duration(length))}.</span> '
        "The whole run is in <code>timeline.json</code>; "
        '<a href="https://ui.perfetto.dev" rel="noreferrer">Perfetto</a> opens it.</p>'
        f'<div class="gantt" id="gantt" role="img" aria-label="{escape(_describe_tracks(lanes, length))}">{rows}'
        f'<div class="axis">{marks}</div></div>'
    )


def _render_step_chooser(spans: SpansByStep) -> str:
    """Render buttons and a slider that select a step; "" if there is only one step."""
    if len(spans.steps) < 2:
        return ""
    last = len(spans.steps) - 1
    has_gaps = spans.left_out or spans.steps[-1] - spans.steps[0] >= len(spans.steps)
    if has_gaps:
        hint = '<span class="hint">Some steps in between are left out.</span>'
    else:
        hint = ""
    return (
        '<div class="tools js" hidden><button type="button" id="step-back" aria-label="The step before">‹</button>'
        f'<label>Step <input id="step" type="range" min="0" max="{last}" value="{last}" aria-label="Step"></label>'
        '<button type="button" id="step-on" aria-label="The next step">›</button>'
        f'<button type="button" id="step-longest">Longest step</button>{hint}</div>'
    )


def _render_track(
    lane: str,
    spans: Sequence[TimelineSpan],
    begin: float,
    length: float,
    hues: Mapping[str, ColourPair],
) -> str:
    """Render spans as bars on a track that starts at `begin` and has `length` seconds."""
    names = list(dict.fromkeys(span.name for span in spans))
    tones = assign_tones([(name, hues.get(name, GREY)) for name in names])
    bars = []
    for span in spans:
        left = 100 * (span.start - begin) / length
        width = 100 * span.seconds / length
        tooltip = f"{span.name}, {format_duration(span.seconds)}" + (
            f", step {span.step}" if span.step is not None else ""
        )
        style = f"left:{left:.3f}%;width:{width:.3f}%;{format_hue(hues.get(span.name, GREY))};--tone:{tones[span.name]}%"
        if width > 4 + 1.5 * len(span.name):
            label = f"<b>{escape(span.name)}</b>"
        else:
            label = ""
        bars.append(f'<i style="{style}" title="{escape(tooltip)}">{label}</i>')
    return f'<div class="lane"><span class="lane-name">{escape(lane)}</span><div class="track">{"".join(bars)}</div></div>'


def assign_tones(names: Sequence[tuple[str, ColourPair]]) -> dict[str, int]:
    """Return the percentage at which each name's colour is mixed with the background.

    `names` has pairs of a name and a colour. Names with the same colour, such as the calls of a
    role, get different percentages.
    """
    num_uses: dict[ColourPair, int] = {}
    tones = {}
    for name, hue in names:
        tones[name] = (100, 62, 38)[num_uses.get(hue, 0) % 3]
        num_uses[hue] = num_uses.get(hue, 0) + 1
    return tones


def _describe_tracks(lanes: Mapping[tuple[str, str], Sequence[TimelineSpan]], length: float) -> str:
    """Describe a timeline of `length` seconds by the share of time in which each track is busy."""
    shares = []
    for (_, lane), spans in lanes.items():
        shares.append(f"{lane} {sum(span.seconds for span in spans) / length:.0%}")
    return f"Timeline of {format_duration(length)}. Busy: {', '.join(shares)}."
