"""Evaluations as HTML: the table of checkpoints by tasks, and items on which two models differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from urllib.parse import urlencode

from weft.errors import UserError
from weft.observe.eval_cells import TableCell, TableColumn
from weft.observe.eval_files import ResultReader
from weft.observe.eval_items import (
    RIGHT_TO_WRONG,
    WRONG_TO_RIGHT,
    ColumnChanges,
    ItemAnswer,
    ItemChange,
    find_changes,
)
from weft.observe.eval_table import (
    EvaluationTable,
    build_table,
    format_interval,
    format_score,
)
from weft.observe.page import escape_text, render_folded

MARKS = {1: ("▲", "good", "better"), -1: ("▼", "bad", "worse")}
MAX_ITEMS_IN_SECTION = 5  # items of each kind in a section of a page
LINK_PAGE = "items"  # page of the dashboard that compares two models
LinkBuilder = Callable[[str, str], str]  # (model, task) -> address, or "" for no link


def render_evaluations(
    folders: Sequence[Path], reader: ResultReader, *, linked: bool = False
) -> str:
    """Render the results of all models below some folders: table, verdict and changed items.

    With `linked`, each score is a link to the dashboard's page with the changed items. Returns ""
    if there are no results.
    """
    try:
        results = reader.read(folders)
    except UserError:
        return ""  # a folder is too large to be searched
    if not results.scores:
        return ""
    table = build_table(results, reader)
    if linked:
        return render_table(table, _make_link_to_base(table))
    first, second = choose_pair(table)
    if first == second:
        return render_table(table)
    changes = find_changes(table, first, second, MAX_ITEMS_IN_SECTION)
    heading = f"What changed from {escape(table.names[first])} to {escape(table.names[second])}"
    folded = render_folded(heading, render_changes(table, changes), "evaluation items")
    return render_table(table) + folded


def choose_pair(table: EvaluationTable) -> tuple[str, str]:
    """Return the two models whose items are compared: the base and the best model.

    If the base is the best model, the second one is the last model of the table.
    """
    last = list(table.names)[-1]
    return table.base, last if table.best == table.base else table.best


def _make_link_to_base(table: EvaluationTable) -> LinkBuilder:
    """Return a function that links a score to the page that compares it with the base's."""

    def build_address(model: str, task: str) -> str:
        if model == table.base:
            return ""
        query = urlencode([("model", table.base), ("model", model), ("task", task)])
        return f"{LINK_PAGE}?{query}"

    return build_address


def render_table(table: EvaluationTable, build_link: LinkBuilder | None = None) -> str:
    """Render the table with its verdict and its notes.

    `build_link` returns the address of the page that compares a model's items with the base's.
    """
    value_ranges = [_find_range(table, column) for column in table.columns]
    headings = "".join(
        f'<th scope="col"><button type="button">{escape_text(column.task)}'
        f"<small>{escape_text(column.detail)}{'' if column.rises else ', lower is better'}</small>"
        "</button></th>"
        for column in table.columns
    )
    rows = []
    for model, name in table.names.items():
        cells = []
        for column, value_range in zip(table.columns, value_ranges, strict=True):
            cell = table.cells.get((model, column))
            address = build_link(model, column.task) if build_link and cell and cell.score else ""
            cells.append(_render_cell(cell, value_range, address))
        tags = " <small>base</small>" if model == table.base else ""
        tags += ' <small class="good">best</small>' if model == table.best else ""
        rows.append(
            f'<tr><th scope="row" title="{escape_text(model)}">{escape_text(name)}{tags}</th>'
            f"{''.join(cells)}</tr>"
        )
    notes = "".join(f"<li>{escape_text(note)}</li>" for note in table.notes)
    hint = (
        "<li>a score is a link to the items that changed from the base</li>" if build_link else ""
    )
    return (
        f'<p class="verdict-line">{escape_text(table.verdict)}</p>'
        '<div class="card scroll" tabindex="0" role="region" aria-label="Scores">'
        '<table class="runs numbers sortable scores"><thead><tr><th scope="col">'
        f'<button type="button">checkpoint</button></th>{headings}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        f'<ul class="note">{notes}{hint}</ul>'
    )


def _find_range(table: EvaluationTable, column: TableColumn) -> tuple[float, float]:
    """Return the lowest and the highest of all values and interval ends in a column."""
    ends: list[float] = []
    for model in table.names:
        cell = table.cells.get((model, column))
        if cell is not None:
            ends += [cell.value, *(cell.interval or ())]
    return (min(ends), max(ends)) if ends else (0.0, 0.0)


