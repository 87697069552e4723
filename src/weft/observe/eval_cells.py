"""Cells of a table of evaluations: scores with intervals, and comparisons on the same items."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from weft.observe.eval_files import EvaluationScore, ItemRecord, ItemTable, ResultReader
from weft.observe.eval_statistics import (
    MEAN,
    ScoreDifference,
    ScoredItems,
    Z,
    adjust_for_comparisons,
    compare_pair,
    compute_interval,
    compute_scores,
)

AVERAGE = "average"
WILSON = "Wilson"
BOOTSTRAP = "bootstrap"
RECORDED = "1.96 standard errors"
HASHED = ("documents", "prompts", "targets")  # in the order of `ItemRecord.hashes`


@dataclass(frozen=True)
class TableColumn:
    """Column of the table: one metric of one task, with a number of shots."""

    task: str
    measure: str = ""
    shots: int | None = None
    rises: bool = True

    @property
    def label(self) -> str:
        return " ".join(part for part in (self.task, self.detail) if part)

    @property
    def detail(self) -> str:
        """Metric and number of shots, such as `acc, 5-shot`."""
        shots = f"{self.shots}-shot" if self.shots else ""
        return ", ".join(part for part in (self.measure, shots) if part)


@dataclass(frozen=True)
class TableCell:
    """Score of one model in one column.

    Attributes:
        value: the score
        interval: 95% interval of the score, or None if unknown
        method: method by which the interval was computed; "" if there is no interval
        num_items: number of items with a score, or None if unknown
        items: values of the items; None if they are unknown
        difference: difference from the base model on the same items, or None
        mark: 1 for better than the base model beyond noise, -1 for worse, 0 for neither
        refusal: reason why the score cannot be compared with the base's; "" if it can
        score: the result in the file; None for an average over tasks
        settings: settings of the tasks that must be equal for a comparison
    """

    value: float
    interval: tuple[float, float] | None = None
    method: str = ""
    num_items: int | None = None
    items: ItemTable | None = None
    difference: ScoreDifference | None = None
    mark: int = 0
    refusal: str = ""
    score: EvaluationScore | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


# -- cells


def build_cell(score: EvaluationScore, reader: ResultReader) -> tuple[TableCell, str]:
    """Return the cell of a score, and a note on missing or unusable items, or ""."""
    items, problem = reader.load_items(score)
    if items is not None:
        interval = compute_interval(items.scored)
        method = WILSON if items.scored.has_only_right_and_wrong() else BOOTSTRAP
        count = items.scored.num_items
        cell = TableCell(score.value, interval, method if interval else "", count, items)
        missing = (score.num_items or count) - count
        if missing > 0:
            problem = f"{missing} of {score.num_items} items of {score.task} have no {score.metric}"
        return replace(cell, score=score, settings=score.settings), problem
    cell = TableCell(score.value, num_items=score.num_items, score=score, settings=score.settings)
    if score.error is not None and score.error > 0:
        half = Z * score.error
        cell = replace(cell, interval=(score.value - half, score.value + half), method=RECORDED)
    return cell, problem


def add_average(
    columns: Sequence[TableColumn],
    models: Sequence[str],
    cells: dict[tuple[str, TableColumn], TableCell],
) -> tuple[TableColumn, str] | None:
    """Add the cells of the average over tasks, and return its column and a note on the tasks.

    The average is over groups, and tasks outside groups, for which all models have scores that are
    means from 0 to 1. Each has the same weight. Returns None if there are fewer than two.
    """
    averaged: dict[tuple[str, int | None], TableColumn] = {}
    grouped = find_grouped_tasks([cell.score for cell in cells.values() if cell.score])
    for column in columns:
        if column.task in grouped:
            continue  # counts as a part of its group
        column_cells = [cells.get((model, column)) for model in models]
        if column.rises and all(cell is not None and _is_share(cell) for cell in column_cells):
            averaged.setdefault((column.task, column.shots), column)
    if len(averaged) < 2:
        return None
    average = TableColumn(AVERAGE, f"of {len(averaged)} tasks")
    for model in models:
        tables = []
        settings: dict[str, str] = {}
        for column in averaged.values():
            table = cells[model, column].items
            assert table is not None, "a share has items"
            tables.append((column, table))
            settings |= cells[model, column].settings
        joined = _join_tables(tables)
        value = float(compute_scores(joined.scored)[0])
        interval = compute_interval(joined.scored)
        cells[model, average] = TableCell(
            value,
            interval,
            BOOTSTRAP if interval else "",
            joined.scored.num_items,
            joined,
            settings=settings,
        )
    labels = ", ".join(column.label for column in averaged.values())
    return average, f"average: the mean of {labels}"


def find_grouped_tasks(scores: Iterable[EvaluationScore]) -> set[str]:
    """Return the tasks and groups that are parts of another group with a score."""
    groups = {score.task: set(score.subtasks) for score in scores if score.subtasks}
    grouped: set[str] = set()
    for subtasks in groups.values():
        grouped |= subtasks
        grouped.update(name for name, others in groups.items() if others < subtasks)
    return grouped


def _is_share(cell: TableCell) -> bool:
    """Return whether a score is a mean of items that are all from 0 to 1."""
    if cell.items is None or cell.items.scored.form != MEAN:
        return False
    values = cell.items.scored.values
    return bool(((values >= 0) & (values <= 1)).all())


def _join_tables(tables: Sequence[tuple[TableColumn, ItemTable]]) -> ItemTable:
    """Return the items of several tasks as one table, in which each task has the same weight."""
    keys: list[tuple[str, int]] = []
    records: list[ItemRecord] = []
    parts = []
    shares = []
    offset = 0
    for column, table in tables:
        # The same task can occur with several numbers of shots.
        keys += [(f"{task} {column.detail}", number) for task, number in table.keys]
        records += table.records
        parts.append(table.scored.parts + offset)
        shares.append(table.scored.shares / len(tables))
        offset += len(table.scored.shares)
    scored = ScoredItems(
        np.concatenate([table.scored.values for _, table in tables]),
        np.concatenate([table.scored.weights for _, table in tables]),
        np.concatenate(parts),
        np.concatenate(shares),
    )
    return ItemTable(keys, records, scored)


# -- comparisons


def match_items(tables: Sequence[ItemTable]) -> ScoredItems | str:
    """Return the values of several models on the items that all of them have, [items, models].

    Returns the reason instead if the models answered different items.
    """
    first = tables[0]
    if any(table.scored.form != first.scored.form for table in tables):
        return "the metric is aggregated in another way"
    indices = [{key: index for index, key in enumerate(table.keys)} for table in tables]
    shared = [key for key in first.keys if all(key in index for index in indices)]
    if not shared:
        return "they share no items"
    rows = [np.array([index[key] for key in shared]) for index in indices]
    for table, chosen in zip(tables[1:], rows[1:], strict=True):
        for first_row, row in zip(rows[0], chosen, strict=True):
            first_hashes = first.records[first_row].hashes
            hashes = table.records[row].hashes
            for name, expected, actual in zip(HASHED, first_hashes, hashes, strict=True):
                if expected != actual:
                    return f"the {name} differ"
        if not np.array_equal(table.scored.weights[chosen], first.scored.weights[rows[0]]):
            return "the weights of the items differ"
    first_parts = first.scored.parts[rows[0]]
    present_parts, part_indices = np.unique(first_parts, return_inverse=True)
    shares = first.scored.shares[present_parts]
    return ScoredItems(
        np.column_stack(
            [table.scored.values[chosen, 0] for table, chosen in zip(tables, rows, strict=True)]
        ),
        first.scored.weights[rows[0]],
        part_indices,
        shares / shares.sum(),
        first.scored.form,
    )


def compare_cells(first: TableCell, second: TableCell) -> ScoreDifference | str:
    """Return the second cell's score minus the first one's, or why the cells are not comparable."""
    for name, setting in first.settings.items():
        other = second.settings.get(name)
        if other != setting:
            setting_name = name.split(" ")[-1]
            return f"the {setting_name} differs ({_shorten(setting)} and {_shorten(str(other))})"
    if first.items is None or second.items is None:
        return "there are no items to compare"
    matched = match_items([first.items, second.items])
    return matched if isinstance(matched, str) else compare_pair(matched)


def _shorten(text: str) -> str:
    return text if len(text) <= 30 else f"{text[:27]}..."


def compare_with_base(
    cells: dict[tuple[str, TableColumn], TableCell],
    columns: Sequence[TableColumn],
    models: Sequence[str],
    base: str,
) -> None:
    """Add its difference from the base model to each cell, and a mark if it is beyond noise."""
    compared: list[tuple[str, TableColumn]] = []
    for column in columns:
        base_cell = cells.get((base, column))
        for model in models:
            cell = cells.get((model, column))
            if cell is None or base_cell is None or model == base:
                continue
            difference = compare_cells(base_cell, cell)
            if isinstance(difference, str):
                cells[model, column] = replace(cell, refusal=difference)
            else:
                cells[model, column] = replace(cell, difference=difference)
                compared.append((model, column))
    differences = [cells[key].difference for key in compared]
    corrected = adjust_for_comparisons([item.p_value for item in differences if item is not None])
    for key, p_value in zip(compared, corrected, strict=True):
        tested = cells[key].difference
        if tested is not None and tested.is_beyond_noise(p_value):
            is_better = (tested.value > 0) == key[1].rises
            cells[key] = replace(cells[key], mark=1 if is_better else -1)
