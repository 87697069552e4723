"""Runs laid over each other on one page: which was better, what differs in how they were set up, and what they said."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.observe import charts, configuration
from weft.observe.answers import answers
from weft.observe.chart_groups import Curves, moves, node_of, parts, same
from weft.observe.charts import Chart, Line
from weft.observe.differences import differing, rewards_compare, versions
from weft.observe.metric_help import find
from weft.observe.metrics import COUNTERS, EVAL, TIME, direction, duration, headline, last_part, number, rank, title
from weft.observe.page import Page, Section, folded, shown, write
from weft.observe.palette import HUES, Hue
from weft.observe.report import curves
from weft.observe.run_files import RunFiles
from weft.observe.sections import best, count

NAME = "compare.html"
MOST = len(HUES)
TENTH = 10  # final values are means over the last 1 / TENTH of the steps: one step alone is noise
REWARD = "reward"
CLOSE = 0.01  # relative: below this two values are called equal


@dataclass(frozen=True)
class Named:
    """A run with the name and the colour that it has on the page."""

    run: RunFiles
    label: str
    hue: Hue


def build_comparison(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write a page that compares runs and return its path. Raises `UserError` where one of them is no run."""
    runs = [RunFiles.read(directory) for directory in run_dirs]
    return write(path, page(runs).html())


def page(runs: Sequence[RunFiles], *, live: str = "", home: str = "#top") -> Page:
    """The page. Raises `ConfigError` for fewer than two runs or more than there are colours."""
    if not 2 <= len(runs) <= MOST:
        raise ConfigError(f"{len(runs)} runs: a comparison takes 2 to {MOST}")
    listed = named(runs)
    found = comparison_charts(listed)
    main = _headline(runs)
    hero = next((chart for chart in found if main and chart.lines[0].name == main), None)
    drawn = ([hero] if hero else []) + [chart for chart in found if chart is not hero]
    said, tokens = answers([(each.label, each.hue, each.run) for each in listed])
    return Page(
        title=" · ".join(each.label for each in listed),
        top=_top(listed, hero),
        sections=[
            Section("settings", "What differs", _settings(listed)),
            Section("metrics", "Metrics", _metrics(listed)),
            Section("curves", "Curves", curves(drawn, 1 if hero else 0)),
            Section("answers", "Answers to the same prompts", said),
        ],
        footer=f"Built {time.strftime('%Y-%m-%d %H:%M')} from "
        + ", ".join(f"<code>{escape(str(each.run.directory))}</code>" for each in listed),
        data={**charts.data(drawn, runs), "tokens": tokens},
        live=live,
        home=home,
    )


def named(runs: Sequence[RunFiles]) -> list[Named]:
    """Runs by their trial alone where that tells them apart, else by experiment and trial, else by their folders."""
    titles = [run.title for run in runs]
    ways = (
        [trial for _, trial in titles],
        [f"{experiment}/{trial}" for experiment, trial in titles],
        ["/".join(run.directory.absolute().parts[-2:]) for run in runs],
        [str(run.directory) for run in runs],
    )
    labels = next((way for way in ways if len(set(way)) == len(runs)), ways[-1])
    return [Named(run, label, hue) for run, label, hue in zip(runs, labels, HUES, strict=False)]


