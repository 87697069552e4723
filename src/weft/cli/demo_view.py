"""Progress display of the demo: one line per running stage, removed when the stage ends.

All other output of the runs is in their logs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from weft.observe.metrics import find_title, format_duration, format_number
from weft.observe.pace import RunPace

BAR_WIDTH = 30  # columns


class StageView:
    """Progress display of a run in one terminal line.

    The line shows a progress bar, the steps, the headline metric and the elapsed time. If the
    output is not a terminal, nothing is printed.
    """

    def __init__(self, console: Console, doing: str) -> None:
        self._console = console
        self._doing = doing
        self._pace = RunPace()
        is_interactive = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(self, console=console, transient=True) if is_interactive else None

    @property
    def width(self) -> int | None:
        return None

    def start(self) -> None:
        if self._live is not None:
            self._live.start()

    def expect(
        self, total: int | None, done: int, earlier: Sequence[Mapping[str, float]] = ()
    ) -> None:
        self._pace.expect(total, done, earlier)

    def record_step(self, numbers: Mapping[str, float], *, is_shown: bool) -> list[str]:
        self._pace.record_step(numbers)
        return [self._pace.format_line()] if is_shown else []

    def show_sample(self, step: int, row: Mapping[str, Any]) -> None:
        """Do nothing, because sampled completions are shown in the run's report."""

    def show_activity(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def print_note(self, line: str) -> None:
        """Do nothing, because notes are written to the run's log."""

    def show_stop_request(self, line: str) -> None:
        self._doing = line

    def close(self, status: str, *, flagged: bool = False) -> list[str]:
        if self._live is not None:
            self._live.stop()
        return [self._pace.format_summary(status)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        pace = self._pace
        grid = Table.grid(padding=(0, 1))
        for _ in range(3):
            grid.add_column(no_wrap=True, overflow="ellipsis")
        parts = [self._doing]
        if pace.done:
            parts = [pace.format_step()]
            parts += (
                [f"{find_title(pace.name)} {format_number(pace.values[-1])}"]
                if pace.name is not None and pace.values
                else []
            )
        parts.append(format_duration(pace.elapsed))
        bar = ProgressBar(
            pace.total or 1, pace.done if pace.total else 0, width=BAR_WIDTH, complete_style="cyan"
        )
        grid.add_row("  ", bar, "  ".join(parts))
        yield grid
