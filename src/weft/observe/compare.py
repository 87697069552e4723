"""Page that compares several runs: the better run, differing options, curves and answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.observe import charts, configuration, pace
from weft.observe.charts import Chart, ChartLine
from weft.observe.completions import render_answers
from weft.observe.diagnosis import ALGORITHMS, POLICIES
from weft.observe.differences import (
    ALGORITHM,
    SOURCES,
    find_defining_options,
    find_differences,
    find_incomparable_options,
    find_version_differences,
)
from weft.observe.eval_files import ResultReader
from weft.observe.eval_html import render_evaluations
from weft.observe.metric_help import find
from weft.observe.metrics import (
    COUNTERS,
    EVAL,
    PREDICTED,
    ROWS,
    TIME,
    SeriesIndex,
    compute_rank,
    find_evaluation,
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
from weft.observe.page import HUES, ColourPair, Page, PageSection, escape_text, render_folded, write
from weft.observe.report import format_count, render_curves, render_status
from weft.observe.run_files import RunFiles

NAME = "compare.html"
MOST = len(HUES)
REWARD = "reward"
CLOSE = 0.01  # relative difference up to which two values count as equal
RUNNING = "running"  # status of a run in progress
Names = list[str | None]  # a measure's name in each run; None if the run does not have it
APART = (
    '<p class="note">A metric has several charts if its meaning differs between the runs, such as the losses of two '
    "algorithms or rewards from two sources.</p>"
)


@dataclass(frozen=True)
class NamedRun:
    """Run with its name and colour on the page."""

    run: RunFiles
    label: str
    hue: ColourPair

    @property
    def label_with_status(self) -> str:
        """Name of the run, followed by `(running)` if the run is still in progress."""
        if self.run.status == RUNNING:
            return f"{self.label} ({RUNNING})"
        return self.label


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
    measures = _list_measures(listed)
    measure_charts = _build_charts(listed, measures)
    main = _find_deciding_metric(listed)
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


def name_runs(runs: Sequence[RunFiles]) -> list[NamedRun]:
    """Return the runs, each with a name and a colour for the page.

    The name is `TRIAL` if it differs between all runs, else `EXPERIMENT/TRIAL`, else the last two
    folders of the path, else the whole path.
    """
    titles = [run.title for run in runs]
    ways = (
        [trial for _, trial in titles],
        [f"{experiment}/{trial}" for experiment, trial in titles],
        ["/".join(run.directory.absolute().parts[-2:]) for run in runs],
        [str(run.directory) for run in runs],
    )
    labels = next((way for way in ways if len(set(way)) == len(runs)), ways[-1])
    return [NamedRun(run, label, hue) for run, label, hue in zip(runs, labels, HUES, strict=False)]


def find_common_step(runs: Sequence[RunFiles]) -> float | None:
    """Return the last step that all runs have completed; None if any run has no completed step."""
    if not all(run.lines for run in runs):
        return None
    return min(float(run.lines[-1]["step"]) for run in runs)


def read_values_until(run: RunFiles, name: str, step: float | None) -> list[float]:
    """Return the values of a metric up to `step`; all of them if `step` is None."""
    steps, values = run.get_series(name)
    if step is None or not steps or max(steps) <= step:
        return list(values)
    values_until: list[float] = []
    for at, value in zip(steps, values, strict=True):
        if at <= step:
            values_until.append(value)
    return values_until


def compute_final_value(run: RunFiles, name: str, step: float | None = None) -> float | None:
    """Return a metric's value at `step`, or at the run's end; None if the run has no value.

    For an evaluation metric, this is the last value up to `step`. For a training metric, it is the
    mean over the last steps up to `step`.
    """
    values = read_values_until(run, name, step)
    if not values:
        return None
    return values[-1] if name.startswith(EVAL) else pace.compute_end_mean(values)


def _find_deciding_metric(listed: Sequence[NamedRun]) -> list[str] | None:
    """Return the names, one per run, of the metric that decides which run is better.

    The names can begin with different graph nodes. Returns None if no metric can be compared.
    """
    names = _find_headline_metric(listed)
    runs = [each.run for each in listed]
    if names is None or _is_policy_loss(runs, names) or find_incomparable_options(runs, names):
        return None
    return names


def _find_headline_metric(listed: Sequence[NamedRun]) -> list[str] | None:
    """Return the headline metric's name in each run, or None if the runs do not share one.

    Metrics of different graph nodes count as the same metric if the rest of their names is equal. A
    validation metric is chosen if all runs have it and its values are comparable.
    """
    runs = [each.run for each in listed]
    own = [find_headline(run.metric_names, run.record.get("algorithm")) for run in runs]
    valid = [find_evaluation(name, run.metric_names) for name, run in zip(own, runs, strict=True)]
    for candidates in (valid, own):
        names = [name for name in candidates if name is not None]
        if (
            len(names) == len(runs)
            and len({get_last_part(name) for name in names}) == 1
            and not find_incomparable_options(runs, names)
        ):
            return names
    names = [name for name in own if name is not None]
    if len(names) == len(runs) and len({get_last_part(name) for name in names}) == 1:
        return names
    return None


def _is_policy_loss(runs: Sequence[RunFiles], names: Sequence[str]) -> bool:
    """Return whether a metric is a policy's loss, which does not measure the model's quality.

    `names` are the metric's names, which can differ between runs.
    """
    policy = any(configuration.find_algorithm(run) in POLICIES for run in runs)
    return policy and any(get_last_part(name).endswith("loss") for name in names)


# -- the first screen


def _render_top(listed: Sequence[NamedRun], hero: Chart | None) -> str:
    curve = charts.render_chart(hero, 0, large=True) if hero else ""
    cards = "".join(_render_card(each, listed) for each in listed)
    return (
        f'<section class="hero{"" if hero else " alone"}" id="top"><div class="intro"><p class="eyebrow">'
        f"{len(listed)} runs compared</p><h1>{' <small>and</small> '.join(escape(each.label) for each in listed)}</h1>"
        f'<p class="lede">{write_verdict(listed)}</p></div>{curve}<ul class="versus wide">{cards}</ul></section>'
    )


def write_verdict(listed: Sequence[NamedRun]) -> str:
    """Return one or two sentences that say which run is better, or why this is unknown."""
    # Without a common headline metric, or with one that cannot be compared, no run is better.
    runs = [each.run for each in listed]
    names = _find_headline_metric(listed)
    if names is None:
        own = []
        for each in listed:
            own.append(
                (each, find_headline(each.run.metric_names, each.run.record.get("algorithm")))
            )
        headlines = ", ".join(
            f"{escape(each.label)} has {escape(find_title(name))}" for each, name in own if name
        )
        judged = f" Each has a different headline metric: {headlines}." if headlines else ""
        return f"These runs have no common metric that decides which of them is better.{judged}"
    if _find_deciding_metric(listed) is None:
        return f"{_explain_refusal(runs, names)} {_describe_differences(listed)}"
    # Values at the last step that all runs have completed.
    step = find_common_step(runs)
    name = names[0]
    final_values = []
    for run, metric, one in zip(runs, names, listed, strict=True):
        final_values.append((compute_final_value(run, metric, step), one))
    known = [(value, one) for value, one in final_values if value is not None]
    if len(known) < len(listed):
        return f"Not every run has measured its {escape(find_title(name))} by step {format_number(step)}."
    # Sort by value and compare the difference with the noise.
    way = get_direction(name) or 1
    (first, winner), *others = sorted(known, key=lambda pair: -way * pair[0])
    what = escape(find_title(name))
    at = _format_step(listed, step)
    width = _compute_difference_noise(runs, names, step)
    if all(is_close(first, value) or abs(first - value) <= width for value, _ in others):
        values = ", ".join(
            f"{format_number(value)} ({escape(one.label_with_status)})" for value, one in known
        )
        noise = f" within noise (± {pace.format_noise(width)})" if width else ""
        return (
            f"{at} the runs are" if at else "The runs ended"
        ) + f" alike{noise} in their {what}: {values}."
    rest = ", ".join(
        f"{format_number(value)} ({escape(one.label_with_status)})" for value, one in others
    )
    word = "higher" if way > 0 else "lower"
    better = f"<b>{escape(winner.label_with_status)}</b>"
    verb = f"{at} {better} has" if at else f"{better} ended with"
    noise = f", with a noise of ± {pace.format_noise(width)}" if width else ""
    result = f"{verb} the {word} {what}: <b>{format_number(first)}</b> against {rest}{noise}."
    return f"{result}{_write_doubts(winner)} {_describe_differences(listed)}"


def _write_doubts(winner: NamedRun) -> str:
    """Return a warning if the better run has a metric that is out of range; "" otherwise."""
    diagnosis = winner.run.diagnosis
    if diagnosis is None or diagnosis.is_sound:
        return ""
    return f" But check {escape(winner.label)}: some of its metrics are out of range."


def _format_step(listed: Sequence[NamedRun], step: float | None) -> str:
    """Return a phrase that says at which step the runs are compared.

    Returns "" if all runs have ended at the same step.
    """
    ends = {each.run.lines[-1]["step"] for each in listed if each.run.lines}
    going = any(each.run.status == RUNNING for each in listed)
    if len(ends) > 1 or going:
        return f"At step {format_number(step)}, the last that all runs have completed,"
    return ""


def _compute_difference_noise(
    runs: Sequence[RunFiles], names: Sequence[str], step: float | None
) -> float:
    """Return the noise of the difference in a metric between two runs.

    If there are more than two runs, the two with the noisiest values are taken, so that the result
    is an upper bound for any two runs. `names` has the metric's name in each run. The noise is the
    half-width of a 95% confidence interval. Unknown noise counts as 0. So does the noise of a
    training metric if it is negligible.
    """
    if names[0].startswith(EVAL):
        drawn = []
        for run, name in zip(runs, names, strict=True):
            drawn.append(_compute_sampling_noise(run, name, step))
        return pace.compute_difference_noise(drawn) or 0.0
    end_noises = []
    for run, name in zip(runs, names, strict=True):
        end_noises.append(pace.compute_end_noise(read_values_until(run, name, step)) or 0.0)
    width = pace.compute_difference_noise(end_noises) or 0.0
    largest = max(
        abs(compute_final_value(run, name, step) or 0.0)
        for run, name in zip(runs, names, strict=True)
    )
    return width if width > pace.ROUNDING * largest else 0.0


def _compute_sampling_noise(run: RunFiles, name: str, step: float | None) -> float | None:
    """Return the noise of an evaluation metric that is due to the limited number of evaluated rows.

    The noise is the half-width of a 95% confidence interval, or None if it is unknown.
    """
    value = compute_final_value(run, name, step)
    rows = read_values_until(run, ROWS, step)
    if value is None or not rows:
        return None
    return pace.compute_sampling_noise(name, value, rows[-1])


def _explain_refusal(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    """Return a sentence that says why the headline metrics of the runs cannot be compared."""
    what = get_last_part(names[0])
    different = find_incomparable_options(runs, names)
    if what == REWARD and any(option in SOURCES for option in different):
        return "The rewards come from different sources and cannot be compared."
    word = escape(find_title(names[0]))
    if ALGORITHM in different or not different:
        kinds = ", ".join(escape(configuration.find_algorithm(run) or "unknown") for run in runs)
        return f"The {word} has a different meaning in each of these runs ({kinds}), so it does not show which is better."
    if any(option.startswith("dataset.") for option in different):
        return f"The {word} was measured on different rows and cannot be compared."
    return f"The {word} is computed in different ways ({', '.join(map(escape, different))}) and cannot be compared."


def _describe_differences(listed: Sequence[NamedRun]) -> str:
    """Return a sentence on the options that differ between the runs.

    The options are listed if there are at most three, and only counted otherwise.
    """
    different = find_differences([each.run for each in listed])
    if not different:
        return "Their options are the same."
    if len(different) > 3:
        return f"They differ in {len(different)} options."
    descriptions = (
        f"{escape(name)} ({', '.join(escape(configuration.format_briefly(v)) for v in values)})"
        for name, values in different.items()
    )
    return f"They differ in {', '.join(descriptions)}."


def is_close(one: float, other: float) -> bool:
    """Return whether the relative difference of two values is at most `CLOSE`."""
    return abs(one - other) <= CLOSE * max(abs(one), abs(other))


def _render_card(each: NamedRun, listed: Sequence[NamedRun]) -> str:
    run = each.run
    facts = []
    decider = _find_deciding_metric(listed)
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
    at = _format_step(listed, find_common_step([each.run for each in listed]))
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
        if _is_policy_loss(runs, [first]) or (get_last_part(first).endswith("loss") and has_reward):
            way = 0
        else:
            way = get_direction(first)
        if way and len(known) > 1:
            top = max(known, key=lambda value: way * value)
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


def _list_measures(listed: Sequence[NamedRun]) -> list[Names]:
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


def build_comparison_charts(listed: Sequence[NamedRun]) -> list[Chart]:
    """Return a chart for each measure, with one line for each run that has the measure."""
    return _build_charts(listed, _list_measures(listed))


def _build_charts(listed: Sequence[NamedRun], measures: Sequence[Names]) -> list[Chart]:
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
