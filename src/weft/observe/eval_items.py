"""Items of a task on which two models differ, with prompt, target and both answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import UserError
from weft.observe.eval_cells import TableCell, TableColumn, compare_cells
from weft.observe.eval_files import NO_FILTER, EvaluationScore, ItemTable, read_sample_rows
from weft.observe.eval_table import EvaluationTable
from weft.observe.jsonl import clean_value

RIGHT_TO_WRONG = "right -> wrong"
WRONG_TO_RIGHT = "wrong -> right"
WORSE = "worse"
BETTER = "better"
KINDS = (RIGHT_TO_WRONG, WRONG_TO_RIGHT, WORSE, BETTER)
NORMALIZED = ("acc_norm", "acc_bytes")  # metrics that divide by the length of a choice


@dataclass(frozen=True)
class ItemAnswer:
    """Answer of one model to an item.

    `text` is the answer, and `filtered` the part that a filter extracted from it, "" if that is the
    same. For choices, `filtered` describes the choice's log-likelihood. `value` is the item's value
    in the score.
    """

    text: str
    filtered: str
    value: float


@dataclass(frozen=True)
class ItemChange:
    """Item on which two models differ.

    `kind` is one of `KINDS` and describes the change from the first model to the second. `number`
    is the item's `doc_id`. `answers` has one answer of each model.
    """

    kind: str
    task: str
    number: int
    prompt: str
    target: str
    answers: tuple[ItemAnswer, ItemAnswer]


@dataclass(frozen=True)
class ColumnChanges:
    """Differences of two models in one column of a table.

    `refusal` is the reason why the models cannot be compared; it is "" if they can. `num_shared` is
    the number of items that both answered. `counts` has the number of changes of each kind, and
    `changes` those whose texts were read.
    """

    column: TableColumn
    models: tuple[str, str]
    refusal: str = ""
    num_shared: int = 0
    counts: Mapping[str, int] | None = None
    changes: Sequence[ItemChange] = ()

    def describe(self) -> str:
        """Return a sentence with the number of changed items of each kind."""
        if self.refusal:
            return f"not compared: {self.refusal}"
        parts = [f"{count} {kind}" for kind, count in (self.counts or {}).items() if count]
        changed = sum((self.counts or {}).values())
        rest = f"{self.num_shared - changed:,} of {self.num_shared:,} items unchanged"
        return "; ".join([*parts, rest])


def find_changes(
    table: EvaluationTable, first: str, second: str, max_items: int | None = None
) -> list[ColumnChanges]:
    """Return the items on which two models of the table differ, column by column.

    `max_items` limits the items of each kind whose texts are read. The average over tasks is left
    out; its items are in the columns of the tasks.
    """
    by_column = []
    for column in table.columns:
        cells = [table.cells.get((model, column)) for model in (first, second)]
        before, after = cells
        if before is None or after is None or before.score is None or after.score is None:
            continue
        by_column.append(_compare_column(column, (before, after), max_items))
    return by_column


def _compare_column(
    column: TableColumn, cells: tuple[TableCell, TableCell], max_items: int | None
) -> ColumnChanges:
    """Find the items on which two models differ in one column, largest changes first."""
    before, after = cells
    assert before.score is not None and after.score is not None, "checked by the caller"
    models = (before.score.model, after.score.model)
    difference = compare_cells(before, after)
    if isinstance(difference, str) or before.items is None or after.items is None:
        return ColumnChanges(column, models, refusal=str(difference))
    values = [_get_values(before.items), _get_values(after.items)]
    by_kind: dict[str, list[tuple[float, tuple[str, int]]]] = {kind: [] for kind in KINDS}
    # Log-likelihoods behind perplexities are better if higher, although the metric falls.
    sign = 1.0 if column.rises or before.items.scored.form != "mean" else -1.0
    for key, value in values[0].items():
        if key in values[1]:
            gain = sign * (values[1][key] - value)
            kind = _find_kind(value, values[1][key], gain)
            if kind:
                by_kind[kind].append((-abs(gain), key))
    # The largest changes come first, then the order of the task.
    chosen = []
    for kind, gains in by_kind.items():
        for _, key in sorted(gains, key=lambda pair: pair[0])[:max_items]:
            chosen.append((kind, key))
    return ColumnChanges(
        column,
        models,
        num_shared=difference.num_items,
        counts={kind: len(gains) for kind, gains in by_kind.items()},
        changes=_read_changes(chosen, (before.score, after.score), values),
    )


def _get_values(items: ItemTable) -> dict[tuple[str, int], float]:
    """Return each item's value; for perplexities, the log-likelihood per word or byte."""
    per_weight = items.scored.values[:, 0] / items.scored.weights
    return dict(zip(items.keys, per_weight.tolist(), strict=True))


def _find_kind(before: float, after: float, gain: float) -> str:
    """Return the kind of an item's change, one of `KINDS`, or "" if its value did not change."""
    if before == after:
        return ""
    if {before, after} == {0.0, 1.0}:
        return WRONG_TO_RIGHT if gain > 0 else RIGHT_TO_WRONG
    return BETTER if gain > 0 else WORSE


