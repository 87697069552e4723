"""`report.html`: one page that shows a run, from the files in its directory. It asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from weft.observe import charts, sections, timing
from weft.observe.charts import Chart
from weft.observe.metrics import headline
from weft.observe.run_files import RunFiles

NAME = "report.html"
TEMPORARY = ".tmp"
HERE = Path(__file__).parent
GRAPH_ALT = "The dataflow graph of the run: its calls and the keys between them"


def build_report(run_dir: Path | str, status: str | None = None) -> Path:
    """Write `run_dir/report.html` anew and return its path. `status` is how the run ends, where the run does not say so yet.

    Works for a run that goes on and for one that has only some of its files. Raises `UserError` where `run_dir` is no run.
    """
    run = RunFiles.read(Path(run_dir))
    run = run if status is None else replace(run, status=status)
    path = run.directory / NAME
    temporary = path.with_name(NAME + TEMPORARY)
    temporary.write_text(page(run), encoding="utf-8", errors="replace")
    os.replace(temporary, path)
    return path


def page(run: RunFiles) -> str:
    """The whole page as text."""
    found = charts.all_charts(run)
    main = headline(run.names)
    hero = next((chart for chart in found if chart.lines[0].name == main), None)
    drawn = ([hero] if hero else []) + [chart for chart in found if chart is not hero]
    parts = [
        ("curves", "Curves", _curves(drawn, 1 if hero else 0)),
        ("completions", "Completions", sections.completions(run) if run.samples else ""),
        ("time", "Time", _time(run)),
        ("machine", "Machine", _machine(run)),
        ("graph", "Graph", _graph(run.graph) if run.graph else ""),
        ("configuration", "Configuration", _configuration(run) if run.config else ""),
        ("log", "Log", _folded(f"The last {len(run.log)} lines", sections.log(run.log)) if run.log else ""),
    ]
    there = [(name, heading, content) for name, heading, content in parts if content]
    script = (HERE / "report.js").read_text(encoding="utf-8")
    experiment, trial = run.title
    return Template((HERE / "report.html").read_text(encoding="utf-8")).substitute(
        title=escape(f"{experiment}/{trial}"),
        css=(HERE / "report.css").read_text(encoding="utf-8"),
        nav="".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in there),
        body=_hero(run, hero) + "".join(_section(*part) for part in there),
        footer=f"Built {time.strftime('%Y-%m-%d %H:%M')} from <code>{escape(str(run.directory))}</code>",
        data=embedded([charts.data(chart) for chart in drawn]),
        js=script,
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _hero(run: RunFiles, chart: Chart | None) -> str:
    experiment, trial = run.title
    curve = charts.html(chart, 0, large=True) if chart else ""
    tiles = sections.tiles(run)
    return (
        f'<section class="hero{"" if chart else " alone"}" id="top"><div class="intro">'
        f'<p class="eyebrow">{escape(experiment)}<span class="status {escape(run.status)}">{escape(run.status)}</span></p>'
        f'<h1>{escape(trial)}</h1><p class="lede">{sections.lede(run)}</p></div>{curve}'
        f"{f'<dl class=tiles>{tiles}</dl>' if tiles else ''}</section>"
    )


def _section(name: str, heading: str, content: str) -> str:
    return f'<section id="{name}" aria-labelledby="{name}-heading"><h2 id="{name}-heading">{heading}</h2>{content}</section>'


def _curves(drawn: Sequence[Chart], skip: int) -> str:
    """All charts but the first `skip`, which stand elsewhere; the less telling ones behind a click."""
    place = {id(chart): index for index, chart in enumerate(drawn)}
    telling, rest = charts.split(drawn[skip:])
    if not drawn:
        return ""
    many = any(len(line.x) >= 20 for chart in drawn for line in chart.lines)
    slider = (
        '<label class="smoothing js" hidden>Smoothing <input type="range" min="0" max="0.95" step="0.05" value="0.6">'
        "<output>0.60</output></label>"
    )
    return (
        (slider if many else "")
        + f'<div class="charts">{"".join(charts.html(chart, place[id(chart)]) for chart in telling)}</div>'
        + "".join(
            _folded(
                f"<b>{escape(node)}</b> {len(more)} more",
                f'<div class="charts">{"".join(charts.html(chart, place[id(chart)]) for chart in more)}</div>',
            )
            for node, more in rest.items()
        )
    )


def _time(run: RunFiles) -> str:
    share = timing.share_html(run) if timing.shares(run) else ""
    gantt = timing.gantt_html(run.spans) if run.spans else ""
    parts = [f'<div class="card"><h3>Seconds of a step</h3>{share}</div>' if share else ""]
    parts.append(f'<div class="card wide"><h3>What ran when</h3>{gantt}</div>' if gantt else "")
    return f'<div class="pair">{"".join(parts)}</div>' if share or gantt else ""


def _machine(run: RunFiles) -> str:
    """What the run was computed on, and where the traces of its steps lie."""
    parts = [f"<p>{escape(run.hardware)}</p>"] if run.hardware else []
    if run.traces:
        files = "".join(f"<li><code>{escape(trace)}</code></li>" for trace in run.traces)
        parts.append(f"<p>Traces of steps, which ui.perfetto.dev shows:</p><ul>{files}</ul>")
    return f'<div class="card">{"".join(parts)}</div>' if parts else ""


def _graph(svg: str) -> str:
    """As an image: nothing inside it can run, and its style stays its own."""
    encoded = base64.b64encode(svg.encode("utf-8", errors="replace")).decode()
    return (
        '<div class="card graph" tabindex="0" role="region" aria-label="Dataflow graph, scrolls sideways">'
        f'<img src="data:image/svg+xml;base64,{encoded}" alt="{GRAPH_ALT}"></div>'
    )


def _configuration(run: RunFiles) -> str:
    return (
        '<div class="tools js" hidden>'
        '<input class="filter" type="search" placeholder="Filter options" aria-label="Filter options">'
        '<label><input class="all" type="checkbox"> with those that are not set</label></div>'
        f'<div class="options">{sections.configuration(run.config)}</div>'
    )


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{summary}</summary>{content}</details>"


def embedded(value: Any) -> str:
    """JSON inside a script element: no text in it can end the element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
