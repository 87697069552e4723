"""Pages over a folder of runs: the list, each run's report, and comparisons.

Builds the answers to HTTP requests; the server itself is elsewhere.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

from weft.errors import UserError
from weft.observe import compare, report
from weft.observe.metrics import number, title
from weft.observe.page import Page, Section
from weft.observe.run_files import RunFiles
from weft.observe.run_list import RunSummary, find_runs, list_runs
from weft.observe.sections import status

HOME = "./"
Alive = Callable[[Path], bool]


@dataclass(frozen=True)
class Answer:
    """An HTTP answer: status, page and tag.

    `tag` changes when the page does. `body` is empty if the reader already has the page.
    """

    status: int
    body: str = ""
    tag: str = ""


NOT_FOUND = Answer(404, "There is no such page.")


class Dashboard:
    """Answers requests for the runs below `root`.

    A run can only be requested by the name it is listed under, so no path from a request reaches
    the file system.
    """

    def __init__(self, root: Path, alive: Alive | None = None) -> None:
        self.root = root
        self._alive = alive

    def answer(self, page: str, query: Mapping[str, Sequence[str]], known: str = "") -> Answer:
        """Answer a request for the page `""`, `run?name=...` or `compare?run=...&run=...`.

        `known` is the tag of the page that the reader already has.
        """
        if page == "":
            return self._index(known)
        names = query.get("name" if page == "run" else "run", ())
        runs = {self.name(path): path for path in find_runs(self.root)}
        if page not in ("run", "compare") or not names or any(name not in runs for name in names):
            return NOT_FOUND
        chosen = [runs[name] for name in dict.fromkeys(names)]
        tag = _tag(*(_marks(path) for path in chosen))
        if tag == known:
            return Answer(304, tag=tag)
        try:
            read = [RunFiles.read(path) for path in chosen]
            if page == "run":
                made = report.page(read[0], live=tag, home=HOME)
            else:
                made = compare.page(read, live=tag, home=HOME)
        except UserError as error:
            return Answer(400, str(error))
        return Answer(200, made.html(), tag)

    def name(self, run: Path) -> str:
        """Return a run's name: the path of its folder relative to the root."""
        found = run.relative_to(self.root).as_posix()
        return run.absolute().name if found == "." else found

    def _index(self, known: str) -> Answer:
        runs = list_runs(self.root, self._alive)
        tag = _tag(*(repr(run) for run in runs))
        if tag == known:
            return Answer(304, tag=tag)
        return Answer(
            200, index([(self.name(run.path), run) for run in runs], self.root, tag).html(), tag
        )


def _marks(path: Path) -> str:
    """Return the sizes and times of a run's files as text, and whether the run is inactive.

    The text changes whenever the run writes something.
    """
    files = sorted(each for each in path.iterdir() if each.is_file() and each.name != report.NAME)
    stats = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    newest = max((at for _, _, at in stats), default=0) / 1e9
    return repr((stats, time.time() - newest > 600))


def _tag(*parts: str) -> str:
    return '"' + hashlib.sha256("\n".join(parts).encode(errors="replace")).hexdigest()[:24] + '"'


# -- the list


def index(runs: Sequence[tuple[str, RunSummary]], root: Path, tag: str) -> Page:
    """Build the page with the list of runs."""
    going = sum(run.status == "running" for _, run in runs)
    told = f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}" + (
        f", {going} of them running" if going else ""
    )
    top = (
        '<section class="hero alone" id="top"><div class="intro"><p class="eyebrow">folder: '
        f'{escape(str(root))}</p><h1>Runs</h1><p class="lede">{told}.</p></div></section>'
    )
    if runs:
        content = _list(runs)
    else:
        content = f'<div class="card"><p>No run is in {escape(str(root))} yet. {_first()}</p></div>'
    return Page(
        "Runs",
        top,
        [Section("runs", "All runs", content)],
        "weft dashboard. Press Ctrl-C in its terminal to stop it.",
        live=tag,
    )


def _first() -> str:
    return "Start one in another terminal, for example <code>weft demo</code>: it appears here automatically."


def _list(runs: Sequence[tuple[str, RunSummary]]) -> str:
    heads = ("run", "algorithm", "status", "steps", "last", "size", "changed")
    cells = "".join(f'<th scope="col"><button type="button">{head}</button></th>' for head in heads)
    rows = "".join(_row(name, run) for name, run in runs)
    if len(runs) > 1:
        choose = (
            '<p class="js" hidden><a class="button" id="compare">Choose two runs to compare</a></p>'
        )
    else:
        choose = ""
    return (
        f'{choose}<div class="card scroll"><table class="runs sortable"><thead><tr><th></th>{cells}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _row(name: str, run: RunSummary) -> str:
    if run.step is None:
        steps = "–"
    else:
        steps = f"{run.step:,}" + (f" of {run.total_steps:,}" if run.total_steps else "")
    share = '<i class="meter empty" aria-hidden="true"></i>'  # keeps the text aligned
    if run.step and run.total_steps:
        share = f'<i class="meter" aria-hidden="true"><i style="width:{min(100, 100 * run.step // run.total_steps)}%"></i></i>'
    if run.metric and run.value is not None:
        last = f"{title(run.metric)} <b>{number(run.value)}</b>"
    else:
        last = "–"
    if run.flagged:
        told = f'<p class="diagnosis wrong">{escape(str(run.diagnosis))}</p>'
    else:
        told = ""
    since = "" if run.changed is None else age(time.time() - run.changed)
    cells = (
        _cell(name, f'<a href="run?name={quote(name, safe="")}">{escape(name)}</a>{told}'),
        _cell(run.algorithm or "", escape(run.algorithm or "–")),
        _cell(run.status, status(run.status, flagged=run.flagged)),
        _cell("" if run.step is None else str(run.step), f"{share}{steps}"),
        _cell("" if run.value is None else str(run.value), last),
        _cell(str(run.num_bytes), size(run.num_bytes)),
        _cell("" if run.changed is None else str(-run.changed), f"{since} ago" if since else "–"),
    )
    box = f'<input type="checkbox" name="run" value="{escape(name)}" aria-label="Compare {escape(name)}">'
    return f"<tr><td>{box}</td>{''.join(cells)}</tr>"


def age(seconds: float) -> str:
    """Format a time span in its largest unit: `8 min`, `3 h`, `2 days`."""
    for size_of, word in ((86400, "day"), (3600, "h"), (60, "min")):
        if seconds >= size_of:
            whole = int(seconds // size_of)
            return f"{whole} {word}{'s' if word == 'day' and whole > 1 else ''}"
    return f"{max(0, int(seconds))} s"


def _cell(key: str, content: str) -> str:
    return f'<td data-sort="{escape(key)}">{content}</td>'


def size(num_bytes: int) -> str:
    """Format a number of bytes: `12 MB`."""
    value = float(num_bytes)
    unit = "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    if value >= 10 or unit == "B":
        return f"{value:.0f} {unit}"
    return f"{value:.1f} {unit}"