def _read_changes(
    chosen: Sequence[tuple[str, tuple[str, int]]],
    scores: tuple[EvaluationScore, EvaluationScore],
    values: Sequence[Mapping[tuple[str, int], float]],
) -> list[ItemChange]:
    """Read the texts of the chosen items. Items whose texts cannot be read are left out."""
    numbers_by_task: dict[str, set[int]] = {}
    for _, (task, number) in chosen:
        numbers_by_task.setdefault(task, set()).add(number)
    rows: list[dict[tuple[str, int], Mapping[str, Any]]] = []
    for score in scores:
        model_rows: dict[tuple[str, int], Mapping[str, Any]] = {}
        for task, numbers in numbers_by_task.items():
            task_rows = _read_rows(score.get_samples_path(task), score.filter, numbers)
            model_rows |= {(task, number): row for number, row in task_rows.items()}
        rows.append(model_rows)
    changes = []
    for kind, key in chosen:
        if key not in rows[0] or key not in rows[1]:
            continue
        metric = scores[0].metric
        answers = [
            _read_answer(row[key], metric, model_values[key])
            for row, model_values in zip(rows, values, strict=True)
        ]
        prompt, target = _read_question(rows[0][key])
        changes.append(ItemChange(kind, *key, prompt, target, (answers[0], answers[1])))
    return changes


def _read_rows(
    path: Path, chosen_filter: str, numbers: Collection[int]
) -> dict[int, Mapping[str, Any]]:
    """Return the rows of the chosen items by number, from a file of items.

    Returns an empty dict if the file cannot be read.
    """
    rows: dict[int, Mapping[str, Any]] = {}
    try:
        for _, row in read_sample_rows(path):
            number = row.get("doc_id")
            if (
                isinstance(number, int)
                and number in numbers
                and row.get("filter", NO_FILTER) == chosen_filter
            ):
                rows[number] = clean_value(row)
    except (UserError, ValueError):
        return {}  # the file has changed since its scores were read
    return rows


def _list_arguments(row: Mapping[str, Any]) -> list[list[Any]]:
    """Return the arguments of each request of an item, as one list per request."""
    arguments = row.get("arguments")
    requests = []
    for request in arguments.values() if isinstance(arguments, dict) else ():
        requests.append(list(request.values()) if isinstance(request, dict) else [request])
    return requests


def _read_question(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return (prompt, target) of an item. The index of a choice as target becomes its text."""
    requests = _list_arguments(row)
    prompt = str(requests[0][0]) if requests and requests[0] else ""
    target = str(row.get("target", ""))
    if target == prompt:
        target = ""  # a text whose log-likelihood is measured
    choices = _list_choices(requests)
    if choices and target.isdecimal() and len(target) < 4 and int(target) < len(choices):
        target = choices[int(target)]
    return prompt, target


def _list_choices(requests: Sequence[Sequence[Any]]) -> list[str]:
    """Return the texts that an item's requests compare; empty for other kinds of tasks."""
    choices = []
    for request in requests:
        if len(request) < 2 or not isinstance(request[1], str):
            return []
        choices.append(request[1].strip())
    return choices if len(choices) > 1 else []


def _read_answer(row: Mapping[str, Any], metric: str, value: float) -> ItemAnswer:
    """Return a model's answer: the text that it wrote, its most likely choice or a likelihood."""
    responses = row.get("filtered_resps")
    first = responses[0] if isinstance(responses, list) and responses else ""
    choices = _list_choices(_list_arguments(row))
    if choices and isinstance(responses, list) and len(responses) == len(choices):
        likelihoods = [_read_likelihood(response) for response in responses]
        if None not in likelihoods:
            return ItemAnswer(*_pick_choice(choices, likelihoods, metric), value)
    if _is_likelihood(row):
        likelihood = first[0] if isinstance(first, list) and first else first
        is_greedy = isinstance(first, list) and str(first[-1]) == "True"
        note = ", the most likely text" if is_greedy else ""
        return ItemAnswer(f"log-likelihood {likelihood}{note}", "", value)
    filtered = first if isinstance(first, str) else str(first)
    raw = row.get("resps")
    while isinstance(raw, list) and raw:
        raw = raw[0]
    text = raw if isinstance(raw, str) else filtered
    return ItemAnswer(text, "" if filtered == text else filtered, value)


def _is_likelihood(row: Mapping[str, Any]) -> bool:
    """Return whether the model's answer to an item is the log-likelihood of one text."""
    requests = _list_arguments(row)
    if not requests:
        return False
    return len(requests[0]) == 1 or isinstance(requests[0][1], str)


def _pick_choice(
    choices: Sequence[str], likelihoods: Sequence[float | None], metric: str
) -> tuple[str, str]:
    """Return (most likely choice, its log-likelihood as text).

    Metrics in `NORMALIZED` divide each log-likelihood by the length of the choice.
    """
    numbers = [likelihood for likelihood in likelihoods if likelihood is not None]
    scaled = list(numbers)
    if metric in NORMALIZED:
        encoded = [choice.encode() if metric == "acc_bytes" else choice for choice in choices]
        scaled = [
            likelihood / max(1, len(text))
            for likelihood, text in zip(numbers, encoded, strict=True)
        ]
    best = scaled.index(max(scaled))
    return choices[best], f"log-likelihood {numbers[best]:.3f}"


def _read_likelihood(response: Any) -> float | None:
    """Return the log-likelihood in a response [log-likelihood, is greedy]; None if it has none."""
    try:
        return float(response[0])
    except (TypeError, ValueError, IndexError):
        return None
