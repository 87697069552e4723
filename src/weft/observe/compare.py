"""Page that compares several runs: the better run, differing options, curves and answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.observe import charts, configuration, pace
from weft.observe.charts import Chart, ChartLine
from weft.observe.completions import render_answers
from weft.observe.diagnosis import ALGORITHMS
from weft.observe.differences import (
    find_defining_options,
    find_differences,
    find_version_differences,
)
from weft.observe.eval_files import ResultReader
from weft.observe.eval_html import render_evaluations
from weft.observe.metric_help import find
from weft.observe.metrics import (
    COUNTERS,
    EVAL,
    PREDICTED,
    TIME,
    SeriesIndex,
    compute_rank,
    find_headline,
    find_node,
    find_title,
    format_duration,
    format_number,
    get_direction,
    get_last_part,
    is_changing,
    is_same_series,
    split_metric_name,
)
from weft.observe.page import HUES, Page, PageSection, escape_text, render_folded, write
from weft.observe.report import format_count, render_curves, render_status
from weft.observe.run_files import RunFiles
from weft.observe.verdict import (
    REWARD,
    NamedRun,
    compute_final_value,
    find_common_step,
    find_deciding_metric,
    format_step,
    is_close,
    is_policy_loss,
    name_runs,
    write_verdict,
)

NAME = "compare.html"
MAX_RUNS = len(HUES)
MeasureNames = list[str | None]  # name of a measure in each run; None for runs without it
SPLIT_NOTE = (
    '<p class="note">A metric has several charts if its meaning differs between the runs, such as the losses of two '
    "algorithms or rewards from two sources.</p>"
)


def build_comparison(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write a page that compares the runs, and return its path.

    The page is written to `path`. Raises `UserError` if a directory is not a run.
    """
    runs = [RunFiles.read(directory) for directory in run_dirs]
    return write(path, build_page(runs).render())


def build_page(
    runs: Sequence[RunFiles],
    *,
    live: str = "",
    home: str = "#top",
    reader: ResultReader | None = None,
) -> Page:
    """Build the page that compares `runs`; see `report.build_page` for the other arguments.

    Raises `ConfigError` if there are fewer than two runs or more runs than colours.
    """
    if not 2 <= len(runs) <= MAX_RUNS:
        raise ConfigError(f"{len(runs)} runs: a comparison takes 2 to {MAX_RUNS}")
    # Build the charts; the one of the deciding metric comes first.
    named_runs = name_runs(runs)
    measures = list_measures(named_runs)
    measure_charts = build_comparison_charts(named_runs, measures)
    deciding_names = find_deciding_metric(named_runs)
    main_chart = next(
        (
            chart
            for chart in measure_charts
            if deciding_names and any(line.name in deciding_names for line in chart.lines)
        ),
        None,
    )
    ordered_charts = ([main_chart] if main_chart else []) + [
        chart for chart in measure_charts if chart is not main_chart
    ]
    # Assemble the page.
    folders = [run.directory for run in runs]
    evaluations = render_evaluations(folders, reader or ResultReader())
    answers_html, tokens = render_answers(
        [(named_run.label, named_run.hue, named_run.run) for named_run in named_runs]
    )
    return Page(
        title=" · ".join(named_run.label for named_run in named_runs),
        top=_render_top(named_runs, main_chart),
        sections=[
            PageSection("settings", "What differs", _render_settings(named_runs)),
            PageSection("metrics", "Metrics", _render_metrics(named_runs, measures)),
            PageSection(
                "curves",
                "Curves",
                (SPLIT_NOTE if _has_split_measure(measure_charts) else "")
                + render_curves(ordered_charts, 1 if main_chart else 0),
            ),
            PageSection("evaluations", "Evaluations", evaluations),
            PageSection("answers", "Answers to the same prompts", answers_html),
        ],
        footer=f"Built {time.strftime('%Y-%m-%d %H:%M')} from "
        + ", ".join(
            f"<code>{escape(str(named_run.run.directory))}</code>" for named_run in named_runs
        ),
        data={**charts.build_page_data(ordered_charts, runs), "tokens": tokens},
        live=live,
        home=home,
    )


# -- the first screen


