"""`weft eval table DIR`: scores of checkpoints by task, with intervals and what changed.

The results are those of `weft eval suite`, or of lm-evaluation-harness itself.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import ConfigError, DataError

if TYPE_CHECKING:
    from weft.observe.eval_cells import TableCell, TableColumn
    from weft.observe.eval_items import ColumnChanges, ItemChange
    from weft.observe.eval_table import EvaluationTable

EPILOG = """examples:
  weft eval table runs/
  weft eval table runs/E/T --by gsm8k --base T@step10
  weft eval table runs/ --items T@step10 T@step40 --task gsm8k
  weft eval table runs/ --out evaluations.html"""
MARKS = {1: "▲", -1: "▼", 0: ""}  # better or worse by more than noise, or neither
DEFAULT_LIMIT = 5
MAX_TEXT_LENGTH = 600  # maximum characters of a prompt or an answer in the terminal
GAP = 2  # spaces between columns


def add_parser(commands: Any) -> None:
    """Add the command `table` to the commands of `weft eval`."""
    table = commands.add_parser(
        "table",
        help="show scores of checkpoints by task, with intervals and what changed",
        description=__doc__,
        epilog=EPILOG,
    )
    table.set_defaults(run=run)
    table.add_argument(
        "folders",
        metavar="DIR",
        nargs="*",
        type=Path,
        default=[Path("runs")],
        help="folders with results: checkpoints, runs, or folders of runs (./runs)",
    )
    table.add_argument(
        "--task", action="append", default=[], help="show this task alone, with all its metrics"
    )
    table.add_argument(
        "--all", action="store_true", help="show every metric, and the subtasks of groups"
    )
    table.add_argument(
        "--base",
        metavar="NAME",
        default="",
        help="model that the others are compared with (default: the first row)",
    )
    table.add_argument(
        "--by",
        metavar="METRIC",
        default="",
        help="sort by this task, metric or TASK:METRIC, which also decides what is best (default: "
        "the average over tasks)",
    )
    table.add_argument(
        "--items",
        nargs=2,
        metavar=("A", "B"),
        help="show the items on which two models differ, with both answers",
    )
    table.add_argument(
        "--limit",
        type=int,
        default=DEFAULT_LIMIT,
        metavar="N",
        help=f"items of each kind that --items prints (default {DEFAULT_LIMIT}; 0: all)",
    )
    table.add_argument("--json", action="store_true", help="print everything as JSON")
    table.add_argument("--out", type=Path, metavar="FILE.html", help="write an HTML page")


def run(arguments: argparse.Namespace) -> int:
    """Run `weft eval table ...` and return the exit code.

    Raises `DataError` if there are no results, and `ConfigError` for names that no result has.
    """
    from weft.observe.eval_files import ResultReader
    from weft.observe.eval_items import find_changes
    from weft.observe.eval_table import TableOptions, build_table, find_model_name
    from weft.observe.jsonl import convert_to_json
    from weft.writing import resolve_destination

    if arguments.limit < 0:
        raise ConfigError(f"--limit {arguments.limit}: must be 0 (all items) or more")
    if arguments.out is not None:
        resolve_destination(arguments.out)  # raises before anything is read
    reader = ResultReader()
    results = reader.read([folder.expanduser() for folder in arguments.folders])
    if not results.scores:
        raise _build_empty_error(arguments.folders, results.notes)
    options = TableOptions(
        tasks=arguments.task,
        everything=arguments.all,
        base=arguments.base,
        by=arguments.by,
    )
    table = build_table(results, reader, options)
    changes = None
    if arguments.items is not None:
        first, second = (find_model_name(name, table.names) for name in arguments.items)
        show_all = arguments.json or arguments.out is not None or not arguments.limit
        changes = find_changes(table, first, second, None if show_all else arguments.limit)
    if arguments.out is not None:
        _write_page(arguments.out, table, changes)
    if arguments.json:
        content = convert_to_json(convert_table(table, changes))
        print(json.dumps(content, indent=1, allow_nan=False))
    elif arguments.out is not None:
        print(arguments.out)
    elif changes is not None:
        _print_lines(format_changes(table, changes))
    else:
        from weft.cli.help import get_terminal_width

        _print_lines(format_table(table, get_terminal_width()))
    return 0


def _print_lines(lines: Iterable[str]) -> None:
    """Print lines, with control characters in names and texts replaced by visible symbols."""
    from weft.observe.page import replace_control_characters

    for line in lines:
        print(replace_control_characters(line))


def _build_empty_error(folders: Sequence[Path], notes: Sequence[str]) -> DataError:
    """Return the error for folders without scores; `notes` are the problems of their files."""
    listed = ", ".join(str(folder) for folder in folders)
    if notes:
        return DataError([f"{listed}: no result can be used", *notes])
    return DataError(
        f"{listed}: no results_*.json of an evaluation is below; make some with weft eval suite "
        f"MODEL --tasks ..., or name the folder that has them"
    )


def _write_page(
    path: Path, table: EvaluationTable, changes: Sequence[ColumnChanges] | None
) -> None:
    from weft.observe.eval_html import (
        MAX_ITEMS_IN_SECTION,
        choose_pair,
        render_changes,
        render_table,
    )
    from weft.observe.eval_items import find_changes
    from weft.observe.page import Page, PageSection, escape_text, write

    first, second = choose_pair(table)
    if changes is not None:
        heading = "What changed"
    else:
        heading = f"What changed from {table.names[first]} to {table.names[second]}"
        changes = (
            find_changes(table, first, second, MAX_ITEMS_IN_SECTION) if first != second else []
        )
    count = f"{len(table.names)} checkpoint{'' if len(table.names) == 1 else 's'}"
    header = (
        '<section class="hero alone" id="top"><div class="intro"><p class="eyebrow">'
        f"{escape_text(count)}</p><h1>Evaluations</h1></div></section>"
    )
    sections = [
        PageSection("scores", "Scores", render_table(table)),
        PageSection("items", heading, render_changes(table, changes) if changes else ""),
    ]
    write(path, Page("Evaluations", header, sections, "weft eval table").render())


# -- the terminal


def format_table(table: EvaluationTable, width: int) -> Iterator[str]:
    """Yield the lines of a table of at most `width` columns, unless a single task needs more.

    Tasks that do not fit follow in another block of lines, which repeats the names of the models.
    """
    yield from textwrap.wrap(table.verdict, width, break_long_words=False)
    yield ""
    names = dict(table.names)
    names[table.base] += " (base)"
    name_width = max(len(name) for name in [*names.values(), "checkpoint"])
    blocks: list[list[list[str]]] = [[]]
    used_width = name_width
    for column in table.columns:
        texts = _format_column(table, column)
        column_width = max(map(len, texts)) + GAP
        if blocks[-1] and used_width + column_width > width:
            blocks.append([])
            used_width = name_width
        blocks[-1].append(texts)
        used_width += column_width
    for block in blocks:
        labels = ["checkpoint", "", *names.values()]
        for row, label in enumerate(labels):
            cells = [texts[row].rjust(max(map(len, texts)) + GAP) for texts in block]
            yield f"{label:{name_width}}{''.join(cells)}".rstrip()
        yield ""
    notes_on_direction = (
        [] if all(column.rises for column in table.columns) else ["↓: lower is better"]
    )
    for note in [*notes_on_direction, *table.notes]:
        yield from textwrap.wrap(
            note, width, initial_indent="- ", subsequent_indent="  ", break_long_words=False
        )


def _format_column(table: EvaluationTable, column: TableColumn) -> list[str]:
    """Return the texts of a column: task, metric, and a cell for each model."""
    from weft.observe.eval_table import format_interval, format_score

    cells = [table.cells.get((model, column)) for model in table.names]
    intervals = [format_interval(cell.interval) if cell else "" for cell in cells]
    marks = [_choose_mark(cell) for cell in cells]
    widest = max(map(len, intervals))
    texts = []
    for cell, interval, mark in zip(cells, intervals, marks, strict=True):
        text = "-" if cell is None else f"{format_score(cell.value)} {interval:{widest}}".rstrip()
        # Cells without a mark get a space in its place, so that the numbers are aligned.
        texts.append(f"{text} {mark:1}" if any(marks) else text)
    direction = "" if column.rises else " ↓"
    return [column.task, f"{column.detail}{direction}", *texts]


def _choose_mark(cell: TableCell | None) -> str:
    if cell is None:
        return ""
    return "≠" if cell.refusal else MARKS[cell.mark]


def format_changes(table: EvaluationTable, changes: Sequence[ColumnChanges]) -> Iterator[str]:
    """Yield lines with the items on which two models differ, for each task."""
    if not changes:
        yield "the two models have no task in common"
    for each in changes:
        first, second = (table.names[model] for model in each.models)
        yield f"{each.column.label}: {first} to {second}: {each.describe()}"
        for change in each.changes:
            yield ""
            yield from _format_item(change, (first, second))
        total = sum((each.counts or {}).values())
        if total > len(each.changes):
            yield ""
            yield f"{total - len(each.changes)} more items changed; --limit 0 shows all"
        yield ""


def _format_item(change: ItemChange, names: tuple[str, str]) -> Iterator[str]:
    yield f"  {change.kind}  {change.task}, item {change.number}"
    width = max(len(name) for name in ("prompt", "target", *names))
    yield from _format_text("prompt", change.prompt, width)
    if change.target:
        yield from _format_text("target", change.target, width)
    for name, answer in zip(names, change.answers, strict=True):
        note = ""
        if answer.filtered.startswith("log-likelihood "):
            note = f"  ({answer.filtered})"
        elif answer.filtered:
            note = f"  (read as: {answer.filtered})"
        yield from _format_text(name, answer.text + note, width)


def _format_text(label: str, text: str, width: int) -> Iterator[str]:
    """Yield the lines of a labelled text.

    Of a long text, only the end is shown, because a prompt ends with the question.
    """
    excerpt = text if len(text) <= MAX_TEXT_LENGTH else f"...{text[-MAX_TEXT_LENGTH:]}"
    for index, line in enumerate(excerpt.split("\n") or [""]):
        yield f"    {label if index == 0 else '':{width}}  {line}".rstrip()


# -- JSON


def convert_table(
    table: EvaluationTable, changes: Sequence[ColumnChanges] | None
) -> dict[str, Any]:
    """Return the table, and the changed items unless `changes` is None, as values for JSON."""
    decider = table.decider
    content: dict[str, Any] = {
        "verdict": table.verdict,
        "best": table.best,
        "by": None if decider is None else decider.label,
        "base": table.base,
        "names": dict(table.names),
        "columns": [
            {
                "task": column.task,
                "metric": column.measure,
                "shots": column.shots,
                "higher_is_better": column.rises,
            }
            for column in table.columns
        ],
        "scores": [
            {"model": model, "task": column.task, "metric": column.measure, "shots": column.shots}
            | _convert_cell(cell)
            for (model, column), cell in table.cells.items()
        ],
        "notes": list(table.notes),
    }
    if changes is not None:
        content["changes"] = [_convert_changes(each) for each in changes]
    return content


def _convert_cell(cell: TableCell) -> dict[str, Any]:
    difference = None
    if cell.difference is not None:
        difference = {
            "value": cell.difference.value,
            "interval": [cell.difference.low, cell.difference.high],
            "p": cell.difference.p_value,
            "items": cell.difference.num_items,
        }
    return {
        "value": cell.value,
        "interval": None if cell.interval is None else list(cell.interval),
        "interval_method": cell.method or None,
        "items": cell.num_items,
        "file": None if cell.score is None else str(cell.score.path),
        "beyond_noise": {1: "better", -1: "worse", 0: None}[cell.mark],
        "not_compared": cell.refusal or None,
        "difference": difference,
    }


def _convert_changes(changes: ColumnChanges) -> dict[str, Any]:
    return {
        "task": changes.column.task,
        "metric": changes.column.measure,
        "models": list(changes.models),
        "not_compared": changes.refusal or None,
        "shared_items": changes.num_shared,
        "counts": dict(changes.counts or {}),
        "items": [
            {
                "change": change.kind,
                "task": change.task,
                "doc_id": change.number,
                "prompt": change.prompt,
                "target": change.target,
                "answers": [
                    {
                        "text": answer.text,
                        "filtered": answer.filtered or None,
                        "value": answer.value,
                    }
                    for answer in change.answers
                ],
            }
            for change in changes.changes
        ],
    }
