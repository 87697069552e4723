"""Page of a plan: placement and schedule of calls, memory over time, parts of each call's time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape

from weft.observe.charts import choose_ticks, format_hue
from weft.observe.memory import GIB, MIB, format_size
from weft.observe.metrics import format_duration, format_number
from weft.observe.page import (
    GREY,
    HUES,
    INDIGO,
    MAGENTA,
    OLIVE,
    ORANGE,
    SKY,
    TEAL,
    ColourPair,
    Page,
    PageSection,
    assign_role_hues,
    render_folded,
)
from weft.observe.shown_plan import WEIGHTS, ShownCall, ShownGroup, ShownPlan, ShownSpan
from weft.observe.timing import assign_tones

# Parts of a call's time: colour and explanation. Other parts get the remaining colours.
PARTS: Mapping[str, tuple[ColourPair, str]] = {
    "products": (INDIGO, "matrix products"),
    "memory": (TEAL, "reading and writing device memory"),
    "messages": (ORANGE, "messages between devices"),
    "overhead": (GREY, "starting kernels, packing, passing calls on"),
    "bubble": (SKY, "waiting of pipeline stages"),
    "offload": (MAGENTA, "copies to host memory and back"),
    "preemption": (OLIVE, "computing preempted sequences again"),
}
OTHER_PARTS = tuple(reversed(HUES))
WIDE_STEPS = 3  # maximum steps in the width of the page; with more steps, the timeline scrolls
MAX_ROWS = 400  # maximum rows of the table of all activities


def build_plan_page(plan: ShownPlan) -> Page:
    """Build the page of `weft plan show`."""
    return Page(
        title=f"Plan of {plan.title}",
        top=_render_top(plan),
        sections=[
            PageSection("placement", "Placement", render_placement(plan)),
            PageSection("timeline", "Timeline", render_timeline(plan)),
            PageSection("memory", "Memory", render_memory(plan)),
            PageSection("bounds", "What takes the time", render_bounds(plan)),
            PageSection("assumptions", "Assumptions", render_assumptions(plan)),
        ],
        footer=f"Simulated {time.strftime('%Y-%m-%d %H:%M')} by <code>weft plan show</code>",
    )


def format_seconds(seconds: float) -> str:
    """Format a duration with three significant digits, or as `4:05` from 100 s on."""
    if seconds >= 100:
        return format_duration(seconds)
    if seconds >= 0.1 or not seconds:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms"


def format_moved(num_bytes: float) -> str:
    """Format the number of bytes that all devices receive; in TiB from 1 TiB on."""
    if num_bytes >= 1024 * GIB:
        return f"{num_bytes / GIB / 1024:,.1f} TiB"
    return format_size(num_bytes, 1)


def describe_devices(plan: ShownPlan) -> str:
    """Return the devices of a plan as text, such as `16 x H100 on 2 machines`."""
    machines = -(-plan.num_devices // max(1, plan.per_node))
    machines_text = f" on {machines:,} machines" if machines > 1 else ""
    return f"{plan.num_devices:,} x {plan.device}{machines_text}"


def _render_top(plan: ShownPlan) -> str:
    step = format_seconds(plan.step_seconds)
    longest = max(plan.calls, key=lambda call: call.seconds)
    fullest = plan.fullest
    sentences = [
        f"A step takes about <b>{escape(step)}</b> on {escape(describe_devices(plan))}.",
        f"The longest call is <b>{escape(longest.name)}</b>, mostly {escape(longest.bound)}.",
    ]
    if not fullest.fits:
        sentences.append('<b class="bad">It does not fit into memory.</b>')
    if plan.left_out:
        left_out = escape(", ".join(plan.left_out))
        sentences.append(f"Calls of {left_out} are not included.")
    capacity = "" if fullest.capacity is None else f"of {format_size(fullest.capacity, 1)}"
    tiles = [
        ("step", step, f"{plan.num_tokens:,} tokens"),
        ("tokens per second", format_number(round(plan.num_tokens / plan.step_seconds)), ""),
        ("devices", f"{plan.num_devices:,}", plan.device),
        ("peak memory", format_size(fullest.peak_bytes, 1), capacity),
        ("busy", f"{_compute_busy_share(plan):.0%}", "of the devices' time"),
    ]
    moved_bytes = sum(call.moved_bytes for call in plan.calls)
    if moved_bytes:
        tiles.append(("weights moved", format_moved(moved_bytes), "a step, to all devices"))
    tiles_html = "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small>'
        "</dd></div>"
        for name, value, note in tiles
    )
    return (
        '<section class="hero alone" id="top"><div class="intro">'
        '<p class="eyebrow">Plan<span class="status running">simulated</span></p>'
        f'<h1>{escape(plan.title)}</h1><p class="lede plan-lede">{" ".join(sentences)}</p></div>'
        f"<dl class=tiles>{tiles_html}</dl></section>"
    )


def _compute_busy_share(plan: ShownPlan) -> float:
    """Return the fraction of the time of all devices, in the simulated steps, that they are busy."""
    busy_seconds = 0.0
    for span in plan.spans:
        busy_seconds += span.seconds * sum(
            plan.groups[group_index].num_devices for group_index in span.groups
        )
    return min(1.0, busy_seconds / (plan.seconds * plan.num_devices))


# -- colours


def find_call_styles(plan: ShownPlan) -> dict[str, str]:
    """Return an inline style for each call: the colour of its role, in a tone of that call."""
    hues = assign_role_hues(call.role for call in plan.calls)
    pairs = [(call.name, hues[call.role]) for call in plan.calls]
    tones = assign_tones(pairs)
    return {name: f"{format_hue(hue)};--tone:{tones[name]}%" for name, hue in pairs}


def find_part_hues(calls: Sequence[ShownCall]) -> dict[str, ColourPair]:
    """Return the colour of each part of the calls' time; parts that are always 0 are left out."""
    names = []
    for call in calls:
        names += [name for name, seconds in call.parts.items() if seconds > 0]
    present = list(dict.fromkeys([*(name for name in PARTS if name in names), *names]))
    others = [name for name in present if name not in PARTS]
    hues = {}
    for name in present:
        if name in PARTS:
            hues[name] = PARTS[name][0]
        else:
            hues[name] = OTHER_PARTS[others.index(name) % len(OTHER_PARTS)]
    return hues


