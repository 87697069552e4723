"""What a person sees while a run goes on: a live view on a terminal, one plain line a step anywhere else."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from weft.observe.metrics import call_seconds, duration, number, title, tokens_per_second
from weft.observe.pace import Pace, sparkline

ACCENT, QUIET, STRONG = "cyan", "bright_black", "bold"
NARROW = 76  # columns below which things stand under each other
REFRESHES = 4  # a second
BAR = 24  # signs of the longest call's bar
FIXED_LINES = 11  # of the view without calls and completion
OUTCOMES = {"finished": ("✓", "green"), "stopped": ("■", "yellow"), "failed": ("✗", "red")}


class View(Protocol):
    """Shows a run. `step` and `close` return the lines that belong into log.txt."""

    def start(self) -> None: ...
    def expect(self, total: int | None, done: int, earlier: Sequence[Mapping[str, float]] = ()) -> None: ...
    def step(self, numbers: Mapping[str, float], *, shown: bool) -> list[str]: ...
    def sample(self, step: int, row: Mapping[str, Any]) -> None: ...
    def doing(self, what: str) -> AbstractContextManager[None]: ...
    def note(self, line: str) -> None: ...
    def close(self, status: str) -> list[str]: ...


def make_view(run: str, *, progress: bool = True, console: Console | None = None) -> View:
    """The live view where the output is a terminal and `progress` is on; plain lines otherwise."""
    console = console or Console(highlight=False)
    if progress and console.is_terminal and not console.is_dumb_terminal:
        return LiveView(run, console)
    return PlainView(console)


class PlainView:
    """One readable line a step, for files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console, self._pace = console, Pace()

    def start(self) -> None:
        """Nothing to set up."""

    def expect(self, total: int | None, done: int, earlier: Sequence[Mapping[str, float]] = ()) -> None:
        self._pace.expect(total, done, earlier)

    def step(self, numbers: Mapping[str, float], *, shown: bool) -> list[str]:
        self._pace.step(numbers)
        lines = [self._pace.text()] if shown else []
        for line in lines:
            self.note(line)
        return lines

    def sample(self, step: int, row: Mapping[str, Any]) -> None:
        """Completions are for samples.jsonl; lines stay lines."""

    def doing(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def note(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self, status: str) -> list[str]:
        line = self._pace.summary(status)
        self.note(line)
        return [line]


class LiveView:
    """Drawn anew several times a second at the foot of the terminal; notes scroll by above it."""

    def __init__(self, run: str, console: Console) -> None:
        self._run, self._console, self._pace = run, console, Pace()
        self._sample: tuple[int, Mapping[str, Any]] | None = None
        self._doing: list[tuple[str, float]] = []
        self._live = Live(self, console=console, refresh_per_second=REFRESHES, transient=True)

    def start(self) -> None:
        self._live.start()

    def expect(self, total: int | None, done: int, earlier: Sequence[Mapping[str, float]] = ()) -> None:
        self._pace.expect(total, done, earlier)

    def step(self, numbers: Mapping[str, float], *, shown: bool) -> list[str]:
        self._pace.step(numbers)
        return [self._pace.text()] if shown else []

    def sample(self, step: int, row: Mapping[str, Any]) -> None:
        self._sample = (step, row)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        entry = (what, time.monotonic())
        self._doing.append(entry)
        try:
            yield
        finally:
            self._doing.remove(entry)

    def note(self, line: str) -> None:
        whole = not self._live.is_started  # then a line is not broken, so that a command can be copied
        self._console.print(line, markup=False, highlight=False, soft_wrap=whole)

    def close(self, status: str) -> list[str]:
        self._live.stop()
        sign, colour = OUTCOMES.get(status, ("·", QUIET))
        line = self._pace.summary(status)
        shown = Text.assemble((f"{sign} ", colour), (self._run, STRONG), "  ", line)
        shown.append(f"  {sparkline(self._pace.values, min(24, self._console.width - shown.cell_len - 3))}", ACCENT)
        self._console.print(shown)
        return [line]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(2, (options.height or console.size.height) - FIXED_LINES)
        calls = self._calls(min(8, room - 2))
        parts = [self._head(options.max_width), self._numbers(options.max_width), calls]
        lines = room - (calls.row_count if calls is not None else 0)
        parts += [self._now(), self._completion(options.max_width, min(6, lines))]
        yield Group(*(part for part in parts if part is not None))

    def _head(self, width: int) -> RenderableType:
        pace = self._pace
        left = Text.assemble(("weft ", f"{STRONG} {ACCENT}"), (self._run, STRONG))
        where = (
            f"{pace.counted()}  ·  epoch {pace.epoch:.2f}"
            if pace.latest
            else (pace.counted() if pace.done else "starting")
        )
        times = f"{duration(pace.elapsed)} elapsed"
        if pace.remaining is not None:
            times += f"  ·  {duration(pace.remaining)} left"
        bar = ProgressBar(
            pace.total or 1, pace.done if pace.total else 0, pulse=pace.total is None, complete_style=ACCENT
        )
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        if width < NARROW:
            return Group(left, bar, Text(f"{where}  ·  {times}", QUIET))
        grid.add_row(left, where)
        grid.add_row(bar, Text(times, QUIET))
        return grid

    def _numbers(self, width: int) -> RenderableType | None:
        pace = self._pace
        if not pace.done or not pace.latest:
            return None
        lines = [Text()]
        if pace.name is not None and pace.values:
            line = Text.assemble((f"{title(pace.name)} ", QUIET), (number(pace.values[-1]), f"{STRONG} {ACCENT}"), "  ")
            line.append(sparkline(pace.values, max(8, min(48, width // 2 - 12))), ACCENT)
            line.append(f"  best {number(pace.best)}", QUIET)
            lines.append(line)
        facts = [(name, number(value)) for name, value in pace.beside()]
        facts += [(f"eval {name}", number(value)) for name, value in pace.evaluated()]
        rate, seconds = tokens_per_second(pace.latest), pace.latest.get("step_seconds")
        facts += [("tokens/s", number(round(rate)))] if rate else []
        facts += [("s a step", number(seconds))] if seconds else []
        memory = pace.latest.get("peak_memory_gb")
        facts += [("GB peak", f"{memory:.2f}")] if memory else []
        lines.append(Text("   ").join(Text.assemble((f"{name} ", QUIET), value) for name, value in facts))
        return Group(*lines)

    def _calls(self, count: int) -> Table | None:
        """Seconds per call of the latest step, the longest ones where there is no room for all."""
        seconds = call_seconds(self._pace.latest)
        if not seconds:
            return None
        longest = sorted(seconds, key=lambda name: -seconds[name])[: max(1, count)]
        table = Table.grid(padding=(0, 2))
        table.add_column(style=QUIET)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", style=QUIET)
        table.add_column()
        table.add_row("", "", "", "")
        top, whole = max(seconds.values()) or 1.0, sum(seconds.values()) or 1.0
        for name in [name for name in seconds if name in longest]:
            bar = Text("━" * max(1, round(BAR * seconds[name] / top)), ACCENT)
            table.add_row(name, f"{seconds[name]:.2f} s", f"{seconds[name] / whole:.0%}", bar)
        return table

    def _now(self) -> RenderableType | None:
        if not self._doing:
            return None
        what, began = self._doing[-1]
        return Text.assemble(("\n▸ ", ACCENT), what, (f"  {duration(time.monotonic() - began)}", QUIET))

    def _completion(self, width: int, lines: int) -> RenderableType | None:
        """One completion, its prompt before it, cut to what fits."""
        if self._sample is None or lines < 2:
            return None
        step, row = self._sample
        told = f"step {step}"
        reward = row.get("reward")
        if isinstance(reward, int | float):
            told += f" · reward {number(float(reward))}"
        room = (lines - 1) * max(20, width - 1)
        completion = " ".join(str(row.get("completion", "")).split())
        prompt = " ".join(str(row.get("prompt", "")).split())
        space = max(room - min(len(completion), room * 2 // 3) - 2, 20)
        shown = prompt if len(prompt) <= space else f"…{prompt[-space + 1 :]}"
        rest = max(20, room - len(shown) - 2)
        text = Text.assemble(
            (f"{shown} ", QUIET), completion if len(completion) <= rest else f"{completion[: rest - 1]}…"
        )
        return Group(Text(), Rule(Text(f"a completion, {told}", QUIET), align="left", style=QUIET), text)
