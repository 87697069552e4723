"""Table of checkpoints by tasks: scores with intervals, differences beyond noise, a verdict.

table = build_table(reader.read(folders), reader, TableOptions(base="T@step10"))
table.verdict        # the best checkpoint, and the certainty of this choice
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

MAX_NAMES = 4  # models that a sentence names; further ones are counted
MAX_SHARE = 0.999  # a larger share of the resamples is written as `over 99.9%`
# Name of a metric of `eval_suite` in a run: eval/TASK/METRIC or eval/TASK/FILTER/METRIC.
RUN_METRIC = re.compile(r"eval/([^/]+)/(?:[^/]+/)?([^/]+)")


@dataclass(frozen=True)
class TableOptions:
    """Options of a table.

    Attributes:
        tasks: tasks to show, with all their metrics; empty for all tasks
        everything: show every metric of every task, and the subtasks of groups
        base: model that the others are compared with; "" for the first
        by: the deciding column: a task, a metric, `TASK:METRIC`, `average`, or a metric of a run,
            such as `eval/TASK/METRIC`; "" for the average if there is one, else the first of the
            columns with the most scores. If it is not "", models are sorted by it, best first.
    """

    tasks: Sequence[str] = ()
    everything: bool = False
    base: str = ""
    by: str = ""


@dataclass(frozen=True)
class EvaluationTable:
    """Scores of models on tasks.

    `names` maps each model to its short name, in the order of the rows. `best` is the best model by
    the column `decider`, and `verdict` has sentences on this choice and its certainty.
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
    run_metric = RUN_METRIC.fullmatch(options.by)
    if run_metric is not None:
        options = replace(options, by=f"{run_metric[1]}:{run_metric[2]}")
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
    """Return a short name for each model.

    It has as few of the last folders of the model's path as possible, so that all names differ.
    """
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


def find_model_name(text: str, names: Mapping[str, str]) -> str:
    """Return the model that `text` refers to: its full name, its short name or the end of one.

    Raises `ConfigError` if there is no such model, or more than one.
    """
    name_or_end = text.removeprefix("./").rstrip("/")
    for model, name in names.items():
        if name_or_end in (model, name):
            return model
    matching = [
        model
        for model in names
        if model.endswith(
            (f"/{name_or_end}", name_or_end if "@" in name_or_end else f"/{name_or_end}")
        )
    ]
    if len(matching) == 1:
        return matching[0]
    all_names = ", ".join(names.values())
    if matching:
        raise ConfigError(f"{text!r} names several of the models; they are {all_names}")
    close = find_nearest(text, names.values(), 1)
    hint = f"did you mean {close[0]}?" if close else f"they are {all_names}"
    raise ConfigError(f"{text!r} is none of the evaluated models; {hint}")


# -- columns


def _choose_columns(
    scores: Sequence[EvaluationScore], options: TableOptions
) -> tuple[list[TableColumn], dict[tuple[str, TableColumn], EvaluationScore]]:
    """Return the columns to show, and the score of each cell.

    By default, these are the groups, and the tasks outside groups, each with one metric: the metric
    that `options.by` names, or else the first one in the results.
    """
    tasks = list(dict.fromkeys(score.task for score in scores))
    for task in options.tasks:
        if task not in tasks:
            close = find_nearest(task, tasks, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(tasks)}"
            raise ConfigError(f"--task {task}: no result has this task; {hint}")
    preferred = _find_preferred_metric(scores, options.by)
    grouped = find_grouped_tasks(scores)
    by_column: dict[TableColumn, list[EvaluationScore]] = {}
    for score in scores:
        is_hidden = score.task not in options.tasks if options.tasks else score.task in grouped
        if is_hidden and not (options.everything and not options.tasks):
            continue
        column = TableColumn(score.task, score.measure, score.shots, score.rises)
        by_column.setdefault(column, []).append(score)
    columns = sorted(by_column, key=lambda column: (tasks.index(column.task), column.shots or 0))
    if not options.everything and not options.tasks:
        columns = _choose_first_metrics(columns, preferred)
    chosen = {}
    for column in columns:
        for score in by_column[column]:
            chosen[score.model, column] = score
    return columns, chosen


