"""Where the time goes, for the report: the share of each call, and the last steps as bars on tracks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from weft.observe.charts import css, hue_of, ticks
from weft.observe.metrics import TIME, duration, number
from weft.observe.palette import GREY, Hue, role_hues
from weft.observe.run_files import RunFiles
from weft.observe.timeline import HOST, ROLES, RUN, Span

LAST_STEPS = 3
LAST_SPANS = 60
OTHER = "between the calls"
GROUPS = (ROLES, HOST, RUN)


def node_hues(spans: Sequence[Span]) -> dict[str, Hue]:
    """Node -> its role's colour, grey for host functions, as far as the timeline tells."""
    roles = role_hues(span.lane for span in spans if span.group == ROLES)
    return {span.name: roles.get(span.lane, GREY) for span in spans if span.group in (ROLES, HOST)}


def shares(run: RunFiles) -> list[tuple[str, float, float]]:
    """(call, mean seconds a step, share of all), in the order of the lines; the rest of the step comes last.

    Calls that ran at the same time can add up to more than the step; shares are then of their sum.
    """
    means = {
        name.removeprefix(TIME): sum(values) / len(run.lines)
        for name in run.names
        if name.startswith(TIME) and (values := run.series(name)[1])
    }
    if not means:
        return []
    whole = sum(run.series("step_seconds")[1]) / len(run.lines)
    if whole > sum(means.values()) * 1.005:
        means[OTHER] = whole - sum(means.values())
    total = sum(means.values()) or 1.0
    return [(name, seconds, seconds / total) for name, seconds in means.items()]


def share_html(run: RunFiles) -> str:
    """One bar of all calls, and the same as a table."""
    rows = shares(run)
    hues = node_hues(run.spans)
    found = {name: GREY if name == OTHER else hue_of(name, hues) for name, _, _ in rows}
    tones = _tones([(name, found[name]) for name, _, _ in rows])
    bar = "".join(
        f'<i style="flex:{share:.5f};{css(found[name])};--tone:{tones[name]}%" title="{escape(name)} {share:.1%}"></i>'
        for name, _, share in rows
    )
    body = "".join(
        f'<tr><th scope="row"><i class="swatch" style="{css(found[name])};--tone:{tones[name]}%"></i>{escape(name)}</th>'
        f"<td>{escape(number(seconds))} s</td><td>{share:.1%}</td></tr>"
        for name, seconds, share in rows
    )
    return (
        f'<div class="stack" aria-hidden="true">{bar}</div><table class="shares"><thead><tr><th scope="col">call</th>'
        f'<th scope="col">a step</th><th scope="col">share</th></tr></thead><tbody>{body}</tbody></table>'
    )


def last_steps(spans: Sequence[Span]) -> list[Span]:
    """What ran in the last steps: by step where the spans know theirs, else the last few dozen."""
    steps = sorted({span.step for span in spans if span.step is not None})[-LAST_STEPS:]
    if not steps:
        return list(spans[-LAST_SPANS:])
    begin = min(span.start for span in spans if span.step in steps)
    return [span for span in spans if span.start >= begin - 1e-6]


def gantt_html(spans: Sequence[Span]) -> str:
    """Tracks of the last steps, a bar for each span; in words for those who do not see it."""
    recent = last_steps(spans)
    begin, end = min(span.start for span in recent), max(span.start + span.seconds for span in recent)
    length = max(end - begin, 1e-6)
    hues = node_hues(spans)
    lanes: dict[tuple[str, str], list[Span]] = {}
    for span in sorted(recent, key=lambda span: GROUPS.index(span.group) if span.group in GROUPS else len(GROUPS)):
        lanes.setdefault((span.group, span.lane), []).append(span)
    rows = "".join(_lane(lane, members, begin, length, hues) for (_, lane), members in lanes.items())
    marks = "".join(
        f'<span style="left:{100 * at / length:.2f}%">{escape(number(at))} s</span>'
        for at in ticks(0.0, length, 5)
        if at <= length
    )
    steps = sorted({span.step for span in recent if span.step is not None})
    which = f"steps {number(steps[0])} to {number(steps[-1])}" if steps else "the last calls"
    return (
        f'<p class="note">{which[0].upper()}{which[1:]}, {escape(duration(length))}. '
        "The whole run is in <code>timeline.json</code>; "
        '<a href="https://ui.perfetto.dev" rel="noreferrer">Perfetto</a> opens it.</p>'
        f'<div class="gantt" role="img" aria-label="{escape(_spoken(lanes, length))}">{rows}'
        f'<div class="axis">{marks}</div></div>'
    )


def _lane(lane: str, spans: Sequence[Span], begin: float, length: float, hues: Mapping[str, Hue]) -> str:
    names = list(dict.fromkeys(span.name for span in spans))
    tones = _tones([(name, hues.get(name, GREY)) for name in names])
    bars = []
    for span in spans:
        left, width = 100 * (span.start - begin) / length, 100 * span.seconds / length
        told = f"{span.name}, {duration(span.seconds)}" + (f", step {span.step}" if span.step is not None else "")
        style = f"left:{left:.3f}%;width:{width:.3f}%;{css(hues.get(span.name, GREY))};--tone:{tones[span.name]}%"
        label = f"<b>{escape(span.name)}</b>" if width > 2.5 + 1.15 * len(span.name) else ""
        bars.append(f'<i style="{style}" title="{escape(told)}">{label}</i>')
    return (
        f'<div class="lane"><span class="lane-name">{escape(lane)}</span><div class="track">{"".join(bars)}</div></div>'
    )


def _tones(names: Sequence[tuple[str, Hue]]) -> dict[str, int]:
    """Strength of a role's colour for each of its calls, so that two calls of one role are told apart."""
    seen: dict[Hue, int] = {}
    tones = {}
    for name, hue in names:
        tones[name] = (100, 62, 38)[seen.get(hue, 0) % 3]
        seen[hue] = seen.get(hue, 0) + 1
    return tones


def _spoken(lanes: Mapping[tuple[str, str], Sequence[Span]], length: float) -> str:
    busy = [f"{lane} {sum(span.seconds for span in spans) / length:.0%}" for (_, lane), spans in lanes.items()]
    return f"Timeline of {duration(length)}. Busy: {', '.join(busy)}."
