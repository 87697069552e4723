"""List the runs in a folder: progress, validation metric, size, and warnings about bad values.

The last reward or loss is shown for runs without a validation metric.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.cli.named_run import name_place, open_root
from weft.cli.parsing import CommandParser, split_names
from weft.errors import ConfigError, build_unknown_name_error
from weft.observe.metrics import find_title, format_number
from weft.observe.run_list import RunSummary, count_tree_bytes, list_runs
from weft.storage.views import count_view_bytes

STATUSES = ("running", "finished", "stopped", "failed", "unfinished")
COLORS = {
    "running": "cyan",
    "finished": "green",
    "stopped": "yellow",
    "failed": "red",
    "unfinished": "yellow",
}
DEMO_STATUS_ORDER = ("running", "failed", "unfinished", "stopped", "finished")
DEMO_FOLDER = re.compile(r"demo(-\d+)?")  # names of the folders of `weft demo`
MATERIAL = "material"  # folder of a demo with its data and its first model
WIDE_TERMINAL = 110  # minimum columns for showing less important columns
PIPED_WIDTH = 200  # width if the output is not a terminal and COLUMNS is not set
MIN_NAME_WIDTH = 24  # a run's name keeps this width before other columns are dropped
GAP = 2  # spaces between columns
TRUNCATABLE_COLUMNS = ("run", "metric")  # columns that can be truncated
# columns to drop in a narrow terminal, in this order
DROPPABLE_COLUMNS = ("metric", "written", "size", "age", "algorithm")
UNKNOWN = "–"
SORT_KEYS: dict[str, Callable[[RunSummary], Any]] = {
    "age": lambda run: -(run.changed or 0.0),
    "name": lambda run: (run.experiment, run.trial),
    "status": lambda run: STATUSES.index(run.status) if run.status in STATUSES else len(STATUSES),
    "steps": lambda run: -(run.step or 0),
    "value": lambda run: (run.value is None, -(run.value or 0.0)),
    "size": lambda run: -run.num_bytes,
}
EPILOG = """examples:
  weft ls                               the runs in ./runs, the newest first
  weft ls runs/demo                     the runs of one demo, which other lists show as one line
  weft ls /data/runs --sort size        the largest first
  weft ls --status running,failed
  weft ls --json | jq '.[0].path'"""


def main(argv: Sequence[str]) -> int:
    """Run `weft ls` and return the exit code 0.

    Raises `ConfigError` for an unknown folder, sort key or status.
    """
    parser = CommandParser(
        prog="weft ls", description=__doc__, epilog=EPILOG, url_arguments=("root",)
    )
    parser.add_argument(
        "root", nargs="?", default="./runs", metavar="ROOT", help="folder of runs (./runs)"
    )
    parser.add_argument(
        "--sort",
        default="age",
        metavar="BY",
        help=f"{', '.join(SORT_KEYS)} (age: the newest first)",
    )
    parser.add_argument("--reverse", action="store_true", help="reverse the order")
    parser.add_argument(
        "--status",
        default="",
        metavar="S[,S]",
        help=f"only runs with one of these statuses: {', '.join(STATUSES)}",
    )
    parser.add_argument(
        "--algorithm",
        default="",
        metavar="A[,A]",
        help="only runs of these algorithms: sft, rw, ppo, ...",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON: one object per run, with exact numbers"
    )
    arguments = parser.parse_args(list(argv))
    if arguments.sort not in SORT_KEYS:
        raise build_unknown_name_error("--sort", arguments.sort, SORT_KEYS)
    # Choose the runs and their order.
    root = open_root(arguments.root)
    is_filtered = bool(arguments.status or arguments.algorithm)
    runs = select_runs(root, split_names([arguments.status]), split_names([arguments.algorithm]))
    if not arguments.json and not is_filtered:
        runs = fold_demos(runs, root)
    runs.sort(key=SORT_KEYS[arguments.sort])
    if arguments.reverse:
        runs.reverse()
    # Print JSON, or a table and a line for each run with a warning.
    if arguments.json:
        print(json.dumps([asdict(run) | {"path": name_place(run.path)} for run in runs], indent=1))
    elif runs:
        terminal = sys.stdout.isatty()
        columns = os.environ.get("COLUMNS", "")
        piped_width = int(columns) if columns.isdecimal() and int(columns) else PIPED_WIDTH
        console = Console(width=None if terminal else piped_width, highlight=False)
        console.print(build_table(runs, console.width))
        for demo in (run.path for run in runs if not run.trial):
            console.print(
                f"weft ls {name_place(demo)} lists the runs of this demo",
                style="bright_black",
                soft_wrap=True,
            )
        for run in runs:
            if run.is_flagged:
                line = Text.assemble(
                    (f"! {run.experiment}/{run.trial}: ", "bold yellow"), str(run.diagnosis)
                )
                console.print(line, soft_wrap=not terminal)
    else:
        print(f"no run in {arguments.root}" + (" matches the filters" if is_filtered else ""))
    return 0


def select_runs(root: Path, statuses: Sequence[str], algorithms: Sequence[str]) -> list[RunSummary]:
    """Return the runs in `root` with one of the statuses and one of the algorithms.

    An empty list selects all statuses or all algorithms. Raises `ConfigError` for a missing folder
    or an unknown status.
    """
    from weft.launch.stop import is_alive

    if not root.is_dir():
        raise ConfigError(
            f"{root}: there is no such folder; name the folder of your runs, usually ./runs"
        )
    for status in statuses:
        if status not in STATUSES:
            raise build_unknown_name_error("--status", status, STATUSES)
    result: list[RunSummary] = []
    for run in list_runs(root, is_alive):
        if (not statuses or run.status in statuses) and (
            not algorithms or run.algorithm in algorithms
        ):
            result.append(replace(run, num_bytes=count_bytes(run.path)))
    return result


def count_bytes(folder: Path) -> int:
    """Return the bytes of a folder's files or, for a view, of the files in the bucket."""
    in_bucket = count_view_bytes(folder)
    return count_tree_bytes(folder) if in_bucket is None else in_bucket


