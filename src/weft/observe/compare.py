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
MOST = len(HUES)
Names = list[str | None]  # a measure's name in each run; None if the run does not have it
APART = (
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
    if not 2 <= len(runs) <= MOST:
        raise ConfigError(f"{len(runs)} runs: a comparison takes 2 to {MOST}")
    # Build the charts; the one of the deciding metric comes first.
    listed = name_runs(runs)
    measures = list_measures(listed)
    measure_charts = build_comparison_charts(listed, measures)
    main = find_deciding_metric(listed)
    hero = next(
        (
            chart
            for chart in measure_charts
            if main and any(line.name in main for line in chart.lines)
        ),
        None,
    )
    drawn = ([hero] if hero else []) + [chart for chart in measure_charts if chart is not hero]
    # Assemble the page.
    folders = [run.directory for run in runs]
    evaluations = render_evaluations(folders, reader or ResultReader())
    answers_html, tokens = render_answers([(each.label, each.hue, each.run) for each in listed])
    return Page(
        title=" · ".join(each.label for each in listed),
        top=_render_top(listed, hero),
        sections=[
            PageSection("settings", "What differs", _render_settings(listed)),
            PageSection("metrics", "Metrics", _render_metrics(listed, measures)),
            PageSection(
                "curves",
                "Curves",
                (APART if _has_split_measure(measure_charts) else "")
                + render_curves(drawn, 1 if hero else 0),
            ),
            PageSection("evaluations", "Evaluations", evaluations),
            PageSection("answers", "Answers to the same prompts", answers_html),
        ],
        footer=f"Built {time.strftime('%Y-%m-%d %H:%M')} from "
        + ", ".join(f"<code>{escape(str(each.run.directory))}</code>" for each in listed),
        data={**charts.build_page_data(drawn, runs), "tokens": tokens},
        live=live,
        home=home,
    )


# -- the first screen


def _render_top(listed: Sequence[NamedRun], hero: Chart | None) -> str:
    curve = charts.render_chart(hero, 0, large=True) if hero else ""
    cards = "".join(_render_card(each, listed) for each in listed)
    return (
        f'<section class="hero{"" if hero else " alone"}" id="top"><div class="intro"><p class="eyebrow">'
        f"{len(listed)} runs compared</p><h1>{' <small>and</small> '.join(escape(each.label) for each in listed)}</h1>"
        f'<p class="lede">{write_verdict(listed)}</p></div>{curve}<ul class="versus wide">{cards}</ul></section>'
    )


def _render_card(each: NamedRun, listed: Sequence[NamedRun]) -> str:
    run = each.run
    facts = []
    decider = find_deciding_metric(listed)
    if run.lines:
        facts.append(format_count(run.lines[-1]["step"], "step"))
    if epochs := run.get_series("epoch")[1]:
        facts.append(format_count(round(epochs[-1], 3), "epoch"))
    if seconds := run.get_series("step_seconds")[1]:
        facts.append(format_duration(sum(seconds)))
    if decider:
        own: str | None = decider[list(listed).index(each)]
    else:
        own = find_headline(run.metric_names, run.record.get("algorithm"))
    reached = ""
    if own and (values := run.get_series(own)[1]):
        good, _ = pace.find_best(own, values)
        last = format_number(compute_final_value(run, own))
        best = format_number(good)
        reached = f"<div>{escape(find_title(own))} {last}, best {best}</div>"
    diagnosis = run.diagnosis
    if diagnosis is not None and not diagnosis.is_sound:
        doubts = f'<p class="diagnosis wrong">{escape(diagnosis.summary)}</p>'
    else:
        doubts = ""
    return (
        f'<li><h3><i class="pick" style="{charts.format_hue(each.hue)}"></i>{escape(each.label)} '
        f"{render_status(run.status, flagged=bool(doubts))}</h3>"
        f"<div>{escape(configuration.find_algorithm(run) or '')} "
        f"{', '.join(facts)}</div>{reached}{doubts}</li>"
    )


# -- what differs


def _render_settings(listed: Sequence[NamedRun]) -> str:
    runs = [each.run for each in listed]
    rows = []
    for name, values in find_differences(runs).items():
        rows.append((name, [configuration.format_briefly(value) for value in values]))
    rows += find_version_differences(runs)
    if not rows:
        return '<div class="card"><p>Their configurations are the same.</p></div>'
    if (
        any(name.startswith(f"{mark}.") for name, _ in rows for mark in ALGORITHMS)
        and len(rows) > 40
    ):
        return _render_table(listed, rows[:40]) + render_folded(
            f"{len(rows) - 40} more", _render_table(listed, rows[40:]), "more settings"
        )
    return _render_table(listed, rows)


def _render_table(listed: Sequence[NamedRun], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    body = ""
    for name, values in rows:
        # On narrow screens, each cell shows the name of its run.
        cells = "".join(
            f'<td data-run="{escape(each.label_with_status)}">{escape_text(value)}</td>'
            for each, value in zip(listed, values, strict=True)
        )
        body += f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'
    return (
        '<div class="card scroll"><table class="settings side"><thead><tr><th scope="col">option</th>'
        f"{_render_heads(listed)}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _render_heads(listed: Sequence[NamedRun]) -> str:
    return "".join(
        f'<th scope="col"><i class="pick" style="{charts.format_hue(each.hue)}"></i>{escape(each.label_with_status)}</th>'
        for each in listed
    )


# -- numbers and curves


def _render_metrics(listed: Sequence[NamedRun], measures: Sequence[Names]) -> str:
    rows = list(_render_metric_rows(listed, measures))
    if not rows:
        return ""
    telling = [row for known, row in rows if known]
    rest = [row for known, row in rows if not known]
    if rest:
        more = render_folded(
            f"<b>{len(rest)}</b> more", _render_numbers(listed, rest), "more metrics"
        )
    else:
        more = ""
    at = format_step(listed, find_common_step([each.run for each in listed]))
    note = (
        (f'<p class="note">{at} means' if at else '<p class="note">Means')
        + " over the last steps, and the last evaluations; ✓ marks the best where better is known.</p>"
    )
    return note + _render_numbers(listed, telling or rest) + (more if telling else "")


def _render_metric_rows(
    listed: Sequence[NamedRun], measures: Sequence[Names]
) -> Iterator[tuple[bool, str]]:
    """Yield a pair for each measure: whether its row is visible without a click, and its HTML."""
    runs = [each.run for each in listed]
    step = find_common_step(runs)
    # Runs with a reward are compared by the reward, so their best loss is not marked.
    has_reward = any(get_last_part(name) == REWARD for run in runs for name in run.metric_names)
    for names in measures:
        values = []
        for run, name in zip(runs, names, strict=True):
            values.append(compute_final_value(run, name, step) if name else None)
        first = next(name for name in names if name)
        known = [value for value in values if value is not None]
        if is_policy_loss(runs, [first]) or (get_last_part(first).endswith("loss") and has_reward):
            direction = 0
        else:
            direction = get_direction(first)
        if direction and len(known) > 1:
            top = max(known, key=lambda value: direction * value)
        else:
            top = None
        cells = "".join(_render_cell(value, top) for value in values)
        about = find(first)
        if about and about.unit:
            unit = f' <span class="quiet">{escape(about.unit)}</span>'
        else:
            unit = ""
        head = f'<th scope="row">{escape(_build_label(first))}{unit}</th>'
        row = f'<tr title="{escape(about.what if about else "")}">{head}{cells}</tr>'
        yield compute_rank(first)[0] < compute_rank("unknown")[0], row


def _render_cell(value: float | None, top: float | None) -> str:
    if value is None:
        return '<td class="quiet">–</td>'
    better = top is not None and is_close(value, top)
    if better:
        return f'<td class="better">{format_number(value)} ✓</td>'
    return f"<td>{format_number(value)}</td>"


def list_measures(listed: Sequence[NamedRun]) -> list[Names]:
    """Return the metrics to compare. Each is a list that contains the metric's name in every run.

    The most informative metrics come first. The name is None in runs without the metric. A metric
    is left out if it has the same values as a more informative one in every run. Metrics with the
    same name are listed separately if they mean different things, such as the losses of two
    algorithms.
    """
    # Match metrics across runs by key and meaning.
    names_by_key: dict[tuple[Any, ...], Names] = {}
    for place, each in enumerate(listed):
        for name in each.run.metric_names:
            if name in COUNTERS or name.startswith(PREDICTED):
                continue
            key = (_build_measure_key(name), tuple(find_defining_options(each.run, name).items()))
            names = names_by_key.setdefault(key, [None] * len(listed))
            names[place] = names[place] or name
    ordered = sorted(
        names_by_key.values(), key=lambda names: compute_rank(next(name for name in names if name))
    )
    # Drop measures that repeat another one of the same node.
    measures: list[Names] = []
    curves = SeriesIndex[tuple[int, str]]()  # by run and node
    for names in ordered:
        called = [(place, name) for place, name in enumerate(names) if name]
        place, name = called[0]
        alike = curves.find_equal((place, find_node(name)), listed[place].run.get_series(name))
        if any(_is_repeat(listed, names, measures[number]) for number in alike):
            continue
        for place, name in called:
            curves.add((place, find_node(name)), listed[place].run.get_series(name), len(measures))
        measures.append(names)
    return measures


def _has_split_measure(drawn: Sequence[Chart]) -> bool:
    """Return whether two of the charts show the same quantity for different runs.

    This is the case if they have the same title but no run in common.
    """
    runs_by_title: dict[str, list[set[int]]] = {}
    for chart in drawn:
        runs_by_title.setdefault(chart.title, []).append({line.run for line in chart.lines})
    return any(
        one.isdisjoint(other)
        for runs in runs_by_title.values()
        for one, other in itertools.combinations(runs, 2)
    )


def _is_repeat(
    listed: Sequence[NamedRun], names: Sequence[str | None], other: Sequence[str | None]
) -> bool:
    """Return whether a measure has the same values as another one in every run that reports it.

    For example, `value_loss` can repeat `loss` of the same node. `names` has the measure's name in
    each run, and `other` the name of the measure that it may repeat. A name is None if the run does
    not have the measure.
    """
    for each, name, before in zip(listed, names, other, strict=True):
        if name is None:
            continue
        if before is None or find_node(name) != find_node(before):
            return False
        values = each.run.get_series(name)
        if not (is_changing(values[1]) and is_same_series(values, each.run.get_series(before))):
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


def _render_numbers(listed: Sequence[NamedRun], rows: Sequence[str]) -> str:
    return (
        '<div class="card scroll"><table class="settings numbers"><thead><tr>'
        f'<th scope="col">metric</th>{_render_heads(listed)}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def build_comparison_charts(listed: Sequence[NamedRun], measures: Sequence[Names]) -> list[Chart]:
    """Return a chart for each measure, with one line for each run that has the measure."""
    measure_charts: list[Chart] = []
    most = charts.compute_points_per_line(len(measures) * len(listed))
    for names in measures:
        first = next(name for name in names if name)
        lines = []
        for place, (each, name) in enumerate(zip(listed, names, strict=True)):
            if name:
                lines.append(
                    ChartLine(
                        name,
                        each.label_with_status,
                        each.hue,
                        *charts.thin_series(*each.run.get_series(name), most),
                        run=place,
                    )
                )
        missing = sum(
            each.run.count_not_finite(name)
            for each, name in zip(listed, names, strict=True)
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
