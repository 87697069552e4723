"""Pages for a folder of runs: the list, each run's report, and comparisons.

This module builds the answers to HTTP requests. The HTTP server is in another module.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

from weft.errors import UserError
from weft.observe import compare, report
from weft.observe.eval_files import ResultReader, describe_result_files
from weft.observe.eval_html import LINK_PAGE, render_changes, render_evaluations
from weft.observe.eval_items import find_changes
from weft.observe.eval_table import EvaluationTable, build_table
from weft.observe.metrics import find_title, format_number
from weft.observe.page import Page, PageSection, escape_text
from weft.observe.report import render_status
from weft.observe.run_files import RunFiles
from weft.observe.run_list import RunSummary, find_runs, list_runs

HOME = "./"
MAX_ITEMS = 50  # items of each kind on the page that compares two models
IsAlive = Callable[[Path], bool]  # returns whether a process works on the run in a folder


@dataclass(frozen=True)
class DashboardAnswer:
    """Response to an HTTP request.

    `status` is the HTTP status code. `tag` is the page's ETag, which changes whenever the page
    changes. `body` is empty if the client already has the page.
    """

    status: int
    body: str = ""
    tag: str = ""


NOT_FOUND = DashboardAnswer(404, "There is no such page.")


class Dashboard:
    """Dashboard that answers HTTP requests about the runs below the folder `root`.

    A run can only be requested by its name in the list, so a request cannot reach any other path of
    the file system.
    """

    def __init__(self, root: Path, is_alive: IsAlive | None = None) -> None:
        self.root = root
        self._is_alive = is_alive
        self._results = ResultReader()

    def answer(
        self, page: str, query: Mapping[str, Sequence[str]], known_tag: str = ""
    ) -> DashboardAnswer:
        """Answer a request for a page.

        `page` is "" for the list of runs, "run" for the page of one run, "compare" for the
        comparison of several runs, or "items" for the answers of two evaluated models. `query` has
        the name of the run under the key `name`, the names of the compared runs under the key
        `run`, or two models under the key `model`. `known_tag` is the tag of the page that the
        client already has, or "".
        """
        if page == "":
            return self._answer_index(known_tag)
        if page == LINK_PAGE:
            return self._answer_items(query, known_tag)
        names = query.get("name" if page == "run" else "run", ())
        runs = {self.find_run_name(path): path for path in find_runs(self.root)}
        if page not in ("run", "compare") or not names or any(name not in runs for name in names):
            return NOT_FOUND
        directories = [runs[name] for name in dict.fromkeys(names)]
        tag = _compute_tag(
            *(_describe_files(path) for path in directories),
            *(repr(describe_result_files(path)) for path in directories),
        )
        if tag == known_tag:
            return DashboardAnswer(304, tag=tag)
        try:
            runs_read = [RunFiles.read(path) for path in directories]
            if page == "run":
                built_page = report.build_page(
                    runs_read[0], live=tag, home=HOME, reader=self._results
                )
            else:
                built_page = compare.build_page(
                    runs_read, live=tag, home=HOME, reader=self._results
                )
        except UserError as error:
            return DashboardAnswer(400, str(error))
        return DashboardAnswer(200, built_page.render(), tag)

    def find_run_name(self, run: Path) -> str:
        """Return the name of a run: the path of its folder relative to the root.

        If the run is the root itself, this is the name of the folder.
        """
        name = run.relative_to(self.root).as_posix()
        return run.absolute().name if name == "." else name

    def _answer_index(self, known_tag: str) -> DashboardAnswer:
        runs = list_runs(self.root, self._is_alive)
        tag = _compute_tag(*(repr(run) for run in runs), self._describe_results())
        if tag == known_tag:
            return DashboardAnswer(304, tag=tag)
        evaluations = render_evaluations([self.root], self._results, linked=True)
        named_runs = [(self.find_run_name(run.path), run) for run in runs]
        page = build_index_page(named_runs, self.root, tag, evaluations)
        return DashboardAnswer(200, page.render(), tag)

    def _answer_items(self, query: Mapping[str, Sequence[str]], known_tag: str) -> DashboardAnswer:
        """Answer with the items on which two evaluated models differ.

        Only the tasks under the key `task` of `query` are included, or all tasks if there are none.
        """
        tag = _compute_tag(self._describe_results(), repr(sorted(query.items())))
        if tag == known_tag:
            return DashboardAnswer(304, tag=tag)
        models = list(query.get("model", ()))
        try:
            results = self._results.read([self.root])
        except UserError:
            return NOT_FOUND
        known_models = {score.model for score in results.scores}
        tasks = {score.task for score in results.scores}.intersection(query.get("task", ()))
        if len(models) != 2 or not known_models.issuperset(models):
            return NOT_FOUND
        table = build_table(results, self._results)
        page = build_items_page(table, (models[0], models[1]), tasks, tag)
        return DashboardAnswer(200, page.render(), tag)

    def _describe_results(self) -> str:
        return repr(describe_result_files(self.root))


def _describe_files(path: Path) -> str:
    """Return a string that changes whenever the run writes a file or becomes inactive.

    The string contains the sizes and modification times of the run's files.
    """
    files = sorted(file for file in path.iterdir() if file.is_file() and file.name != report.NAME)
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    newest = max((time_ns for _, _, time_ns in stats), default=0) / 1e9
    return repr((stats, time.time() - newest > 600))


def _compute_tag(*parts: str) -> str:
    return '"' + hashlib.sha256("\n".join(parts).encode(errors="replace")).hexdigest()[:24] + '"'


# -- the list


def build_index_page(
    runs: Sequence[tuple[str, RunSummary]], root: Path, tag: str, evaluations: str = ""
) -> Page:
    """Build the page that lists `runs`, which are pairs of a name and a summary.

    `evaluations` is the HTML of the table of evaluated checkpoints, or "".
    """
    num_running = sum(run.status == "running" for _, run in runs)
    summary = f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}" + (
        f", {num_running} of them running" if num_running else ""
    )
    top = (
        '<section class="hero alone" id="top"><div class="intro"><p class="eyebrow">folder: '
        f'{escape(str(root))}</p><h1>Runs</h1><p class="lede">{summary}.</p></div></section>'
    )
    if runs:
        content = _render_list(runs)
    else:
        content = (
            f'<div class="card"><p>No run is in {escape(str(root))} yet. Start one in another terminal, '
            "for example <code>weft demo</code>: it appears here automatically.</p></div>"
        )
    return Page(
        "Runs",
        top,
        [
            PageSection("runs", "All runs", content),
            PageSection("evaluations", "Evaluations", evaluations),
        ],
        "weft dashboard. Press Ctrl-C in its terminal to stop it.",
        live=tag,
    )


def build_items_page(
    table: EvaluationTable, models: tuple[str, str], tasks: Collection[str], tag: str
) -> Page:
    """Build the page with the items on which two models differ, in `tasks` or in all tasks."""
    changes = []
    for change in find_changes(table, *models, MAX_ITEMS):
        if not tasks or change.column.task in tasks:
            changes.append(change)
    names = [escape_text(table.names[model]) for model in models]
    top = (
        '<section class="hero alone" id="top"><div class="intro"><p class="eyebrow">evaluations</p>'
        f"<h1>{' <small>to</small> '.join(names)}</h1></div></section>"
    )
    return Page(
        f"{table.names[models[0]]} to {table.names[models[1]]}",
        top,
        [PageSection("items", "What changed", render_changes(table, changes))],
        "weft dashboard. Press Ctrl-C in its terminal to stop it.",
        live=tag,
        home=HOME,
    )


def _render_list(runs: Sequence[tuple[str, RunSummary]]) -> str:
    headings = ("run", "algorithm", "status", "steps", "last", "size", "changed")
    cells = "".join(
        f'<th scope="col"><button type="button">{heading}</button></th>' for heading in headings
    )
    rows = "".join(_render_row(name, run) for name, run in runs)
    if len(runs) > 1:
        compare_link = (
            '<p class="js" hidden><a class="button" id="compare">Choose two runs to compare</a></p>'
        )
    else:
        compare_link = ""
    return (
        f'{compare_link}<div class="card scroll"><table class="runs sortable"><thead><tr><th></th>{cells}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _render_row(name: str, run: RunSummary) -> str:
    if run.step is None:
        steps = "–"
    else:
        steps = f"{run.step:,}" + (f" of {run.total_steps:,}" if run.total_steps else "")
    share = '<i class="meter empty" aria-hidden="true"></i>'  # keeps the text aligned
    if run.step and run.total_steps:
        share = f'<i class="meter" aria-hidden="true"><i style="width:{min(100, 100 * run.step // run.total_steps)}%"></i></i>'
    if run.metric and run.value is not None:
        last_value = f"{find_title(run.metric)} <b>{format_number(run.value)}</b>"
    else:
        last_value = "–"
    if run.is_flagged:
        diagnosis = f'<p class="diagnosis wrong">{escape(str(run.diagnosis))}</p>'
    else:
        diagnosis = ""
    age = "" if run.changed is None else format_age(time.time() - run.changed)
    cells = (
        _render_cell(
            name, f'<a href="run?name={quote(name, safe="")}">{escape(name)}</a>{diagnosis}'
        ),
        _render_cell(run.algorithm or "", escape(run.algorithm or "–")),
        _render_cell(run.status, render_status(run.status, is_flagged=run.is_flagged)),
        _render_cell("" if run.step is None else str(run.step), f"{share}{steps}"),
        _render_cell("" if run.value is None else str(run.value), last_value),
        _render_cell(str(run.num_bytes), format_size(run.num_bytes)),
        _render_cell(
            "" if run.changed is None else str(-run.changed), f"{age} ago" if age else "–"
        ),
    )
    checkbox = f'<input type="checkbox" name="run" value="{escape(name)}" aria-label="Compare {escape(name)}">'
    return f"<tr><td>{checkbox}</td>{''.join(cells)}</tr>"


def format_age(seconds: float) -> str:
    """Format a duration in whole units, such as `20 s`, `8 min`, `3 h` or `2 days`."""
    for unit_seconds, unit in ((86400, "day"), (3600, "h"), (60, "min")):
        if seconds >= unit_seconds:
            count = int(seconds // unit_seconds)
            return f"{count} {unit}{'s' if unit == 'day' and count > 1 else ''}"
    return f"{max(0, int(seconds))} s"


def _render_cell(key: str, content: str) -> str:
    """Render a cell of the list; `key` is the value by which the page's script sorts it."""
    return f'<td data-sort="{escape(key)}">{content}</td>'


def format_size(num_bytes: int) -> str:
    """Format a number of bytes with a unit, such as `12 MB`."""
    value = float(num_bytes)
    unit = "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    if value >= 10 or unit == "B":
        return f"{value:.0f} {unit}"
    return f"{value:.1f} {unit}"
