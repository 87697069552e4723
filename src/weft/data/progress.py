"""Progress bar on a terminal, or one plain line of text if the output is not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[int], None]
Reporter = Callable[[str, int], AbstractContextManager[Advance]]


@contextmanager
def show_progress(what: str, total: int) -> Iterator[Advance]:
    """Show the progress of work on `total` rows on standard error.

    `what` describes the work. The context yields a function, to be called with the number of rows
    done since its last call.
    """
    if not sys.stderr.isatty():
        begun = time.perf_counter()
        yield lambda count: None
        print(f"{what}: {total:,} rows in {time.perf_counter() - begun:.1f} s", file=sys.stderr)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=rich.console.Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def skip_progress(what: str, total: int) -> Iterator[Advance]:
    """Accept the same calls as `show_progress`, but show nothing."""
    yield lambda count: None