def fold_demos(runs: Sequence[RunSummary], root: Path) -> list[RunSummary]:
    """Return the runs, with the runs of each `weft demo` replaced by one summary.

    The summary has an empty trial name. Runs are not replaced if `root` is the demo's own folder.
    """
    demo_runs: dict[Path, list[RunSummary]] = {}
    for run in runs:
        folder = run.path.parent
        if (
            DEMO_FOLDER.fullmatch(folder.name)
            and (folder / MATERIAL).is_dir()
            and folder.resolve() != root.resolve()
        ):
            demo_runs.setdefault(folder, []).append(run)
    other_runs = []
    for run in runs:
        if not any(run in demo for demo in demo_runs.values()):
            other_runs.append(run)
    return other_runs + [_summarize_demo(folder, demo) for folder, demo in demo_runs.items()]


def _summarize_demo(folder: Path, runs: Sequence[RunSummary]) -> RunSummary:
    """Return a summary of all runs of a demo.

    The summary has the total size, the newest metric, and the first status in `DEMO_STATUS_ORDER`
    that any of the runs has.
    """
    newest = sorted(runs, key=lambda run: -(run.changed or 0.0))
    metric_run = next((run for run in newest if run.metric is not None), newest[0])
    return RunSummary(
        path=folder,
        experiment=f"{folder.name} ({len(runs)} run{'s' if len(runs) > 1 else ''})",
        trial="",
        algorithm="demo",
        status=min((run.status for run in runs), key=_rank_status),
        step=None,
        total_steps=None,
        metric=metric_run.metric,
        value=metric_run.value,
        num_bytes=count_bytes(folder),
        changed=newest[0].changed,
    )


def _rank_status(status: str) -> int:
    if status in DEMO_STATUS_ORDER:
        return DEMO_STATUS_ORDER.index(status)
    return len(DEMO_STATUS_ORDER)


def build_table(runs: Sequence[RunSummary], width: int) -> Table:
    """Return a table with one row per run that fits in `width` columns.

    Wide tables also show the full metric name and the time of the last write. Narrow tables leave
    out less important columns, so that run names are not shortened.
    """
    rows = [_format_cells(run) for run in runs]
    if rows:
        names = []
        for name in rows[0]:
            if width >= WIDE_TERMINAL or name not in ("metric", "written"):
                names.append(name)
    else:
        names = ["run"]
    widths = {}
    for name in names:
        widths[name] = max(len(name), *(len(row[name]) for row in rows))
    min_widths = {}
    for name, length in widths.items():
        min_widths[name] = min(length, MIN_NAME_WIDTH) if name in TRUNCATABLE_COLUMNS else length
    for dropped in DROPPABLE_COLUMNS:
        if sum(min_widths[name] + GAP for name in names) - GAP > width and dropped in names:
            names.remove(dropped)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for name in names:
        if name == "run":
            table.add_column(name, overflow="fold", min_width=min_widths[name])
        else:
            is_right = name in ("steps", "size", "age")
            table.add_column(
                name, no_wrap=True, overflow="ellipsis", justify="right" if is_right else "left"
            )
    for run, row in zip(runs, rows, strict=True):
        colour = "yellow" if run.is_flagged else COLORS.get(run.status, "")
        cells = (Text(row[name], style=colour if name == "status" else "") for name in names)
        table.add_row(*cells)
    return table


def _format_cells(run: RunSummary) -> dict[str, str]:
    """Return the cells of a run's table row, keyed by column name."""
    return {
        "run": f"{run.experiment}/{run.trial}" if run.trial else run.experiment,
        "algorithm": run.algorithm or UNKNOWN,
        "status": f"{run.status} !" if run.is_flagged else run.status,
        "steps": format_steps(run),
        "last": f"{find_title(run.metric)} {format_number(run.value)}" if run.metric else UNKNOWN,
        "size": format_size(run.num_bytes),
        "age": format_age(run.changed),
        "metric": run.metric or UNKNOWN,
        "written": time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed))
        if run.changed
        else UNKNOWN,
    }


def format_steps(run: RunSummary) -> str:
    """Format a run's progress as finished and total steps, such as 40/100."""
    if run.step is None:
        return UNKNOWN
    if run.total_steps is not None:
        return f"{run.step}/{run.total_steps}"
    return str(run.step)


def format_size(num_bytes: float) -> str:
    """Format a number of bytes with a suitable unit, such as `12 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def format_age(changed_at: float | None) -> str:
    """Format the time since the Unix time `changed_at`, such as `4 min`."""
    if changed_at is None:
        return UNKNOWN
    seconds = max(0.0, time.time() - changed_at)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"