# -- placement


def render_placement(plan: ShownPlan) -> str:
    """Render each call as bars over the devices of its mesh, with its layout."""
    styles = find_call_styles(plan)
    rows = []
    for call in plan.calls:
        bars = []
        intervals = _join_intervals(plan, call)
        for first, stop in intervals:
            left = 100 * first / plan.num_devices
            width = 100 * (stop - first) / plan.num_devices
            bars.append(f'<i style="left:{left:.3f}%;width:{width:.3f}%;{styles[call.name]}"></i>')
        text = f"{call.layout} on {_format_intervals(intervals)}"
        rows.append(
            f'<div class="lane" title="{escape(call.name)}: {escape(text)}">'
            f'<span class="lane-name">{escape(call.name)}</span><div class="track place">'
            f'{"".join(bars)}</div><span class="place-text">{escape(text)}</span></div>'
        )
    return (
        '<p class="note">The devices of each call, from the first to the last, and its layout: '
        "the degrees of data (d), sharding (f), tensor (t), pipeline (p), context (c) and expert "
        "(e) parallelism.</p>"
        f'<div class="card places">{"".join(rows)}{_render_device_axis(plan)}</div>'
    )


def _join_intervals(plan: ShownPlan, call: ShownCall) -> list[list[int]]:
    """Return the ranks of a call's devices as pairs [first rank, rank after the last one].

    Adjacent intervals are joined.
    """
    intervals: list[list[int]] = []
    group_intervals = []
    for group_index in call.groups:
        group_intervals += plan.groups[group_index].intervals
    for first, stop in sorted(group_intervals):
        if intervals and intervals[-1][1] == first:
            intervals[-1][1] = stop
        else:
            intervals.append([first, stop])
    return intervals


def _format_intervals(intervals: Sequence[Sequence[int]]) -> str:
    count = sum(stop - first for first, stop in intervals)
    ranges = []
    for first, stop in intervals[:3]:
        ranges.append(f"{first:,}" if stop == first + 1 else f"{first:,}–{stop - 1:,}")
    more = ", …" if len(intervals) > 3 else ""
    noun = "device" if count == 1 else "devices"
    return f"{noun} {', '.join(ranges)}{more}"


def _render_device_axis(plan: ShownPlan) -> str:
    if plan.num_devices == 1:
        return ""
    marks = []
    for rank in choose_ticks(0, plan.num_devices - 1, 8, integers=True):
        left = 100 * (rank + 0.5) / plan.num_devices
        marks.append(f'<span style="left:{left:.2f}%">{round(rank):,}</span>')
    return f'<div class="axis places-axis" aria-hidden="true">{"".join(marks)}</div>'


# -- timeline