def _render_top(named_runs: Sequence[NamedRun], main_chart: Chart | None) -> str:
    curve = charts.render_chart(main_chart, 0, large=True) if main_chart else ""
    labels = [escape(named_run.label) for named_run in named_runs]
    cards = "".join(_render_card(named_run, named_runs) for named_run in named_runs)
    return (
        f'<section class="hero{"" if main_chart else " alone"}" id="top"><div class="intro"><p class="eyebrow">'
        f"{len(named_runs)} runs compared</p><h1>{' <small>and</small> '.join(labels)}</h1>"
        f'<p class="lede">{write_verdict(named_runs)}</p></div>{curve}<ul class="versus wide">{cards}</ul></section>'
    )


def _render_card(named_run: NamedRun, named_runs: Sequence[NamedRun]) -> str:
    """Render the progress, the headline metric and the status of one run as a list item."""
    run = named_run.run
    facts = []
    deciding_names = find_deciding_metric(named_runs)
    if run.lines:
        facts.append(format_count(run.lines[-1]["step"], "step"))
    if epochs := run.get_series("epoch")[1]:
        facts.append(format_count(round(epochs[-1], 3), "epoch"))
    if seconds := run.get_series("step_seconds")[1]:
        facts.append(format_duration(sum(seconds)))
    if deciding_names:
        metric: str | None = deciding_names[list(named_runs).index(named_run)]
    else:
        metric = find_headline(run.metric_names, run.record.get("algorithm"))
    reached = ""
    if metric and (values := run.get_series(metric)[1]):
        best_value, _ = pace.find_best(metric, values)
        final_text = format_number(compute_final_value(run, metric))
        best_text = format_number(best_value)
        reached = f"<div>{escape(find_title(metric))} {final_text}, best {best_text}</div>"
    diagnosis = run.diagnosis
    if diagnosis is not None and not diagnosis.is_sound:
        doubts = f'<p class="diagnosis wrong">{escape(diagnosis.summary)}</p>'
    else:
        doubts = ""
    return (
        f'<li><h3><i class="pick" style="{charts.format_hue(named_run.hue)}"></i>{escape(named_run.label)} '
        f"{render_status(run.status, is_flagged=bool(doubts))}</h3>"
        f"<div>{escape(configuration.find_algorithm(run) or '')} "
        f"{', '.join(facts)}</div>{reached}{doubts}</li>"
    )


# -- differing options


def _render_settings(named_runs: Sequence[NamedRun]) -> str:
    """Render a table of the differing options.

    The rows after the 40th are folded if options of an algorithm are among them.
    """
    runs = [named_run.run for named_run in named_runs]
    rows = []
    for name, values in find_differences(runs).items():
        rows.append((name, [configuration.format_briefly(value) for value in values]))
    rows += find_version_differences(runs)
    if not rows:
        return '<div class="card"><p>Their configurations are the same.</p></div>'
    if (
        any(name.startswith(f"{algorithm}.") for name, _ in rows for algorithm in ALGORITHMS)
        and len(rows) > 40
    ):
        return _render_table(named_runs, rows[:40]) + render_folded(
            f"{len(rows) - 40} more", _render_table(named_runs, rows[40:]), "more settings"
        )
    return _render_table(named_runs, rows)


