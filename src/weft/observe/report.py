"""`report.html`: a page that shows one run, built from the files in the run's directory.

The page loads nothing from the network.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from weft.observe import charts, completions, configuration, sections, timing
from weft.observe.charts import Chart
from weft.observe.filmstrip import render_filmstrip
from weft.observe.page import DARK, Page, PageSection, render_folded, write
from weft.observe.run_files import RunFiles

NAME = "report.html"
GRAPH_ALT = "The dataflow graph of the run: its calls and the keys between them"


def build_report(run_dir: Path | str, status: str | None = None) -> Path:
    """Write `report.html` into a run's directory, and return the path of the report.

    `status` overrides the status in the run's files. The report can be built during a run, and even
    if some files are missing. Raises `UserError` if `run_dir` is not a run.
    """
    run = RunFiles.read(Path(run_dir))
    run = run if status is None else replace(run, status=status)
    return write(run.directory / NAME, build_page(run).render())


def build_page(run: RunFiles, *, live: str = "", home: str = "#top") -> Page:
    """Build the page of a run.

    If `live` is empty, the page never changes. Otherwise, `live` identifies this version of the
    page, and the page updates itself when the version changes. `home` is the target of the logo's
    link.
    """
    run_charts = charts.build_charts(run)
    main = sections.choose_headlines(run)[:1]
    hero = next(
        (chart for chart in run_charts if any(line.name in main for line in chart.lines)), None
    )
    drawn = ([hero] if hero else []) + [chart for chart in run_charts if chart is not hero]
    completions_html, tokens = completions.render_completions(run) if run.samples else ("", [])
    spans = timing.SpansByStep.from_spans(run.spans)
    experiment, trial = run.title
    return Page(
        title=f"{experiment}/{trial}",
        top=_render_hero(run, hero),
        sections=[
            PageSection("curves", "Curves", render_curves(drawn, 1 if hero else 0)),
            PageSection("filmstrip", "Fixed prompts", render_filmstrip(run.answers)),
            PageSection("completions", completions.choose_heading(run), completions_html),
            PageSection("time", "Time", _render_time(run, spans)),
            PageSection("machine", "Machine", _render_machine(run)),
            PageSection("graph", "Graph", _embed_graph(run.graph) if run.graph else ""),
            PageSection("configuration", "Configuration", configuration.render_configuration(run)),
            PageSection("log", "Log", _render_log(run) if run.log else ""),
        ],
        footer=f"Built {time.strftime('%Y-%m-%d %H:%M')} from <code>{escape(str(run.directory))}</code>",
        data={
            **charts.build_page_data(drawn, [run]),
            "tokens": tokens,
            "timeline": spans.build_data(),
        },
        live=live,
        home=home,
    )


def _render_hero(run: RunFiles, chart: Chart | None) -> str:
    experiment, trial = run.title
    curve = charts.render_chart(chart, 0, large=True) if chart else ""
    tiles = sections.render_tiles(run)
    diagnosis = run.diagnosis
    mark = sections.render_status(
        run.status, flagged=diagnosis is not None and not diagnosis.is_sound
    )
    return (
        f'<section class="hero{"" if chart else " alone"}" id="top"><div class="intro">'
        f'<p class="eyebrow">{escape(experiment)}{mark}</p>'
        f'<h1>{escape(trial)}</h1><p class="lede">{sections.render_lede(run)}</p>'
        f"{sections.render_verdict(diagnosis)}</div>{curve}"
        f"{f'<dl class=tiles>{tiles}</dl>' if tiles else ''}</section>"
    )


def render_curves(drawn: Sequence[Chart], skip: int) -> str:
    """Render all charts except the first `skip`. Less informative charts are shown after a click."""
    place = {id(chart): index for index, chart in enumerate(drawn)}
    telling, rest = charts.split_charts(drawn[skip:])
    if not drawn:
        return ""
    many = any(len(line.x) >= 20 for chart in drawn for line in chart.lines)
    more = f'<div class="charts">{"".join(charts.render_chart(chart, place[id(chart)]) for chart in rest)}</div>'
    return (
        _render_controls(many)
        + f'<div class="charts">{"".join(charts.render_chart(chart, place[id(chart)]) for chart in telling)}</div>'
        + (render_folded(f"<b>{len(rest)}</b> more", more, "more curves") if rest else "")
    )


def _render_controls(many: bool) -> str:
    """Render the controls for all curves: smoothing, x axis, log scale and reset.

    `many` is True if a curve has many points; otherwise, the smoothing control is left out.
    """
    slider = (
        '<label class="smoothing">Smoothing <input id="smoothing" type="range" min="0" max="0.95" step="0.05" value="0.6">'
        "<output>0.60</output></label>"
    )
    return (
        f'<div class="tools axes js" hidden>{slider if many else ""}'
        '<label>Across <select id="x"><option value="step">steps</option><option value="tokens">tokens</option>'
        '<option value="time">time</option></select></label>'
        '<label><input id="log-scale" type="checkbox"> log scale</label>'
        '<button type="button" id="reset" hidden>Show all</button>'
        '<span class="hint">Drag over a curve to zoom in; double click shows all.</span></div>'
    )


def _render_time(run: RunFiles, spans: timing.SpansByStep) -> str:
    share = timing.render_shares(run) if timing.compute_shares(run) else ""
    gantt = timing.render_gantt(spans) if spans.listed else ""
    parts = [f'<div class="card"><h3>Seconds of a step</h3>{share}</div>' if share else ""]
    parts.append(f'<div class="card wide"><h3>What ran when</h3>{gantt}</div>' if gantt else "")
    return f'<div class="pair">{"".join(parts)}</div>' if share or gantt else ""


def _render_machine(run: RunFiles) -> str:
    """Render the hardware of the run, and a list of the profiler's traces."""
    parts = [f"<p>{escape(run.hardware)}</p>"] if run.hardware else []
    if run.traces:
        files = "".join(f"<li><code>{escape(trace)}</code></li>" for trace in run.traces)
        parts.append(f"<p>Traces of steps, which ui.perfetto.dev shows:</p><ul>{files}</ul>")
    return f'<div class="card">{"".join(parts)}</div>' if parts else ""


def _embed_graph(svg: str) -> str:
    """Embed the graph as images, so that scripts and styles in the graph cannot affect the page.

    There are two images, one for light and one for dark backgrounds, because not every browser
    passes the page's colour scheme to an image. Both images have a transparent background.
    """
    bare = svg.replace("</svg>", "<style>.ground{fill:none}</style></svg>")
    light, dark = (
        _embed_image(bare.replace(DARK, f"@media {kind}")) for kind in ("not all", "all")
    )
    return (
        '<p class="note sideways">The graph is wider than this screen: scroll it sideways.</p>'
        '<div class="card graph" tabindex="0" role="region" aria-label="Dataflow graph, scrolls sideways">'
        f'<picture><source srcset="{dark}" media="(prefers-color-scheme: dark)"><img src="{light}" alt="{GRAPH_ALT}">'
        "</picture></div>"
    )


def _embed_image(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode('utf-8', errors='replace')).decode()}"


def _render_log(run: RunFiles) -> str:
    return render_folded(
        f"The last {sections.format_count(len(run.log), 'line')}",
        sections.render_log(run.log),
        "log",
    )