def render_timeline(plan: ShownPlan) -> str:
    """Render the simulated steps: a track for each group of devices, and a table of activities."""
    styles = find_call_styles(plan)
    rows = []
    for group_index, group in enumerate(plan.groups):
        spans = [span for span in plan.spans if group_index in span.groups]
        rows.append(_render_track(plan, _name_group(group), spans, styles))
    hosts = list(dict.fromkeys(span.name for span in plan.spans if not span.groups))
    for name in hosts:
        spans = [span for span in plan.spans if span.name == name and not span.groups]
        rows.append(_render_track(plan, name, spans, styles))
    num_steps = len(plan.step_ends)
    width = (
        "" if num_steps <= WIDE_STEPS else f' style="min-width:{100 * num_steps / WIDE_STEPS:.0f}%"'
    )
    label = escape(f"Timeline of {num_steps} steps, {format_seconds(plan.seconds)}")
    return (
        f'<p class="note">{_describe_steps(plan)} Point at a bar for its duration and for what it '
        "waits for; the table has the same.</p>"
        f'<div class="card">{_render_call_legend(plan, styles)}<div class="scroll" tabindex="0" '
        f'role="region" aria-label="{label}"><div class="gantt"{width}>{"".join(rows)}'
        f"{render_time_axis(plan.seconds)}</div></div></div>{_render_span_table(plan)}"
    )


def _describe_steps(plan: ShownPlan) -> str:
    """Return sentences on the simulated steps, for the note above the timeline."""
    num_steps = len(plan.step_ends)
    steps = "One step" if num_steps == 1 else f"{num_steps} steps"
    text = (
        f"{steps} in {format_seconds(plan.seconds)}, with a row for each range of devices; lines mark "
        "the ends of steps."
    )
    if plan.max_staleness:
        text += (
            " Sampling runs ahead of training, so the first steps take longer; later ones take "
            f"{format_seconds(plan.step_seconds)}."
        )
    if any(span.kind == WEIGHTS for span in plan.spans):
        text += " Hatched bars are transfers of newly trained weights."
    return escape(text)


def _name_group(group: ShownGroup) -> str:
    first, stop = group.intervals[0]
    if len(group.intervals) > 1:
        return f"{group.num_devices:,} devices"
    return f"device {first:,}" if stop == first + 1 else f"{first:,}–{stop - 1:,}"


def _render_track(
    plan: ShownPlan, label: str, spans: Sequence[ShownSpan], styles: Mapping[str, str]
) -> str:
    """Render a track of the timeline, with lines at the ends of steps."""
    bars = []
    scale = max(1.0, len(plan.step_ends) / WIDE_STEPS)
    for span in spans:
        style = styles.get(span.name, format_hue(GREY))
        bars.append(_render_bar(span, plan.seconds, scale, style))
    for end in plan.step_ends:
        bars.append(f'<s style="left:{100 * end / plan.seconds:.3f}%"></s>')
    if not spans:
        bars.append('<em class="hint">no call</em>')
    return (
        f'<div class="lane"><span class="lane-name">{escape(label)}</span>'
        f'<div class="track">{"".join(bars)}</div></div>'
    )


def _render_bar(span: ShownSpan, length: float, scale: float, style: str) -> str:
    """Render a span on a track of `length` seconds that is `scale` times as wide as the page."""
    left = 100 * span.start / length
    width = 100 * span.seconds / length
    text = f"{describe_span(span)}, {format_seconds(span.seconds)}, step {span.step}"
    note = f"; {span.note}" if span.note else ""
    label = ""
    if width * scale > 4 + 1.2 * len(span.name) and span.kind != WEIGHTS:
        label = f"<b>{escape(span.name)}</b>"
    style_class = ' class="moves"' if span.kind == WEIGHTS else ""
    return (
        f'<i{style_class} style="left:{left:.3f}%;width:{width:.3f}%;{style}" '
        f'title="{escape(text + note)}">{label}</i>'
    )


def describe_span(span: ShownSpan) -> str:
    """Return the name of a call, or a name for the transfer of weights before a call."""
    return f"weights for {span.name}" if span.kind == WEIGHTS else span.name


def render_time_axis(length: float) -> str:
    """Render the axis below tracks that begin at 0 s and are `length` seconds long."""
    marks = "".join(
        f'<span style="left:{100 * seconds / length:.2f}%">{escape(format_number(seconds))} s</span>'
        for seconds in choose_ticks(0.0, length, 6)
        if seconds <= length
    )
    return f'<div class="axis">{marks}</div>'