def _find_preferred_metric(scores: Sequence[EvaluationScore], by: str) -> tuple[str, str]:
    """Return (task, metric) for the option `by`.

    The task is "" for a metric of any task. Both are "" if `by` names no metric. Raises
    `ConfigError` for an unknown name.
    """
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
    known_names = ", ".join([AVERAGE, *sorted(tasks), *sorted({score.metric for score in scores})])
    hint = f"did you mean {close[0]}?" if close else f"known: {known_names}"
    raise ConfigError(f"--by {by}: is no task, metric or TASK:METRIC of these results; {hint}")


def _choose_first_metrics(
    columns: Sequence[TableColumn], preferred: tuple[str, str]
) -> list[TableColumn]:
    """Return one column per task and number of shots: the preferred metric or the first one."""
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
    metric_columns = [column for column in columns if _has_metric(column, by)]
    if len(metric_columns) == 1 or (metric_columns and average is None):
        return metric_columns[0]
    if average is not None:
        return average
    raise ConfigError(f"--by {by}: is in none of the shown columns; add --all")


def _describe_cells(
    cells: Mapping[tuple[str, TableColumn], TableCell],
    columns: Sequence[TableColumn],
    names: Mapping[str, str],
    base: str,
) -> list[str]:
    """Return notes on the methods of intervals and marks, and on refused or partial comparisons."""
    notes = []
    methods = {cell.method for cell in cells.values() if cell.method}
    descriptions = {
        WILSON: "Wilson for shares of right items",
        BOOTSTRAP: f"bootstrap over the items ({RESAMPLES:,} resamples) for other means",
        RECORDED: "1.96 recorded standard errors where no items can be used",
    }
    if methods:
        used = "; ".join(text for method, text in descriptions.items() if method in methods)
        notes.append(f"intervals are 95%: {used}")
    compared = [cell for cell in cells.values() if cell.difference is not None]
    if compared:
        num_uncorrected = 0
        for cell in compared:
            is_beyond_noise = cell.difference is not None and cell.difference.is_beyond_noise()
            num_uncorrected += is_beyond_noise and not cell.mark
        uncorrected = (
            f"; {num_uncorrected} more would be marked without the correction"
            if num_uncorrected
            else ""
        )
        notes.append(
            f"▲ and ▼ mark where a model is better or worse than {names[base]} on the same items: "
            f"the paired bootstrap's 95% interval excludes 0 and a paired randomization test gives "
            f"p < 0.05, corrected for {len(compared)} comparisons (Holm){uncorrected}"
        )
    # Group the models by the reason for which a comparison was refused, or by the shared items.
    for column in columns:
        base_cell = cells.get((base, column))
        reasons: dict[str, list[str]] = {}
        for model, name in names.items():
            cell_of_model = cells.get((model, column))
            if cell_of_model is None:
                continue
            if cell_of_model.refusal:
                reasons.setdefault(cell_of_model.refusal, []).append(name)
            elif cell_of_model.difference is not None and base_cell is not None:
                count = cell_of_model.difference.num_items
                if count < max(base_cell.num_items or 0, cell_of_model.num_items or 0):
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
    """Return a note for each task with several numbers of shots."""
    shots: dict[str, set[int | None]] = {}
    for column in columns:
        shots.setdefault(column.task, set()).add(column.shots)
    notes = []
    for task, counts in shots.items():
        if len(counts) > 1:
            numbers = " and ".join(str(count) for count in sorted(counts, key=lambda n: n or 0))
            notes.append(f"{task} with {numbers} shots: separate columns, which are not compared")
    return notes


