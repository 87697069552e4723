"""`report.html`: a page that shows one run, built from the files in the run's directory.

The first screen shows the headline metrics. During a run, the page is rebuilt regularly without
slowing the run down.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any, Protocol

from weft.observe import charts, completions, configuration, pace, plan_measured, predicted, timing
from weft.observe.charts import Chart
from weft.observe.diagnosis import RunDiagnosis
from weft.observe.eval_files import ResultReader, count_result_bytes
from weft.observe.eval_html import render_evaluations
from weft.observe.metrics import (
    EVAL,
    ROWS,
    compute_tokens_per_second,
    find_evaluation,
    find_headline,
    find_title,
    format_duration,
    format_number,
    get_last_part,
    is_finite,
)
from weft.observe.page import DARK, Page, PageSection, escape_text, render_folded, write
from weft.observe.run_files import METRICS, SAMPLES, TIMELINE, RunFiles
from weft.observe.sample_rows import render_filmstrip


def render_lede(run: RunFiles) -> str:
    """Return a few sentences on the length of the run and the change of its headline metrics."""
    if not run.lines:
        return "No step has been written yet."
    last = run.lines[-1]
    seconds = sum(run.get_series("step_seconds")[1])
    parts = [format_count(last["step"], "step")]
    if epochs := run.get_series("epoch")[1]:
        parts.append(f"{format_count(round(epochs[-1], 3), 'epoch')} of data")
    text = ", ".join(parts) + (f", {format_duration(seconds)} of training." if seconds else ".")
    sentences = [describe_change(run, name) for name in choose_headlines(run)]
    if run.best is not None:
        sentences.append(f"The best checkpoint is <b>{escape(run.best.format_text())}</b>.")
    return " ".join([escape(text), *sentences])


def choose_headlines(run: RunFiles) -> list[str]:
    """Return the names of the headline metrics: the validation metric and the training metric.

    A metric that the run does not have is left out.
    """
    name = find_headline(run.metric_names, run.record.get("algorithm"))
    evaluation = find_evaluation(name, run.metric_names)
    return [metric for metric in (evaluation, name) if metric is not None]


def describe_change(run: RunFiles, name: str) -> str:
    """Return a sentence with the first, last and best value of a metric, and the noise.

    The values are means over several steps.
    """
    steps, values = run.get_series(name)
    title = escape(find_title(name))
    title = title[0].upper() + title[1:]
    if len(values) == 1:
        return f"{title} is <b>{format_number(values[0])}</b>."
    rows = run.get_series(ROWS)[1]
    change = pace.compute_change(values, name, rows[-1] if rows else None)
    best, best_index = pace.find_best(name, values)
    return (
        f"{title} went from {format_number(change.first)} to <b>{format_number(change.last)}</b> "
        f"({escape(change.format_text())}); best "
        f"{format_number(best)} at step {format_number(steps[best_index])}."
    )


def render_status(status: str, *, is_flagged: bool = False) -> str:
    """Render a run's status; a mark shows that a metric is out of range (`is_flagged`)."""
    style = f"{status} flagged" if is_flagged else status
    return (
        f'<span class="status {escape(style)}">{escape(status)}{" !" if is_flagged else ""}</span>'
    )


def render_verdict(diagnosis: RunDiagnosis | None) -> str:
    """Render a diagnosis as a line at the top of the report; "" if `diagnosis` is None."""
    if diagnosis is None:
        return ""
    style, heading = ("fine", "Check") if diagnosis.is_sound else ("wrong", "Look at this")
    return f'<p class="diagnosis {style}"><b>{heading}:</b> {escape(diagnosis.summary)}</p>'


def format_count(value: float, noun: str) -> str:
    """Format a number with a noun in singular or plural, such as `1 step` or `2 steps`."""
    return f"{format_number(value)} {noun if value == 1 else f'{noun}s'}"


def render_tiles(run: RunFiles) -> str:
    """Render the most important numbers of the run, each in a tile."""
    return "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>'
        for name, value, note in _list_facts(run)
    )