def final(run: RunFiles, name: str) -> float | None:
    """The mean of a metric over the last tenth of its steps."""
    values = run.series(name)[1]
    last = values[-max(1, len(values) // TENTH) :]
    return sum(last) / len(last) if last else None


def _headline(runs: Sequence[RunFiles]) -> str | None:
    """The metric that decides: the first run's headline, where the others have the same measure."""
    name = headline(runs[0].names)
    return name if name and all(_same_measure(run, name) for run in runs) else None


def _same_measure(run: RunFiles, name: str) -> str | None:
    """What a run calls the measure that another calls `name`: nodes may have other names."""
    if name in run.names:
        return name
    wanted = (name.startswith(EVAL), parts(name)[1])
    return next((other for other in run.names if (other.startswith(EVAL), parts(other)[1]) == wanted), None)


# -- the first screen


def _top(listed: Sequence[Named], hero: Chart | None) -> str:
    curve = charts.html(hero, 0, large=True) if hero else ""
    cards = "".join(_card(each, listed) for each in listed)
    return (
        f'<section class="hero{"" if hero else " alone"}" id="top"><div class="intro"><p class="eyebrow">'
        f"{len(listed)} runs compared</p><h1>{' <small>and</small> '.join(escape(each.label) for each in listed)}</h1>"
        f'<p class="lede">{verdict(listed)}</p></div>{curve}<ul class="versus wide">{cards}</ul></section>'
    )


def verdict(listed: Sequence[Named]) -> str:
    """Which run was better, in a sentence."""
    name = _headline([each.run for each in listed])
    if name is None:
        return "These runs share no metric that says which of them is better."
    if last_part(name) == REWARD and not rewards_compare([each.run for each in listed]):
        return f"The rewards come from different sources and cannot be compared. {_why(listed)}"
    values = [(final(each.run, _same_measure(each.run, name) or name), each.label) for each in listed]
    known = [(value, label) for value, label in values if value is not None]
    way = direction(name) or 1
    ordered = sorted(known, key=lambda pair: -way * pair[0])
    (first, winner), *others = ordered
    what = escape(title(name))
    if all(equal(first, value) for value, _ in others):
        return f"By their {what} the runs ended alike: {number(first)}."
    rest = ", ".join(f"{number(value)} ({escape(label)})" for value, label in others)
    word = "higher" if way > 0 else "lower"
    return (
        f"<b>{escape(winner)}</b> ended with the {word} {what}: <b>{number(first)}</b> against {rest}. {_why(listed)}"
    )


def _why(listed: Sequence[Named]) -> str:
    """What they differ in, where that is little enough for a sentence."""
    different = differing([each.run for each in listed])
    if not different:
        return "Their options are the same."
    if len(different) > 3:
        return f"They differ in {len(different)} options."
    told = (
        f"{escape(name)} ({', '.join(escape(configuration.brief(v)) for v in values)})"
        for name, values in different.items()
    )
    return f"They differ in {', '.join(told)}."


def equal(one: float, other: float) -> bool:
    return abs(one - other) <= CLOSE * max(abs(one), abs(other))


def _card(each: Named, listed: Sequence[Named]) -> str:
    run, told = each.run, []
    name = _headline([one.run for one in listed])
    if run.lines:
        told.append(count(run.lines[-1]["step"], "step"))
    if epochs := run.series("epoch")[1]:
        told.append(count(round(epochs[-1], 3), "epoch"))
    if seconds := run.series("step_seconds")[1]:
        told.append(duration(sum(seconds)))
    own = _same_measure(run, name) if name else headline(run.names)
    reached = ""
    if own and (values := run.series(own)[1]):
        reached = f"<div>best {escape(title(own))} {number(best(own, values))}, last {number(values[-1])}</div>"
    return (
        f'<li><h3><i class="pick" style="{charts.css(each.hue)}"></i>{escape(each.label)} '
        f'<span class="status {escape(run.status)}">{escape(run.status)}</span></h3>'
        f"<div>{escape(configuration.algorithm(run) or '')} {', '.join(told)}</div>{reached}</li>"
    )


# -- what differs


def _settings(listed: Sequence[Named]) -> str:
    runs = [each.run for each in listed]
    rows = [(name, [configuration.brief(value) for value in values]) for name, values in differing(runs).items()]
    rows += versions(runs)
    if not rows:
        return '<div class="card"><p>Their configurations are the same.</p></div>'
    if any(name.startswith(f"{mark}.") for name, _ in rows for mark in configuration.MARKS) and len(rows) > 40:
        return _table(listed, rows[:40]) + folded(f"{len(rows) - 40} more", _table(listed, rows[40:]), "more settings")
    return _table(listed, rows)


def _table(listed: Sequence[Named], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    body = "".join(f'<tr><th scope="row">{escape(name)}</th>{_cells(listed, values)}</tr>' for name, values in rows)
    return (
        '<div class="card scroll"><table class="settings side"><thead><tr><th scope="col">option</th>'
        f"{_heads(listed)}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cells(listed: Sequence[Named], values: Sequence[str]) -> str:
    """The name of the run goes with each value, for screens on which they stand one under the other."""
    return "".join(
        f'<td data-run="{escape(each.label)}">{shown(value)}</td>' for each, value in zip(listed, values, strict=True)
    )


def _heads(listed: Sequence[Named]) -> str:
    return "".join(
        f'<th scope="col"><i class="pick" style="{charts.css(each.hue)}"></i>{escape(each.label)}</th>'
        for each in listed
    )


# -- numbers and curves


def _metrics(listed: Sequence[Named]) -> str:
    rows = list(_metric_rows(listed))
    if not rows:
        return ""
    telling = [row for known, row in rows if known]
    rest = [row for known, row in rows if not known]
    more = folded(f"<b>{len(rest)}</b> more", _numbers(listed, rest), "more metrics") if rest else ""
    note = '<p class="note">Means over the last tenth of the steps; the best value where better is known.</p>'
    return note + _numbers(listed, telling or rest) + (more if telling else "")


def _metric_rows(listed: Sequence[Named]) -> Iterator[tuple[bool, str]]:
    """(whether it is a telling one, the row) of every measure, the telling ones first."""
    runs = [each.run for each in listed]
    judged, compare = last_part(_headline(runs) or "") == REWARD, rewards_compare(runs)
    for names in _measures(listed):
        values = [final(each.run, name) if name else None for each, name in zip(listed, names, strict=True)]
        first = next(name for name in names if name)
        known = [value for value in values if value is not None]
        last = last_part(first)
        senseless = (judged and last.endswith("loss")) or (
            not compare and last.endswith(REWARD)
        )  # a policy's loss is none
        way = 0 if senseless else direction(first)
        top = max(known, key=lambda value: way * value) if way and len(known) > 1 else None
        cells = "".join(_cell(value, top) for value in values)
        about = find(first)
        unit = f' <span class="quiet">{escape(about.unit)}</span>' if about and about.unit else ""
        head = f'<th scope="row">{escape(_label(first))}{unit}</th>'
        row = f'<tr title="{escape(about.what if about else "")}">{head}{cells}</tr>'
        yield rank(first)[0] < rank("unknown")[0], row


def _cell(value: float | None, top: float | None) -> str:
    if value is None:
        return '<td class="quiet">–</td>'
    better = top is not None and equal(value, top)
    return f'<td class="better">{number(value)} ✓</td>' if better else f"<td>{number(value)}</td>"


def _measures(listed: Sequence[Named]) -> list[list[str | None]]:
    """Every measure by what each run calls it, the telling ones first."""
    found: dict[tuple[Any, ...], list[str | None]] = {}
    for place, each in enumerate(listed):
        for name in each.run.names:
            if name in COUNTERS:
                continue
            key = _key(name)
            names = found.setdefault(key, [None] * len(listed))
            names[place] = names[place] or name
    ordered = sorted(found.values(), key=lambda names: rank(next(name for name in names if name)))
    kept: list[list[str | None]] = []
    curves = Curves[tuple[int, str]]()  # by run and node
    for names in ordered:
        called = [(place, name) for place, name in enumerate(names) if name]
        place, name = called[0]
        alike = curves.like((place, node_of(name)), listed[place].run.series(name))
        if any(_repeats(listed, names, kept[number]) for number in alike):
            continue
        for place, name in called:
            curves.add((place, node_of(name)), listed[place].run.series(name), len(kept))
        kept.append(names)
    return kept


def _repeats(listed: Sequence[Named], names: Sequence[str | None], other: Sequence[str | None]) -> bool:
    """Whether every run that has a measure has another of the same node that moves as it does (`value_loss` beside `loss`)."""
    return all(
        name is None or (before is not None and _same_curve(each.run, name, before))
        for each, name, before in zip(listed, names, other, strict=True)
    )


def _same_curve(run: RunFiles, name: str, other: str) -> bool:
    one = run.series(name)
    return node_of(name) == node_of(other) and moves(one[1]) and same(one, run.series(other))


def _key(name: str) -> tuple[Any, ...]:
    """What two runs must share to be compared: the measure, and its node where that decides what it means."""
    node, measure = parts(name)
    last = last_part(name)
    if name.startswith((EVAL, TIME)):
        return (name,)
    return (node, name) if _by_node(name) else (measure, last)


def _by_node(name: str) -> bool:
    """Whether every node has a measure of its own by this name."""
    return last_part(name) in ("loss", "grad_norm", "learning_rate", "num_tokens", "tokens_per_second", "mfu")


def _title(name: str) -> str:
    """What a measure is called above its chart."""
    if name.startswith(TIME):
        return f"seconds of {name.removeprefix(TIME)}"
    if name.startswith(EVAL):
        return f"eval {name.removeprefix(EVAL).replace('/', ' ').replace('_', ' ')}"
    return charts.heading(name.partition("/")[2] if "/" in name else name)


def _label(name: str) -> str:
    """What it is called in the table, where nothing else names its node."""
    return f"{_title(name)}, {name.partition('/')[0]}" if _by_node(name) and "/" in name else _title(name)


def _numbers(listed: Sequence[Named], rows: Sequence[str]) -> str:
    return (
        f'<div class="card scroll"><table class="settings numbers"><thead><tr><th scope="col">metric</th>{_heads(listed)}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def comparison_charts(listed: Sequence[Named]) -> list[Chart]:
    """A chart for each measure that some of the runs have, with a line for each of these."""
    found: list[Chart] = []
    measures = _measures(listed)
    most = charts.points_each(len(measures) * len(listed))
    for names in measures:
        first = next(name for name in names if name)
        lines = [
            Line(name, each.label, each.hue, *charts.thinned(*each.run.series(name), most), run=place)
            for place, (each, name) in enumerate(zip(listed, names, strict=True))
            if name
        ]
        missing = sum(each.run.not_finite(name) for each, name in zip(listed, names, strict=True) if name)
        found.append(
            Chart(_title(first), first.partition("/")[0] if "/" in first else "run", lines, missing, of_runs=True)
        )
    return found
