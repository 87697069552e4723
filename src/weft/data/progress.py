"""Progress bar, or one plain line if the output is not a terminal."""

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

    Usage: `with show_progress("tokenizing x", n) as advance: advance(1)`.
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
    """Provide the interface of `show_progress` without showing anything."""
    yield lambda count: None