def _list_facts(run: RunFiles) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, note) of each tile."""
    if not run.lines:
        return
    # Headline metrics and KL.
    for name in choose_headlines(run):
        _, values = run.get_series(name)
        best, _ = pace.find_best(name, values)
        yield (
            find_title(name),
            format_number(values[-1] if name.startswith(EVAL) else pace.compute_end_mean(values)),
            f"best {format_number(best)}",
        )
    kl = next((metric for metric in run.metric_names if get_last_part(metric) == "kl"), None)
    if kl is not None:
        _, values = run.get_series(kl)
        yield (
            "KL",
            format_number(pace.compute_end_mean(values)),
            f"highest {format_number(max(values))}",
        )
    # Progress and time.
    epochs = run.get_series("epoch")[1]
    yield (
        "steps",
        format_number(run.lines[-1]["step"]),
        format_count(round(epochs[-1], 3), "epoch") if epochs else "",
    )
    if seconds := run.get_series("step_seconds")[1]:
        yield (
            "training time",
            format_duration(sum(seconds)),
            f"{format_number(sum(seconds) / len(seconds))} s per step",
        )
    # Throughput and memory.
    names = []
    for name in run.metric_names:
        if get_last_part(name) in ("step_seconds", "num_tokens", "tokens_per_second"):
            names.append(name)
    measurements = (
        {name: line[name] for name in names if is_finite(line.get(name))} for line in run.lines
    )
    rates = [rate for line in measurements if (rate := compute_tokens_per_second(line))]
    if rates:
        yield (
            "tokens per second",
            format_number(round(sum(rates) / len(rates))),
            f"highest {format_number(round(max(rates)))}",
        )
    if memory := run.get_series("peak_memory_gb")[1]:
        yield "peak memory", f"{max(memory):.2f} GB", ""


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


def build_page(
    run: RunFiles,
    *,
    live: str = "",
    home: str = "#top",
    reader: ResultReader | None = None,
) -> Page:
    """Build the page of a run.

    If `live` is empty, the page never changes. Otherwise, `live` identifies this version of the
    page, and the page updates itself when the version changes. `home` is the target of the logo's
    link. `reader` reads the results of evaluations; if the caller keeps it, each file is read only
    once.
    """
    run_charts = charts.build_charts(run)
    headlines = choose_headlines(run)[:1]
    main_chart = next(
        (chart for chart in run_charts if any(line.name in headlines for line in chart.lines)), None
    )
    ordered_charts = ([main_chart] if main_chart else []) + [
        chart for chart in run_charts if chart is not main_chart
    ]
    completions_html, tokens = completions.render_completions(run) if run.samples else ("", [])
    spans = timing.SpansByStep.from_spans(run.spans)
    experiment, trial = run.title
    evaluations = render_evaluations([run.directory], reader or ResultReader())
    log = ""
    if run.log:
        lines = escape_text("\n".join(run.log))
        log = render_folded(
            f"The last {format_count(len(run.log), 'line')}",
            f'<pre class="log" tabindex="0" aria-label="log">{lines}</pre>',
            "log",
        )
    return Page(
        title=f"{experiment}/{trial}",
        top=_render_hero(run, main_chart),
        sections=[
            PageSection("curves", "Curves", render_curves(ordered_charts, 1 if main_chart else 0)),
            PageSection("evaluations", "Evaluations", evaluations),
            PageSection("filmstrip", "Fixed prompts", render_filmstrip(run.answers)),
            PageSection("completions", completions.choose_heading(run), completions_html),
            PageSection("time", "Time", _render_time(run, spans)),
            PageSection("plan", "Plan", plan_measured.render_run_plan(run, run.plan)),
            PageSection("machine", "Machine", _render_machine(run)),
            PageSection("graph", "Graph", _embed_graph(run.graph) if run.graph else ""),
            PageSection("configuration", "Configuration", configuration.render_configuration(run)),
            PageSection("log", "Log", log),
        ],
        footer=f"Built {time.strftime('%Y-%m-%d %H:%M')} from <code>{escape(str(run.directory))}</code>",
        data={
            **charts.build_page_data(ordered_charts, [run]),
            "tokens": tokens,
            "timeline": spans.build_data(),
        },
        live=live,
        home=home,
    )


def _render_hero(run: RunFiles, chart: Chart | None) -> str:
    """Render the first screen: summary, diagnosis, headline chart and tiles."""
    experiment, trial = run.title
    curve = charts.render_chart(chart, 0, large=True) if chart else ""
    tiles = render_tiles(run)
    diagnosis = run.diagnosis
    mark = render_status(run.status, is_flagged=diagnosis is not None and not diagnosis.is_sound)
    return (
        f'<section class="hero{"" if chart else " alone"}" id="top"><div class="intro">'
        f'<p class="eyebrow">{escape(experiment)}{mark}</p>'
        f'<h1>{escape(trial)}</h1><p class="lede">{render_lede(run)}</p>'
        f"{render_verdict(diagnosis)}</div>{curve}"
        f"{f'<dl class=tiles>{tiles}</dl>' if tiles else ''}</section>"
    )


def render_curves(run_charts: Sequence[Chart], skip: int) -> str:
    """Render all charts except the first `skip`. Less informative charts are shown after a click."""
    index_by_chart = {id(chart): index for index, chart in enumerate(run_charts)}
    informative, rest = charts.split_charts(run_charts[skip:])
    if not run_charts:
        return ""
    has_long_curve = any(len(line.x) >= 20 for chart in run_charts for line in chart.lines)
    more = f'<div class="charts">{"".join(charts.render_chart(chart, index_by_chart[id(chart)]) for chart in rest)}</div>'
    return (
        _render_controls(has_long_curve)
        + f'<div class="charts">{"".join(charts.render_chart(chart, index_by_chart[id(chart)]) for chart in informative)}</div>'
        + (render_folded(f"<b>{len(rest)}</b> more", more, "more curves") if rest else "")
    )


def _render_controls(has_long_curve: bool) -> str:
    """Render the controls for all curves: smoothing, x axis, log scale and reset.

    `has_long_curve` is True if a curve has many points; otherwise, smoothing is left out.
    """
    slider = (
        '<label class="smoothing">Smoothing <input id="smoothing" type="range" min="0" max="0.95" step="0.05" value="0.6">'
        "<output>0.60</output></label>"
    )
    return (
        f'<div class="tools axes js" hidden>{slider if has_long_curve else ""}'
        '<label>Across <select id="x"><option value="step">steps</option><option value="tokens">tokens</option>'
        '<option value="time">time</option></select></label>'
        '<label><input id="log-scale" type="checkbox"> log scale</label>'
        '<button type="button" id="reset" hidden>Show all</button>'
        '<span class="hint">Drag over a curve to zoom in; double click shows all.</span></div>'
    )


def _render_time(run: RunFiles, spans: timing.SpansByStep) -> str:
    shares = timing.render_shares(run) if timing.compute_shares(run) else ""
    gantt = timing.render_gantt(spans) if spans.by_step else ""
    parts = [f'<div class="card"><h3>Seconds of a step</h3>{shares}</div>' if shares else ""]
    parts.append(f'<div class="card wide"><h3>What ran when</h3>{gantt}</div>' if gantt else "")
    content = f'<div class="pair">{"".join(parts)}</div>' if shares or gantt else ""
    comparison = predicted.render_comparison(run)
    if comparison and run.plan is None:  # otherwise the plan shows it
        content += f'<div class="card"><h3>Predicted and measured</h3>{comparison}</div>'
    return content


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
    transparent = svg.replace("</svg>", "<style>.ground{fill:none}</style></svg>")
    images = []
    for kind in ("not all", "all"):
        image = transparent.replace(DARK, f"@media {kind}").encode("utf-8", errors="replace")
        images.append(f"data:image/svg+xml;base64,{base64.b64encode(image).decode()}")
    light, dark = images
    return (
        '<p class="note sideways">The graph is wider than this screen: scroll it sideways.</p>'
        '<div class="card graph" tabindex="0" role="region" aria-label="Dataflow graph, scrolls sideways">'
        f'<picture><source srcset="{dark}" media="(prefers-color-scheme: dark)"><img src="{light}" alt="{GRAPH_ALT}">'
        "</picture></div>"
    )


MIN_INTERVAL = 30.0  # minimum seconds between two reports
MIN_INTERVAL_FACTOR = 20.0  # minimum time between two reports, as a multiple of the build time
# Up to this size of the run's files, building a report takes less than 0.1 s, and the run does it.
MAX_BYTES_IN_PROCESS = 1_000_000
NICENESS = 10  # niceness of the process that builds the report


class ReportProcess(Protocol):
    """Interface of the process that builds a report; `subprocess.Popen` implements it."""

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


def start(directory: Path) -> ReportProcess:
    """Start a process that builds the report, and that Ctrl-C in the terminal does not reach."""
    command = [sys.executable, "-m", "weft.observe.report", str(directory)]
    null_device = subprocess.DEVNULL
    return subprocess.Popen(
        command, stdin=null_device, stdout=null_device, stderr=null_device, process_group=0
    )


class ReportRenewal:
    """Builder that keeps the report of one run up to date.

    A failed build does not stop the run. The first time that a build fails, `tell_user` is called
    with a message.
    """

    def __init__(
        self,
        directory: Path,
        tell_user: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        build: Callable[[Path, str | None], Any] = build_report,
        start: Callable[[Path], ReportProcess] = start,
    ) -> None:
        self._directory = directory
        self._tell_user = tell_user
        self._clock = clock
        self._build = build
        self._start = start
        self._process: ReportProcess | None = None
        self._build_start: float | None = None
        self._build_seconds = 0.0  # duration of the last build
        self._failure_reported = False

    def renew_if_due(self) -> None:
        """Build the report if the last build was long enough ago. Called after each step.

        The report of a large run is built in another process, and this method does not wait for it.
        """
        # Check a build in progress.
        if self._process is not None:
            exit_code = self._process.poll()
            if exit_code is None:
                # An upper bound, since a step can take longer than the build.
                self._build_seconds = self._clock() - (self._build_start or 0.0)
                return
            self._process = None
            if exit_code:
                self._report_failure(f"the process that builds it ended with exit code {exit_code}")
        # Wait if the last build was too recent.
        if self._build_start is not None and self._clock() - self._build_start < max(
            MIN_INTERVAL, MIN_INTERVAL_FACTOR * self._build_seconds
        ):
            return
        self._build_start = self._clock()
        files = [self._directory / name for name in (METRICS, SAMPLES, TIMELINE)]
        num_bytes = sum(file.stat().st_size for file in files if file.is_file())
        if num_bytes + count_result_bytes(self._directory) > MAX_BYTES_IN_PROCESS:
            self._process = self._start(self._directory)
            self._build_seconds = 0.0
        else:
            self._build_in_process(None)
            self._build_seconds = self._clock() - self._build_start

    def stop(self) -> None:
        """Kill the process of a build in progress. The previous report remains intact."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def finish(self, status: str) -> None:
        """Build the final report with `status`, the outcome of the run."""
        self.stop()
        self._build_in_process(status)

    def _build_in_process(self, status: str | None) -> None:
        with ThreadPoolExecutor(1) as pool:  # the future catches every exception
            error = pool.submit(self._build, self._directory, status).exception()
        if error is not None:
            self._report_failure(f"{type(error).__name__}: {error}")

    def _report_failure(self, reason: str) -> None:
        if not self._failure_reported:
            self._failure_reported = True
            self._tell_user(f"report.html could not be built ({reason}); the run is not affected")


def main(arguments: Sequence[str]) -> int:
    """Build the report of the run `arguments[0]` at low priority.

    Called by `python -m weft.observe.report RUN_DIR`.
    """
    os.nice(NICENESS)
    build_report(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