def _render_call_legend(plan: ShownPlan, styles: Mapping[str, str]) -> str:
    if len(plan.calls) == 1:
        return ""
    items = "".join(
        f'<li><i class="swatch" style="{styles[call.name]}"></i>{escape(call.name)}</li>'
        for call in plan.calls
    )
    return f'<ul class="legend plan-legend">{items}</ul>'


def _render_span_table(plan: ShownPlan) -> str:
    """Render a table of all activities, for readers who cannot point at bars."""
    rows = []
    for span in plan.spans[:MAX_ROWS]:
        devices = (
            ", ".join(_name_group(plan.groups[group_index]) for group_index in span.groups)
            or "host"
        )
        rows.append(
            f'<tr><th scope="row">{escape(describe_span(span))}</th><td>{span.step}</td>'
            f"<td>{escape(devices)}</td><td>{escape(format_number(span.start))} s</td>"
            f"<td>{escape(format_seconds(span.seconds))}</td><td>{escape(span.note)}</td></tr>"
        )
    headings = "".join(
        f'<th scope="col">{name}</th>'
        for name in ("activity", "step", "devices", "begins at", "takes", "why not earlier")
    )
    table = (
        f'<div class="scroll"><table class="runs spans"><thead><tr>{headings}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
    num_left_out = len(plan.spans) - len(rows)
    if num_left_out:
        table += f'<p class="note">{num_left_out:,} later activities are left out.</p>'
    return render_folded(f"<b>{len(plan.spans):,}</b> activities as a table", table, "spans")


# -- memory


def render_memory(plan: ShownPlan) -> str:
    """Render the memory in use over time of each group of devices, against the capacity."""
    groups = [group for group in plan.groups if group.peak_bytes]
    if not groups:
        return ""
    charts = "".join(_render_memory_chart(plan, group) for group in groups)
    capacities: dict[float, None] = {}  # used as an ordered set
    dashed_note = ""
    for group in groups:
        if group.capacity is not None:
            capacities[group.capacity] = None
            if group.capacity <= _find_chart_top(group):
                dashed_note = " (the dashed line)"
    capacity_note = ""
    if capacities:
        sizes = " or ".join(format_size(capacity, 1) for capacity in capacities)
        capacity_note = f", of which a run can use {sizes}{dashed_note}"
    return (
        f'<p class="note">Memory of models and calls on each device over the simulated '
        f'steps{escape(capacity_note)}.</p><div class="charts courses">{charts}</div>'
    )


def _find_chart_top(group: ShownGroup) -> float:
    """Return the number of bytes at the top of the chart of a group's memory.

    The capacity is inside the chart unless it is more than about three times the peak.
    """
    return 1.08 * max(group.peak_bytes, min(group.capacity or 0.0, 3 * group.peak_bytes))


def _render_memory_chart(plan: ShownPlan, group: ShownGroup) -> str:
    """Render the memory of a group as an area with steps, and the capacity as a dashed line."""
    length = plan.seconds
    capacity = group.capacity or 0.0
    top = _find_chart_top(group)
    unit: float = GIB if top > GIB / 2 else MIB
    unit_name = "GiB" if unit == GIB else "MiB"
    # The line keeps each value until the next one: two points for each change.
    points = []
    previous = 0.0
    for seconds, used in group.memory:
        x = min(1000.0, 1000 * seconds / length)
        points += [
            f"{x:.1f},{100 * (1 - previous / top):.2f}",
            f"{x:.1f},{100 * (1 - used / top):.2f}",
        ]
        previous = used
    points.append(f"1000,{100 * (1 - previous / top):.2f}")
    line = " ".join(points[1:])
    limit = ""
    if 0 < capacity <= top:
        y = 100 * (1 - capacity / top)
        limit = f'<path class="limit" d="M0 {y:.2f}H1000"/>'
    ticks = "".join(
        f'<span class="tick y" style="top:{100 * (1 - amount * unit / top):.2f}%">'
        f"{escape(format_number(amount))}</span>"
        for amount in choose_ticks(0.0, top / unit, 4)
    )
    times = "".join(
        f'<span class="tick x{"" if tick else " first"}" style="left:{100 * tick / length:.2f}%">'
        f"{escape(format_number(tick))} s</span>"
        for tick in choose_ticks(0.0, length, 4)
        if tick <= 0.96 * length
    )
    peak = f"{format_size(group.peak_bytes)} at most"
    style = "" if group.fits else "bad"
    name = _name_group(group)
    if len(group.intervals) == 1 and group.num_devices > 1:
        name = f"devices {name}"
    device_count = f"{group.num_devices:,} devices" if group.num_devices > 1 else "one device"
    summary = escape(f"Memory of {name}: {peak}")
    return (
        f'<figure class="chart"><figcaption><div><span class="chart-title">{escape(name)}</span> '
        f'<span class="chart-node">{device_count}, {unit_name}</span></div>'
        f'<span class="readout {style}">{escape(peak)}</span></figcaption>'
        f'<div class="plot still"><svg viewBox="0 0 1000 100" preserveAspectRatio="none" '
        f'role="img" aria-label="{summary}"><polygon class="used" '
        f'points="0,100 {line} 1000,100"/>{limit}</svg>{ticks}{times}</div></figure>'
    )


# -- bounds


def render_bounds(plan: ShownPlan) -> str:
    """Render the parts of each call's time, as bars and as a table."""
    hues = find_part_hues(plan.calls)
    longest = max(call.seconds + call.transfer_seconds for call in plan.calls) or 1.0
    legend = "".join(
        f'<li title="{escape(PARTS[name][1] if name in PARTS else name)}">'
        f'<i class="swatch" style="{format_hue(hue)}"></i>{escape(name)}</li>'
        for name, hue in hues.items()
    )
    has_transfers = any(call.transfer_seconds for call in plan.calls)
    if has_transfers:
        legend += f'<li><i class="swatch moves" style="{format_hue(GREY)}"></i>weights</li>'
    bars = "".join(_render_parts(call, hues, longest) for call in plan.calls)
    total = sum(call.seconds + call.transfer_seconds for call in plan.calls) or 1.0
    rows = "".join(
        _render_bounds_row(call, total, has_transfers=has_transfers) for call in plan.calls
    )
    columns = [
        "call",
        "seconds",
        "share",
        "mostly",
        *(["weights moved", "moved in"] if has_transfers else []),
    ]
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    return (
        '<div class="card">'
        f'<ul class="legend plan-legend">{legend}</ul><div class="gantt">{bars}</div>'
        '<div class="scroll"><table class="shares bounds"><thead>'
        f"<tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></div>"
    )


def _render_parts(call: ShownCall, hues: Mapping[str, ColourPair], longest: float) -> str:
    """Render the parts of a call's time one after another, on a scale of `longest` seconds."""
    elements = []
    left = 0.0
    if call.transfer_seconds:
        left = 100 * call.transfer_seconds / longest
        text = f"{call.name}: weights, {format_seconds(call.transfer_seconds)}"
        elements.append(
            f'<i class="moves" style="left:0;width:{left:.3f}%;{format_hue(GREY)}" '
            f'title="{escape(text)}"></i>'
        )
    for name, hue in hues.items():
        seconds = call.parts.get(name, 0.0)
        if seconds <= 0:
            continue
        width = 100 * seconds / longest
        share = seconds / call.seconds if call.seconds else 0.0
        text = f"{call.name}: {name}, {format_seconds(seconds)} ({share:.0%})"
        elements.append(
            f'<i class="part" style="left:{left:.3f}%;width:{width:.3f}%;{format_hue(hue)}" '
            f'title="{escape(text)}"></i>'
        )
        left += width
    return (
        f'<div class="lane"><span class="lane-name">{escape(call.name)}</span>'
        f'<div class="track">{"".join(elements)}</div></div>'
    )


def _render_bounds_row(call: ShownCall, total: float, *, has_transfers: bool) -> str:
    call_seconds = call.seconds + call.transfer_seconds
    share = call.parts.get(call.bound, 0.0) / call.seconds if call.seconds else 0.0
    bound = f"{call.bound} ({share:.0%})" if call.bound else "–"
    cells = [format_seconds(call.seconds), f"{call_seconds / total:.1%}", bound]
    if has_transfers:
        if call.transfer_seconds:
            cells += [format_moved(call.moved_bytes), format_seconds(call.transfer_seconds)]
        else:
            cells += ["–", "–"]
    columns = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape(call.name)}</th>{columns}</tr>'


# -- assumptions


def render_assumptions(plan: ShownPlan) -> str:
    """Render the devices, the basis and the assumptions of the plan, and its notes."""
    rows = [("devices", describe_devices(plan)), ("speeds", plan.basis), *plan.assumptions]
    for note in plan.notes:
        rows.append(("note", note))
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(text)}</td></tr>'
        for name, text in rows
    )
    return (
        '<p class="note">Seconds are estimates. Evaluation, saving and loading data are not '
        "included.</p>"
        f'<div class="card"><table class="settings assumptions"><tbody>{body}</tbody></table></div>'
    )