def _render_table(named_runs: Sequence[NamedRun], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Render a table with a column for each run; `rows` has (option, one value per run)."""
    body = ""
    for name, values in rows:
        # On narrow screens, each cell shows the name of its run.
        cells = "".join(
            f'<td data-run="{escape(named_run.label_with_status)}">{escape_text(value)}</td>'
            for named_run, value in zip(named_runs, values, strict=True)
        )
        body += f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'
    return (
        '<div class="card scroll"><table class="settings side"><thead><tr><th scope="col">option</th>'
        f"{_render_heads(named_runs)}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _render_heads(named_runs: Sequence[NamedRun]) -> str:
    return "".join(
        f'<th scope="col"><i class="pick" style="{charts.format_hue(named_run.hue)}"></i>'
        f"{escape(named_run.label_with_status)}</th>"
        for named_run in named_runs
    )


# -- numbers and curves


def _render_metrics(named_runs: Sequence[NamedRun], measures: Sequence[MeasureNames]) -> str:
    """Render a table of the measures; less informative ones are folded."""
    rows = list(_render_metric_rows(named_runs, measures))
    if not rows:
        return ""
    informative = [row for is_visible, row in rows if is_visible]
    rest = [row for is_visible, row in rows if not is_visible]
    if rest:
        more = render_folded(
            f"<b>{len(rest)}</b> more", _render_numbers(named_runs, rest), "more metrics"
        )
    else:
        more = ""
    step_text = format_step(
        named_runs, find_common_step([named_run.run for named_run in named_runs])
    )
    note = (
        (f'<p class="note">{step_text} means' if step_text else '<p class="note">Means')
        + " over the last steps, and the last evaluations; ✓ marks the best where better is known.</p>"
    )
    return note + _render_numbers(named_runs, informative or rest) + (more if informative else "")


def _render_metric_rows(
    named_runs: Sequence[NamedRun], measures: Sequence[MeasureNames]
) -> Iterator[tuple[bool, str]]:
    """Yield (True if the row is visible without a click, HTML of the row) for each measure."""
    runs = [named_run.run for named_run in named_runs]
    step = find_common_step(runs)
    # If any run has a reward, the runs are compared by the reward: no best loss is marked.
    has_reward = any(get_last_part(name) == REWARD for run in runs for name in run.metric_names)
    for names in measures:
        values = []
        for run, name in zip(runs, names, strict=True):
            values.append(compute_final_value(run, name, step) if name else None)
        first = next(name for name in names if name)
        known_values = [value for value in values if value is not None]
        if is_policy_loss(runs, [first]) or (get_last_part(first).endswith("loss") and has_reward):
            direction = 0
        else:
            direction = get_direction(first)
        if direction and len(known_values) > 1:
            best = max(known_values, key=lambda value: direction * value)
        else:
            best = None
        cells = "".join(_render_cell(value, best) for value in values)
        metric_help = find(first)
        if metric_help and metric_help.unit:
            unit = f' <span class="quiet">{escape(metric_help.unit)}</span>'
        else:
            unit = ""
        head = f'<th scope="row">{escape(_build_label(first))}{unit}</th>'
        row = f'<tr title="{escape(metric_help.what if metric_help else "")}">{head}{cells}</tr>'
        yield compute_rank(first)[0] < compute_rank("unknown")[0], row


def _render_cell(value: float | None, best: float | None) -> str:
    if value is None:
        return '<td class="quiet">–</td>'
    better = best is not None and is_close(value, best)
    if better:
        return f'<td class="better">{format_number(value)} ✓</td>'
    return f"<td>{format_number(value)}</td>"


def list_measures(named_runs: Sequence[NamedRun]) -> list[MeasureNames]:
    """Return the metrics to compare, each as a list of the metric's name in every run.

    The name is None for runs without the metric. The most informative metrics come first. A metric
    is left out if it has the same values as a more informative one in every run. Metrics with the
    same name are listed separately if they mean different things, such as the losses of two
    algorithms.
    """
    # Match metrics across runs by key and meaning.
    names_by_key: dict[tuple[Any, ...], MeasureNames] = {}
    for run_index, named_run in enumerate(named_runs):
        for name in named_run.run.metric_names:
            if name in COUNTERS or name.startswith(PREDICTED):
                continue
            key = (
                _build_measure_key(name),
                tuple(find_defining_options(named_run.run, name).items()),
            )
            names = names_by_key.setdefault(key, [None] * len(named_runs))
            names[run_index] = names[run_index] or name
    ordered = sorted(
        names_by_key.values(), key=lambda names: compute_rank(next(name for name in names if name))
    )
    # Drop measures that repeat another one of the same node.
    measures: list[MeasureNames] = []
    curves = SeriesIndex[tuple[int, str]]()  # by run and node
    for names in ordered:
        present = [(run_index, name) for run_index, name in enumerate(names) if name]
        run_index, name = present[0]
        equal_measures = curves.find_equal(
            (run_index, find_node(name)), named_runs[run_index].run.get_series(name)
        )
        if any(
            _is_repeat(named_runs, names, measures[measure_index])
            for measure_index in equal_measures
        ):
            continue
        for run_index, name in present:
            curves.add(
                (run_index, find_node(name)),
                named_runs[run_index].run.get_series(name),
                len(measures),
            )
        measures.append(names)
    return measures


def _has_split_measure(charts_shown: Sequence[Chart]) -> bool:
    """Return whether two of the charts show the same quantity for different runs.

    This is the case if they have the same title but no run in common.
    """
    runs_by_title: dict[str, list[set[int]]] = {}
    for chart in charts_shown:
        runs_by_title.setdefault(chart.title, []).append({line.run for line in chart.lines})
    return any(
        run_ids.isdisjoint(other_ids)
        for runs in runs_by_title.values()
        for run_ids, other_ids in itertools.combinations(runs, 2)
    )


def _is_repeat(
    named_runs: Sequence[NamedRun], names: Sequence[str | None], other: Sequence[str | None]
) -> bool:
    """Return whether a measure has the same values as another one in every run that reports it.

    For example, `value_loss` can repeat `loss` of the same node. `names` has the measure's name in
    each run, and `other` the name of the measure that it may repeat. A name is None if the run does
    not have the measure.
    """
    for named_run, name, other_name in zip(named_runs, names, other, strict=True):
        if name is None:
            continue
        if other_name is None or find_node(name) != find_node(other_name):
            return False
        values = named_run.run.get_series(name)
        if not (
            is_changing(values[1]) and is_same_series(values, named_run.run.get_series(other_name))
        ):
            return False
    return True


def _build_measure_key(name: str) -> tuple[Any, ...]:
    """Return the key by which a metric is matched across runs.

    The key contains the measure, and also the node if the measure's meaning depends on the node.
    """
    node, measure = split_metric_name(name)
    last = get_last_part(name)
    if name.startswith((EVAL, TIME)):
        return (name,)
    return (node, name) if _differs_by_node(name) else (measure, last)


def _differs_by_node(name: str) -> bool:
    """Return whether metrics with this name have a different meaning for each node."""
    return get_last_part(name) in (
        "loss",
        "grad_norm",
        "learning_rate",
        "num_tokens",
        "tokens_per_second",
        "mfu",
        "peak_bytes",
        "num_weight_bytes",
    )


def _build_title(name: str) -> str:
    """Return the title of the chart that compares a metric across the runs."""
    if name.startswith(TIME):
        return f"seconds of {name.removeprefix(TIME)}"
    if name.startswith(EVAL):
        return f"eval {name.removeprefix(EVAL).replace('/', ' ').replace('_', ' ')}"
    return charts.find_heading(name.partition("/")[2] if "/" in name else name)


def _build_label(name: str) -> str:
    """Return a metric's label in the table. For metrics such as `loss`, it includes the node."""
    if _differs_by_node(name) and "/" in name:
        return f"{_build_title(name)}, {name.partition('/')[0]}"
    return _build_title(name)


def _render_numbers(named_runs: Sequence[NamedRun], rows: Sequence[str]) -> str:
    return (
        '<div class="card scroll"><table class="settings numbers"><thead><tr>'
        f'<th scope="col">metric</th>{_render_heads(named_runs)}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def build_comparison_charts(
    named_runs: Sequence[NamedRun], measures: Sequence[MeasureNames]
) -> list[Chart]:
    """Return a chart for each measure, with one line for each run that has the measure."""
    measure_charts: list[Chart] = []
    max_points = charts.compute_points_per_line(len(measures) * len(named_runs))
    for names in measures:
        first = next(name for name in names if name)
        lines = []
        for run_index, (named_run, name) in enumerate(zip(named_runs, names, strict=True)):
            if name:
                lines.append(
                    ChartLine(
                        name,
                        named_run.label_with_status,
                        named_run.hue,
                        *charts.thin_series(*named_run.run.get_series(name), max_points),
                        run=run_index,
                    )
                )
        missing = sum(
            named_run.run.count_not_finite(name)
            for named_run, name in zip(named_runs, names, strict=True)
            if name
        )
        measure_charts.append(
            Chart(
                _build_title(first),
                first.partition("/")[0] if "/" in first else "run",
                lines,
                missing,
                of_runs=True,
            )
        )
    return measure_charts