def _render_cell(cell: TableCell | None, value_range: tuple[float, float], address: str) -> str:
    """Render a score with its mark and interval; `value_range` is that of its column."""
    if cell is None:
        return '<td data-sort="" class="quiet">–</td>'
    value = f"<b>{format_score(cell.value)}</b>"
    if address:
        value = f'<a href="{escape(address)}">{value}</a>'
    mark = ""
    if cell.mark:
        symbol, style, comparison = MARKS[cell.mark]
        mark = f' <span class="{style}" title="{_describe_difference(cell)}">{symbol}</span>'
        mark += f'<span class="skip">{comparison} than the base beyond noise</span>'
    elif cell.refusal:
        mark = f' <span class="quiet" title="{escape_text(cell.refusal)}">≠</span>'
    interval = f"<small>{format_interval(cell.interval)}</small>" if cell.interval else ""
    return f'<td data-sort="{cell.value!r}">{value}{mark}{interval}{_render_bar(cell, value_range)}</td>'


def _describe_difference(cell: TableCell) -> str:
    """Describe a cell's difference from the base model; "" if it is unknown."""
    difference = cell.difference
    if difference is None:
        return ""
    interval = format_interval((difference.low, difference.high))
    return f"{difference.value:+.3g} from the base, {interval}, {difference.num_items:,} items"


def _render_bar(cell: TableCell, value_range: tuple[float, float]) -> str:
    """Render the interval as a bar on the column's common scale, with a dot at the score."""
    low, high = value_range
    if cell.interval is None or high <= low:
        return ""
    left, right, dot = (
        100 * (value - low) / (high - low) for value in (*cell.interval, cell.value)
    )
    return (
        '<i class="span" aria-hidden="true">'
        f'<i style="left:{left:.1f}%;width:{right - left:.1f}%"></i>'
        f'<b style="left:{dot:.1f}%"></b></i>'
    )


# -- items


def render_changes(table: EvaluationTable, changes: Sequence[ColumnChanges]) -> str:
    """Render the items on which two models differ, task by task."""
    blocks = []
    for column_changes in changes:
        names = [table.names[model] for model in column_changes.models]
        items = "".join(_render_item(change, names) for change in column_changes.changes)
        total = sum((column_changes.counts or {}).values())
        hint = ""
        if total > len(column_changes.changes):
            hint = f'<p class="note">{len(column_changes.changes)} of {total} changed items are shown.</p>'
        blocks.append(
            f"<h3>{escape_text(column_changes.column.label)}</h3>"
            f'<p class="note">{escape_text(" to ".join(names))}: '
            f"{_draw_arrows(escape_text(column_changes.describe()))}</p>{items}{hint}"
        )
    if not blocks:
        return "<p>The two models have no task in common.</p>"
    return f'<div class="changes">{"".join(blocks)}</div>'


def _render_item(change: ItemChange, names: Sequence[str]) -> str:
    """Render an item with its prompt, its target and both models' answers."""
    styles = {RIGHT_TO_WRONG: ("good", "bad"), WRONG_TO_RIGHT: ("bad", "good")}
    answers = "".join(
        _render_answer(answer, name, style)
        for answer, name, style in zip(
            change.answers, names, styles.get(change.kind, ("", "")), strict=True
        )
    )
    kind = _draw_arrows(escape_text(change.kind))
    target = ""
    if change.target:
        target = (
            f'<div class="reference" tabindex="0"><b>Target</b> {escape_text(change.target)}</div>'
        )
    return (
        '<article class="group-of" data-columns="2">'
        f"<header><span><b>{kind}</b></span><span>{escape_text(change.task)}</span>"
        f"<span>item {change.number}</span></header>"
        f'<div class="prompt" tabindex="0" aria-label="prompt">{escape_text(change.prompt)}</div>'
        f"{target}"
        f'<div class="answers">{answers}</div></article>'
    )


def _draw_arrows(text: str) -> str:
    """Replace escaped `->` with an arrow."""
    return text.replace("-&gt;", "→")


def _render_answer(answer: ItemAnswer, name: str, style: str) -> str:
    text = escape_text(answer.text) or '<span class="quiet">(empty)</span>'
    outcome = {"good": " · right", "bad": " · wrong"}.get(style, "")
    filtered = ""
    if answer.filtered:
        is_likelihood = answer.filtered.startswith("log-likelihood ")
        label = answer.filtered if is_likelihood else f"read as: {answer.filtered}"
        filtered = f"<span>{escape_text(label)}</span>"
    value = f"<span>score {format_score(answer.value)}</span>"
    return (
        f'<div class="answer"><p class="verdict {style}">{escape_text(name)}{outcome}</p>'
        f'<div class="completion" tabindex="0" aria-label="answer">{text}</div>'
        f"<footer>{value}{filtered}</footer></div>"
    )
