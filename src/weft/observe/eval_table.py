"""Table of checkpoints by tasks: scores with intervals, differences beyond noise, a verdict.

table = build_table(reader.read(folders), reader, TableOptions(base="T@step10"))
table.verdict        # which checkpoint is best, and how sure that is
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from weft.errors import ConfigError, find_nearest
from weft.observe.eval_cells import (
    AVERAGE,
    BOOTSTRAP,
    RECORDED,
    WILSON,
    TableCell,
    TableColumn,
    add_average,
    build_cell,
    compare_cells,
    compare_with_base,
    find_grouped_tasks,
    match_items,
)
from weft.observe.eval_files import (
    EvaluationScore,
    FoundResults,
    ResultReader,
    sort_models,
    split_model_name,
)
from weft.observe.eval_statistics import (
    RESAMPLES,
    adjust_for_comparisons,
    compute_first_shares,
)

MOST_NAMED = 4  # models that a sentence names; the others are counted
SURE = 0.999  # share of the resamples above which it is written as `over 99.9%`


# Name of a metric of `eval_suite` in a run, such as eval/gsm8k/exact_match; a filter may be between
RUN_METRIC = re.compile(r"eval/([^/]+)/(?:[^/]+/)?([^/]+)")


@dataclass(frozen=True)
class TableOptions:
    """Options of a table.

    Attributes:
        tasks: tasks to show, with all their metrics; empty for all tasks
        everything: show every metric of every task, and the subtasks of groups
        base: model that the others are compared with; "" for the first
        by: task, metric, `TASK:METRIC` or `average` that decides, or a run's name of a metric, such
            as `eval/TASK/METRIC`; "" for the average if there is one, or else the first of the
            columns with the most scores. If it is set, the best model comes first.
    """

    tasks: Sequence[str] = ()
    everything: bool = False
    base: str = ""
    by: str = ""


@dataclass(frozen=True)
class EvaluationTable:
    """Scores of models on tasks.

    `names` has the short name of each model, in the order of the rows. `verdict` says which model
    is best by the column `decider`, and `best` is that model.
    """

    names: Mapping[str, str]
    columns: Sequence[TableColumn]
    cells: Mapping[tuple[str, TableColumn], TableCell]
    base: str
    decider: TableColumn | None = None
    best: str = ""
    verdict: str = ""
    notes: Sequence[str] = field(default_factory=tuple)


def build_table(
    results: FoundResults, reader: ResultReader, options: TableOptions | None = None
) -> EvaluationTable:
    """Build the table of all scores in `results`.

    Raises `ConfigError` for an unknown task, base or metric in `options`, and if nothing is left.
    """
    options = options or TableOptions()
    named = RUN_METRIC.fullmatch(options.by)
    if named is not None:
        options = replace(options, by=f"{named[1]}:{named[2]}")
    columns, scores = _choose_columns(results.scores, options)
    models = sort_models(scores.values())
    names = shorten_names(models)
    base = find_model_name(options.base, names) if options.base else models[0]
    notes = list(results.notes)
    cells: dict[tuple[str, TableColumn], TableCell] = {}
    for key, score in scores.items():
        cells[key], problem = build_cell(score, reader)
        if problem:
            notes.append(f"{names[score.model]}: {problem}")
    average = add_average(columns, models, cells)
    if average is not None:
        columns = [average[0], *columns]
        notes.append(average[1])
    compare_with_base(cells, columns, models, base)
    notes += _describe_cells(cells, columns, names, base)
    decider = _choose_decider(columns, cells, options.by)
    best, verdict = _write_verdict(cells, decider, names)
    if options.by:
        models = _sort_by(cells, decider, models)
    return EvaluationTable(
        names={model: names[model] for model in models},
        columns=columns,
        cells=cells,
        base=base,
        decider=decider,
        best=best,
        verdict=verdict,
        notes=list(dict.fromkeys(notes)),
    )


# -- names


def shorten_names(models: Sequence[str]) -> dict[str, str]:
    """Return a short name of each model: the shortest form in which all names differ."""
    parts = {}
    for model in models:
        run, step = split_model_name(model)
        parts[model] = (run.rstrip("/").split("/"), f"@step{step}" if step >= 0 else "")
    deepest = max((len(folders) for folders, _ in parts.values()), default=1)
    for count in range(1, deepest + 1):
        names = {
            model: "/".join(folders[-count:]) + step for model, (folders, step) in parts.items()
        }
        if len(set(names.values())) == len(names):
            return names
    return {model: model for model in models}


def find_model_name(given: str, names: Mapping[str, str]) -> str:
    """Return the model that `given` refers to: its full name, its short name or the end of one.

    Raises `ConfigError` if there is no such model, or more than one.
    """
    plain = given.removeprefix("./").rstrip("/")
    for model, name in names.items():
        if plain in (model, name):
            return model
    ending = [
        model
        for model in names
        if model.endswith((f"/{plain}", plain if "@" in plain else f"/{plain}"))
    ]
    if len(ending) == 1:
        return ending[0]
    listed = ", ".join(names.values())
    if ending:
        raise ConfigError(f"{given!r} names several of the models; they are {listed}")
    close = find_nearest(given, names.values(), 1)
    hint = f"did you mean {close[0]}?" if close else f"they are {listed}"
    raise ConfigError(f"{given!r} is none of the evaluated models; {hint}")


# -- columns


def _choose_columns(
    scores: Sequence[EvaluationScore], options: TableOptions
) -> tuple[list[TableColumn], dict[tuple[str, TableColumn], EvaluationScore]]:
    """Return the columns to show, and the score of each cell.

    By default, these are the groups, and the tasks outside groups, each with its first metric. The
    first metric is the first one that the harness recorded, or the one that `options.by` names.
    """
    known = list(dict.fromkeys(score.task for score in scores))
    for task in options.tasks:
        if task not in known:
            close = find_nearest(task, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise ConfigError(f"--task {task}: no result has this task; {hint}")
    preferred = _find_preferred_metric(scores, options.by)
    grouped = find_grouped_tasks(scores)
    by_column: dict[TableColumn, list[EvaluationScore]] = {}
    for score in scores:
        hidden = score.task not in options.tasks if options.tasks else score.task in grouped
        if hidden and not (options.everything and not options.tasks):
            continue
        column = TableColumn(score.task, score.measure, score.shots, score.rises)
        by_column.setdefault(column, []).append(score)
    columns = sorted(by_column, key=lambda each: (known.index(each.task), each.shots or 0))
    if not options.everything and not options.tasks:
        columns = _choose_first_metrics(columns, preferred)
    chosen = {}
    for column in columns:
        for score in by_column[column]:
            chosen[score.model, column] = score
    return columns, chosen


def _find_preferred_metric(scores: Sequence[EvaluationScore], by: str) -> tuple[str, str]:
    """Return (task, metric) that `by` names; the task is "" for a metric of all tasks."""
    tasks = {score.task for score in scores}
    metrics = {name for score in scores for name in (score.metric, score.measure)}
    task, _, metric = by.rpartition(":")
    if by in ("", AVERAGE) or by in tasks:
        return "", ""
    if by in metrics:
        return "", by
    if task in tasks and metric in metrics:
        return task, metric
    close = find_nearest(by, [*tasks, *metrics], 1)
    known = ", ".join([AVERAGE, *sorted(tasks), *sorted({score.metric for score in scores})])
    hint = f"did you mean {close[0]}?" if close else f"known: {known}"
    raise ConfigError(f"--by {by}: is no task, metric or TASK:METRIC of these results; {hint}")


def _choose_first_metrics(
    columns: Sequence[TableColumn], preferred: tuple[str, str]
) -> list[TableColumn]:
    """Return one column for each task and number of shots."""
    first: dict[tuple[str, int | None], TableColumn] = {}
    for column in columns:
        key = (column.task, column.shots)
        is_preferred = preferred[0] in ("", column.task) and _has_metric(column, preferred[1])
        if key not in first or (is_preferred and not _has_metric(first[key], preferred[1])):
            first[key] = column
    return list(first.values())


def _has_metric(column: TableColumn, metric: str) -> bool:
    return bool(metric) and metric in (column.measure, column.measure.split(" ")[0])


def _choose_decider(
    columns: Sequence[TableColumn],
    cells: Mapping[tuple[str, TableColumn], TableCell],
    by: str,
) -> TableColumn:
    """Return the column that decides which model is best."""
    average = next((column for column in columns if column.task == AVERAGE), None)
    if by in ("", AVERAGE):
        if by and average is None:
            raise ConfigError(
                "--by average: no two tasks have shares of right items for all models; name a task"
            )
        if average is not None:
            return average
        counts = Counter(column for _, column in cells)
        return max(columns, key=counts.__getitem__)  # the first of several
    task, _, metric = by.rpartition(":")
    for column in columns:
        if column.task == by or (column.task == task and _has_metric(column, metric)):
            return column
    own = [column for column in columns if _has_metric(column, by)]
    if len(own) == 1 or (own and average is None):
        return own[0]
    if average is not None:
        return average
    raise ConfigError(f"--by {by}: is in none of the shown columns; add --all")


def _describe_cells(
    cells: Mapping[tuple[str, TableColumn], TableCell],
    columns: Sequence[TableColumn],
    names: Mapping[str, str],
    base: str,
) -> list[str]:
    """Return notes on how the intervals and marks were computed, and on refused comparisons."""
    notes = []
    methods = {cell.method for cell in cells.values() if cell.method}
    ways = {
        WILSON: "Wilson for shares of right items",
        BOOTSTRAP: f"bootstrap over the items ({RESAMPLES:,} resamples) for other means",
        RECORDED: "1.96 recorded standard errors where no items can be used",
    }
    if methods:
        used = "; ".join(text for method, text in ways.items() if method in methods)
        notes.append(f"intervals are 95%: {used}")
    compared = [cell for cell in cells.values() if cell.difference is not None]
    if compared:
        alone = 0
        for cell in compared:
            is_alone = cell.difference is not None and cell.difference.is_beyond_noise()
            alone += is_alone and not cell.mark
        uncorrected = f"; {alone} more would be marked without the correction" if alone else ""
        notes.append(
            f"▲ and ▼ mark where a model is better or worse than {names[base]} on the same items: "
            f"the paired bootstrap's 95% interval excludes 0 and a paired randomization test gives "
            f"p < 0.05, corrected for {len(compared)} comparisons (Holm){uncorrected}"
        )
    for column in columns:
        known = cells.get((base, column))
        reasons: dict[str, list[str]] = {}
        for model, name in names.items():
            own = cells.get((model, column))
            if own is None:
                continue
            if own.refusal:
                reasons.setdefault(own.refusal, []).append(name)
            elif own.difference is not None and known is not None:
                count = own.difference.num_items
                if count < max(known.num_items or 0, own.num_items or 0):
                    reasons.setdefault(f"shared {count:,}", []).append(name)
        for reason, models in reasons.items():
            if reason.startswith("shared "):
                notes.append(
                    f"{column.label}: compared on the {reason.removeprefix('shared ')} items that "
                    f"{names[base]} and {_list_names(models)} share"
                )
            else:
                notes.append(
                    f"{column.label}: {_list_names(models)} not compared with {names[base]} (≠): "
                    f"{reason}"
                )
    return notes + _describe_shots(columns)


def _describe_shots(columns: Sequence[TableColumn]) -> list[str]:
    shots: dict[str, set[int | None]] = {}
    for column in columns:
        shots.setdefault(column.task, set()).add(column.shots)
    notes = []
    for task, counts in shots.items():
        if len(counts) > 1:
            listed = " and ".join(str(count) for count in sorted(counts, key=lambda n: n or 0))
            notes.append(f"{task} with {listed} shots: separate columns, which are not compared")
    return notes


def _list_names(names: Sequence[str]) -> str:
    if len(names) <= MOST_NAMED:
        return ", ".join(names)
    return f"{', '.join(names[:MOST_NAMED])} and {len(names) - MOST_NAMED} more"


# -- the verdict


def format_score(value: float) -> str:
    """Format a score with three digits after the point if it is small, and fewer if it is large."""
    if abs(value) >= 1e6:
        return f"{value:.3g}"
    digits = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1
    return f"{value:.{digits}f}"


def format_interval(interval: tuple[float, float] | None) -> str:
    """Format an interval as `[low, high]`; "" if it is None."""
    if interval is None:
        return ""
    return f"[{format_score(interval[0])}, {format_score(interval[1])}]"


def _sort_by(
    cells: Mapping[tuple[str, TableColumn], TableCell],
    column: TableColumn,
    models: Sequence[str],
) -> list[str]:
    """Return the models, best first; those without a score come last."""

    def build_key(model: str) -> tuple[bool, float]:
        cell = cells.get((model, column))
        if cell is None:
            return True, 0.0
        return False, -cell.value if column.rises else cell.value

    return sorted(models, key=build_key)


def _write_verdict(
    cells: Mapping[tuple[str, TableColumn], TableCell],
    column: TableColumn,
    names: Mapping[str, str],
) -> tuple[str, str]:
    """Return the best model by a column, and sentences on how sure that is."""
    there = [model for model in _sort_by(cells, column, list(names)) if (model, column) in cells]
    best = there[0]
    winner = cells[best, column]
    count = f", {winner.num_items:,} items" if winner.num_items else ""
    interval = f" {format_interval(winner.interval)}" if winner.interval else ""
    confidence = "95% interval" if winner.interval else "no interval is known"
    facts = f"{format_score(winner.value)}{interval} ({confidence}{count})"
    if len(there) == 1:
        return best, f"Only {names[best]} has a score by {column.label}: {facts}."
    absent = len(names) - len(there)
    text = f"Best by {column.label}: {names[best]}, {facts}."
    # Compare the best with each of the others.
    differences = {}
    incomparable = []
    for model in there[1:]:
        difference = compare_cells(winner, cells[model, column])
        if isinstance(difference, str):
            incomparable.append(names[model])
        else:
            differences[model] = difference
    chances = adjust_for_comparisons([each.chance for each in differences.values()])
    alike = []
    for (model, difference), chance in zip(differences.items(), chances, strict=True):
        if not difference.is_beyond_noise(chance):
            alike.append(model)
    text += _describe_others(len(differences), [names[model] for model in alike])
    text += _describe_first_share(cells, column, best, list(differences))
    if incomparable:
        text += f" Not comparable with it: {_list_names(incomparable)}."
    if absent:
        text += f" {absent} {'model has' if absent == 1 else 'models have'} no such score."
    return best, text


def _describe_others(count: int, alike: Sequence[str]) -> str:
    """Return a sentence on how many of the `count` other models are within noise of the best."""
    if not count:
        return ""
    if not alike:
        others = {1: "The other model is", 2: "Both others are"}.get(
            count, f"All {count} others are"
        )
        return f" {others} worse beyond noise."
    if len(alike) == count:
        if count == 1:
            return f" The other, {alike[0]}, is within noise of it: which is better is not known."
        others = "Both others" if count == 2 else f"All {count} others"
        return f" {others} are within noise of it: which is best is not known."
    verb = "is" if len(alike) == 1 else "are"
    rest = count - len(alike)
    tail = "the other is worse" if rest == 1 else f"the other {rest} are worse"
    return (
        f" {len(alike)} of {count} others {verb} within noise of it ({_list_names(alike)}); {tail}."
    )


def _describe_first_share(
    cells: Mapping[tuple[str, TableColumn], TableCell],
    column: TableColumn,
    best: str,
    others: Sequence[str],
) -> str:
    """Return a sentence on how often the best model stays first if the items are resampled."""
    tables = []
    for model in (best, *others):
        table = cells[model, column].items
        if table is not None:
            tables.append(table)
    matched = match_items(tables) if len(tables) == len(others) + 1 and others else ""
    if isinstance(matched, str):
        return ""
    share = float(compute_first_shares(matched, rises=column.rises)[0])
    digits = 1 if share > 0.99 else 0
    text = "over 99.9%" if share > SURE else f"{share:.{digits}%}"
    return f" It has the best score in {text} of {RESAMPLES:,} resamples of the items."