def _list_names(names: Sequence[str]) -> str:
    """Return the names as text, with at most `MAX_NAMES` of them."""
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[:MAX_NAMES])} and {len(names) - MAX_NAMES} more"


# -- the verdict


def format_score(value: float) -> str:
    """Format a score with three digits after the point, and fewer if it is 10 or larger."""
    if abs(value) >= 1e6:
        return f"{value:.3g}"
    if abs(value) < 10:
        digits = 3
    elif abs(value) < 100:
        digits = 2
    else:
        digits = 1
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
    """Return the best model by a column, and sentences on the certainty of this choice."""
    scored_models = [
        model for model in _sort_by(cells, column, list(names)) if (model, column) in cells
    ]
    best = scored_models[0]
    winner = cells[best, column]
    count = f", {winner.num_items:,} items" if winner.num_items else ""
    interval = f" {format_interval(winner.interval)}" if winner.interval else ""
    confidence = "95% interval" if winner.interval else "no interval is known"
    facts = f"{format_score(winner.value)}{interval} ({confidence}{count})"
    if len(scored_models) == 1:
        return best, f"Only {names[best]} has a score by {column.label}: {facts}."
    num_without_score = len(names) - len(scored_models)
    text = f"Best by {column.label}: {names[best]}, {facts}."
    # Compare the best model with each of the others.
    differences = {}
    incomparable = []
    for model in scored_models[1:]:
        difference = compare_cells(winner, cells[model, column])
        if isinstance(difference, str):
            incomparable.append(names[model])
        else:
            differences[model] = difference
    p_values = adjust_for_comparisons([item.p_value for item in differences.values()])
    models_within_noise = []
    for (model, difference), p_value in zip(differences.items(), p_values, strict=True):
        if not difference.is_beyond_noise(p_value):
            models_within_noise.append(model)
    text += _describe_others(len(differences), [names[model] for model in models_within_noise])
    text += _describe_first_share(cells, column, best, list(differences))
    if incomparable:
        text += f" Not comparable with it: {_list_names(incomparable)}."
    if num_without_score:
        text += f" {num_without_score} {'model has' if num_without_score == 1 else 'models have'} no such score."
    return best, text


def _describe_others(count: int, names_within_noise: Sequence[str]) -> str:
    """Return a sentence on the models within noise of the best; `count` models were compared."""
    if not count:
        return ""
    if not names_within_noise:
        others = {1: "The other model is", 2: "Both others are"}.get(
            count, f"All {count} others are"
        )
        return f" {others} worse beyond noise."
    if len(names_within_noise) == count:
        if count == 1:
            return f" The other, {names_within_noise[0]}, is within noise of it: which is better is not known."
        others = "Both others" if count == 2 else f"All {count} others"
        return f" {others} are within noise of it: which is best is not known."
    verb = "is" if len(names_within_noise) == 1 else "are"
    rest = count - len(names_within_noise)
    tail = "the other is worse" if rest == 1 else f"the other {rest} are worse"
    number = len(names_within_noise)
    names = _list_names(names_within_noise)
    return f" {number} of {count} others {verb} within noise of it ({names}); {tail}."


def _describe_first_share(
    cells: Mapping[tuple[str, TableColumn], TableCell],
    column: TableColumn,
    best: str,
    others: Sequence[str],
) -> str:
    """Return a sentence on the share of resamples in which the best model has the best score.

    Returns "" if the models cannot be compared on the same items.
    """
    tables = []
    for model in (best, *others):
        table = cells[model, column].items
        if table is not None:
            tables.append(table)
    if not others or len(tables) <= len(others):
        return ""
    matched = match_items(tables)
    if isinstance(matched, str):
        return ""
    share = float(compute_first_shares(matched, rises=column.rises)[0])
    digits = 1 if share > 0.99 else 0
    text = "over 99.9%" if share > MAX_SHARE else f"{share:.{digits}%}"
    return f" It has the best score in {text} of {RESAMPLES:,} resamples of the items."
