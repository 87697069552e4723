"""Plan of a run, shown before its first step, and its progress: live on a terminal, else in lines."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import (
    Console,
    ConsoleOptions,
    ConsoleRenderable,
    Group,
    RenderableType,
    RenderHook,
    RenderResult,
)
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.segment import ControlType, Segment
from rich.table import Table
from rich.text import Text

from weft.observe.metrics import (
    compute_tokens_per_second,
    find_title,
    format_duration,
    format_number,
    read_call_seconds,
)
from weft.observe.pace import RunPace, draw_sparkline

LABEL = 14  # maximum columns of the label column; a longer label moves its text to the right
ROW_LINES = 2  # maximum lines of a row on a terminal; longer text ends in an ellipsis
LINES = 10  # maximum lines of the whole table on a terminal
ARROW = " -> "
GLUED = " ->\N{NO-BREAK SPACE}"  # keeps an arrow on the line of the text after it


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run as text.

    `rows` are the rows of a table, each with a label and a text. `notes` are lines below the table.
    `details` are lines that appear only in the log and with `--verbose`. `hidden` lists the labels
    of rows that are not shown, for example because other output repeats them.
    """

    rows: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    details: Sequence[str] = ()
    hidden: Sequence[str] = ()

    def format_short(self, width: int | None = None) -> list[str]:
        """Return the lines of the table and the notes.

        `width` is the number of columns of the terminal; if it is None, nothing is cut or wrapped.
        """
        return [*self._format_table(width, short=True), *self.notes]

    def format_whole(self, width: int | None = None) -> list[str]:
        """Return the lines of the table, the notes and the details.

        `width` is the number of columns of the terminal; if it is None, nothing is wrapped.
        """
        return [*self._format_table(width), *self.notes, *self.details]

    def _format_table(self, width: int | None, *, short: bool = False) -> Iterator[str]:
        column = min(LABEL, max((len(label) for label, _ in self.rows), default=0))
        rows = [row for row in self.rows if row[0] not in self.hidden]
        begins = [f"{label:<{column}}  " for label, _ in rows]
        texts = [text for _, text in rows]
        cells = []
        for begin, text in zip(begins, texts, strict=True):
            cells.append(
                [text] if width is None else _wrap_text(text, width, len(begin), column + 2)
            )
        if short and width is not None:
            rooms = _allot_lines([len(lines) for lines in cells])
            for at, (begin, lines, room) in enumerate(zip(begins, cells, rooms, strict=True)):
                if len(lines) > room:
                    indent = len(begin) if room == 1 else column + 2
                    *head, last = lines[:room]
                    cells[at] = [*head, f"{last[: max(0, width - indent - 2)].rstrip()} …"]
        for begin, lines in zip(begins, cells, strict=True):
            yield from (
                f"{begin if at == 0 else ' ' * (column + 2)}{line}" for at, line in enumerate(lines)
            )


def _allot_lines(needed: Sequence[int]) -> list[int]:
    """Return the number of lines for each row: the number in `needed`, but at most `ROW_LINES`.

    If the table would then have more than `LINES` lines, rows are reduced to one line each,
    starting with the last row, until the table is short enough.
    """
    rooms = [min(lines, ROW_LINES) for lines in needed]
    for at in reversed(range(len(rooms))):
        if sum(rooms) <= LINES:
            break
        rooms[at] = 1
    return rooms


def _wrap_text(text: str, width: int, first: int, others: int) -> list[str]:
    """Wrap text for a terminal of `width` columns.

    Space is left free at the start of each line for a label or indentation: `first` columns in the
    first line, and `others` columns in all other lines.
    """
    filler = textwrap.TextWrapper(
        max(width, others + 20),
        initial_indent=" " * first,
        subsequent_indent=" " * others,
        break_on_hyphens=False,
    )
    lines = filler.wrap(text.replace(ARROW, GLUED)) or [""]
    return [line.strip(" ").replace("\N{NO-BREAK SPACE}", " ") for line in lines]


ACCENT = "cyan"
QUIET = "bright_black"
STRONG = "bold"
NARROW = 76  # columns; below this the header is stacked vertically
REFRESHES = 4  # per second
SPARE_LINES = 2  # lines of the terminal kept free below the view: the cursor's and one more
# Characters of the headline's sparkline: at most, and at least if it ends a line of text.
SPARKS = 60
LEAST_SPARKS = 8
UNREAD = "the reader of the output has exited; the run continues, and log.txt in its directory has every line"
FLAGGED = ("!", "yellow")  # replaces the tick if a metric is out of range
OUTCOMES = {"finished": ("✓", "green"), "stopped": ("■", "yellow"), "failed": ("✗", "red")}


class ProgressView(Protocol):
    """Display of a run's progress.

    `record_step` and `close` return lines for log.txt.
    """

    @property
    def width(self) -> int | None:
        """Number of columns of the terminal; None if the output is not a terminal.

        Without a terminal, lines can have any length.
        """
        ...

    def start(self) -> None:
        """Start the view."""
        ...

    def expect(
        self, total: int | None, done: int, earlier: Sequence[Mapping[str, float]] = ()
    ) -> None:
        """Set the total number of steps (None if unknown), and the number of steps already done.

        `done` counts the steps that earlier processes of the run have completed, and `earlier` has
        the metric lines of these steps.
        """
        ...

    def record_step(self, numbers: Mapping[str, float], *, is_shown: bool) -> list[str]:
        """Record the finite metrics of a step, and return lines about the step for the log file.

        If `is_shown` is False, no line is printed, and the list is empty.
        """
        ...

    def show_sample(self, step: int, row: Mapping[str, Any]) -> None:
        """Show a completion that was sampled in a step."""
        ...

    def show_activity(self, what: str) -> AbstractContextManager[None]:
        """Show `what` as the current activity during the body of a `with` statement."""
        ...

    def print_note(self, line: str) -> None:
        """Print a line."""
        ...

    def show_stop_request(self, line: str) -> None:
        """Show that the run has been asked to stop.

        Called from a signal handler, possibly in the middle of any other method.
        """
        ...

    def close(self, status: str, *, flagged: bool = False) -> list[str]:
        """Close the view and print a line that summarizes the run.

        `status` is the outcome of the run, and `flagged` is True if a metric of the run is out of
        range. Returns the lines to be written to the log file.
        """
        ...


@dataclass(frozen=True)
class DisplayOptions:
    """Options of the terminal output.

    If `verbose` is True, the whole plan is printed. `view`, if given, is shown instead of the
    default terminal display.
    """

    verbose: bool = False
    view: ProgressView | None = None

    def print_plan(self, plan: RunPlan, view: ProgressView) -> None:
        """Print the plan with `view`: a short table, or everything if `verbose` is True."""
        for line in (
            plan.format_whole(view.width) if self.verbose else plan.format_short(view.width)
        ):
            view.print_note(line)

    def announce(self, plan: RunPlan, line: str) -> None:
        """Print the plan and `line` before the run's own progress display starts."""
        view = self.view or make_view("", progress=False)
        self.print_plan(plan, view)
        view.print_note(line)


class _PipeSafeConsole(Console):
    """Console that stops printing when the reader of the output exits, as in `weft ... | head`.

    The run continues, and all lines are still written to log.txt.
    """

    ends = False  # the run is stopping; Ctrl-C ends the reader of the pipe too

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # later writes do not fail
        os.close(nowhere)
        if not self.ends:
            with suppress(OSError):
                os.write(2, f"{UNREAD}\n".encode())


def find_terminal_width() -> int | None:
    """Return the terminal's number of columns; None if standard output is not a terminal."""
    console = Console()
    return console.width if console.is_terminal else None


def make_view(run: str, *, progress: bool = True, console: Console | None = None) -> ProgressView:
    """Return a live view if the output is a terminal and `progress` is True, else a plain view."""
    console = console or _PipeSafeConsole(highlight=False)
    if progress and console.is_terminal and not console.is_dumb_terminal:
        return LiveView(run, console)
    return PlainView(console)


class PlainView:
    """View for files and pipes, which prints one line per step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pace = RunPace()

    @property
    def width(self) -> int | None:
        return self._console.width if self._console.is_terminal else None

    def start(self) -> None:
        """Do nothing, because there is nothing to set up."""

    def expect(
        self, total: int | None, done: int, earlier: Sequence[Mapping[str, float]] = ()
    ) -> None:
        self._pace.expect(total, done, earlier)

    def record_step(self, numbers: Mapping[str, float], *, is_shown: bool) -> list[str]:
        self._pace.record_step(numbers)
        lines = [self._pace.format_line()] if is_shown else []
        for line in lines:
            self.print_note(line)
        return lines

    def show_sample(self, step: int, row: Mapping[str, Any]) -> None:
        """Ignore the sample, because completions are in samples.jsonl."""

    def show_activity(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def print_note(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show_stop_request(self, line: str) -> None:
        if isinstance(self._console, _PipeSafeConsole):
            self._console.ends = True
        with suppress(OSError):  # bypasses the console, which can be in the middle of a line
            os.write(2, f"\n{line}\n".encode())

    def close(self, status: str, *, flagged: bool = False) -> list[str]:
        line = self._pace.format_summary(status)
        self.print_note(line)
        return [line]


class LiveView:
    """Display at the bottom of the terminal, redrawn several times a second.

    Notes are printed above it.
    """

    def __init__(self, run: str, console: Console) -> None:
        self._run = run
        self._console = console
        self._pace = RunPace()
        self._sample: tuple[int, Mapping[str, Any]] | None = None
        self._activities: list[tuple[str, float]] = []
        self._stop_note: str | None = None
        self._live = Live(self, console=console, refresh_per_second=REFRESHES, transient=True)
        self._reflow = _ReflowHook(console)

    @property
    def width(self) -> int | None:
        return self._console.width

    def start(self) -> None:
        self._live.start()
        self._console.push_render_hook(self._reflow)

    def expect(
        self, total: int | None, done: int, earlier: Sequence[Mapping[str, float]] = ()
    ) -> None:
        self._pace.expect(total, done, earlier)

    def record_step(self, numbers: Mapping[str, float], *, is_shown: bool) -> list[str]:
        self._pace.record_step(numbers)
        return [self._pace.format_line()] if is_shown else []

    def show_sample(self, step: int, row: Mapping[str, Any]) -> None:
        self._sample = (step, row)

    @contextmanager
    def show_activity(self, what: str) -> Iterator[None]:
        entry = (what, time.monotonic())
        self._activities.append(entry)
        try:
            yield
        finally:
            self._activities.remove(entry)

    def print_note(self, line: str) -> None:
        # Without a live view lines are not wrapped, so that commands can be copied.
        whole = not self._live.is_started
        self._console.print(line, markup=False, highlight=False, soft_wrap=whole)

    def show_stop_request(self, line: str) -> None:
        # Shown at the next refresh: a signal handler must not write while the view is being drawn.
        self._stop_note = line

    def close(self, status: str, *, flagged: bool = False) -> list[str]:
        if self._live.is_started:
            self._console.pop_render_hook()
        self._live.stop()
        sign, colour = (
            FLAGGED if flagged and status == "finished" else OUTCOMES.get(status, ("·", QUIET))
        )
        parts = [Text.assemble((f"{sign} ", colour), (self._run, STRONG))]
        summary_parts = self._pace.format_summary_parts(status)
        *first, last = summary_parts
        parts += [Text(f"{part},") for part in first] + [Text(last)]
        lines = pack_lines(parts, self._console.width, " ", indent=2)
        left = self._console.width - lines[-1].cell_len - 2
        if left >= LEAST_SPARKS:
            lines[-1].append(f"  {draw_sparkline(self._pace.values, min(24, left))}", ACCENT)
        for line in lines:
            self._console.print(line, no_wrap=True, overflow="ellipsis")
        return [", ".join(summary_parts)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        options = options.update(height=None)
        first = [self._render_head(width), self._render_numbers(width)]
        last = self._render_activity(width)
        taken = console.render_lines(_group_renderables(*first, last), options)
        room = console.size.height - len(taken) - SPARE_LINES
        calls = self._render_calls(width, min(8, room - 1))
        room -= calls.row_count if calls is not None else 0
        picture = _group_renderables(
            *first, calls, last, self._render_completion(width, min(6, room - 1))
        )
        drawn = console.render_lines(picture, options, pad=False)
        self._reflow.record_drawn([Segment.get_line_length(line) for line in drawn])
        for line in drawn:
            yield from line
            yield Segment.line()
        # Room for the cursor and for the echo of typed characters, such as ^C.
        yield Segment(" ")

    def _render_head(self, width: int) -> RenderableType:
        pace = self._pace
        left = Text.assemble(("weft ", f"{STRONG} {ACCENT}"), (self._run, STRONG))
        where = [pace.format_step()] if pace.latest or pace.done else ["starting"]
        where += [f"epoch {pace.epoch:.2f}"] if pace.latest else []
        times = [f"{format_duration(pace.elapsed)} elapsed"]
        if pace.remaining is not None:
            times.append(f"{format_duration(pace.remaining)} left")
        bar = ProgressBar(
            pace.total or 1,
            pace.done if pace.total else 0,
            pulse=pace.total is None,
            complete_style=ACCENT,
        )
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        if width < NARROW:
            grid.add_row(left)
            grid.add_row(bar)
            for line in pack_lines(
                [Text(part, QUIET) for part in (*where, *times)], width, "  ·  "
            ):
                grid.add_row(line)
            return grid
        grid.add_column(justify="right", no_wrap=True)
        grid.add_row(left, "  ·  ".join(where))
        grid.add_row(bar, Text("  ·  ".join(times), QUIET))
        return grid

    def _render_numbers(self, width: int) -> RenderableType | None:
        pace = self._pace
        if not pace.done or not pace.latest:
            return None
        lines = [Text()]
        # The headline metric with its curve and its best value.
        if pace.name is not None and pace.values:
            name = elide_middle(find_title(pace.name), width // 3)
            line = Text.assemble(
                (f"{name} ", QUIET), (format_number(pace.values[-1]), f"{STRONG} {ACCENT}"), "  "
            )
            best = f"  best {format_number(pace.best)}"
            line.append(
                draw_sparkline(pace.values, min(SPARKS, width - line.cell_len - len(best))), ACCENT
            )
            line.append(best, QUIET)
            lines.append(_set_ellipsis(line))
        # Evaluations, other metrics, speed and memory, on as few lines as possible.
        facts = [
            (find_title(name), format_number(values[-1]))
            for name, values in pace.evaluations.items()
        ]
        facts += [(name, format_number(value)) for name, value in pace.list_other_metrics()]
        rate = compute_tokens_per_second(pace.latest)
        seconds = pace.latest.get("step_seconds")
        facts += [("tokens/s", format_number(round(rate)))] if rate else []
        facts += [("s per step", format_number(seconds))] if seconds else []
        memory = pace.latest.get("peak_memory_gb")
        facts += [("peak", f"{memory:.2f} GB")] if memory else []
        fact_texts = [
            Text.assemble((f"{elide_middle(name, width // 3)} ", QUIET), value)
            for name, value in facts
        ]
        return Group(*lines, *pack_lines(fact_texts, width, "   "))

    def _render_calls(self, width: int, count: int) -> Table | None:
        """Render the latest step's longest calls and their durations in seconds as a table.

        A call is one execution of a graph node. At most `count` calls are shown. Returns None if no
        durations are known.
        """
        seconds = read_call_seconds(self._pace.latest)
        if not seconds or count < 1:
            return None
        longest = sorted(seconds, key=lambda name: -seconds[name])[:count]
        names = {name: elide_middle(name, width // 3) for name in seconds if name in longest}
        table = Table.grid(padding=(0, 2))
        table.add_column(style=QUIET, no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", style=QUIET, no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_row("", "", "", "")
        top = max(seconds.values()) or 1.0
        whole = sum(seconds.values()) or 1.0
        times = {name: f"{seconds[name]:.2f} s" for name in names}
        room = (
            width - max(map(len, names.values())) - max(map(len, times.values())) - len("100%") - 6
        )
        for name, label in names.items():
            bar = Text("━" * max(1, round(room * seconds[name] / top)), ACCENT, overflow="crop")
            table.add_row(label, times[name], f"{seconds[name] / whole:.0%}", bar)
        return table

    def _render_activity(self, width: int) -> RenderableType | None:
        if self._stop_note is not None:
            lines = [Text.assemble(("■ ", "yellow"), self._stop_note)]
        else:
            lines = []
        if self._activities:
            what, began = self._activities[-1]
            lines.append(
                Text.assemble(
                    ("▸ ", ACCENT), what, (f"  {format_duration(time.monotonic() - began)}", QUIET)
                )
            )
        return Group(Text(), *map(_set_ellipsis, lines)) if lines else None

    def _render_completion(self, width: int, lines: int) -> RenderableType | None:
        """Render the latest sampled prompt and completion, cut to the space available."""
        if self._sample is None or lines < 2:
            return None
        step, row = self._sample
        caption = f"step {step}"
        reward = row.get("reward")
        if isinstance(reward, int | float):
            caption += f" · reward {format_number(float(reward))}"
        room = (lines - 1) * max(20, width - 1)
        completion = " ".join(str(row.get("completion", "")).split())
        prompt = " ".join(str(row.get("prompt", "")).split())
        space = max(room - min(len(completion), room * 2 // 3) - 2, 20)
        prompt_text = prompt if len(prompt) <= space else f"…{prompt[-space + 1 :]}"
        rest = max(20, room - len(prompt_text) - 2)
        text = Text.assemble(
            (f"{prompt_text} ", QUIET),
            completion if len(completion) <= rest else f"{completion[: rest - 1]}…",
        )
        return Group(
            Text(), Rule(Text(f"a completion, {caption}", QUIET), align="left", style=QUIET), text
        )


class _ReflowHook(RenderHook):
    """Render hook that erases leftover rows after the terminal has become narrower.

    Long lines then take several rows each. When rich draws the display again, it erases only one
    row per line. This hook erases the other rows.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lengths: list[int] = []  # widths in columns of the lines on the screen

    def record_drawn(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        width = max(1, self._console.width)
        more = sum(max(0, (length - 1) // width) for length in self._lengths)
        self._lengths = []
        wipe = [(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * more
        return [Control(*wipe), *renderables] if more else renderables


def elide_middle(text: str, width: int) -> str:
    """Shorten `text` to at most `width` characters by cutting the middle.

    Both ends are kept, because they are needed to identify a name.
    """
    if len(text) <= width:
        return text
    end = max(0, (width - 1) * 2 // 3)
    return f"{text[: max(0, width - 1 - end)]}…{text[len(text) - end :]}"


def pack_lines(parts: Sequence[Text], width: int, between: str, *, indent: int = 0) -> list[Text]:
    """Join the parts into as few lines as possible, without breaking any part.

    `between` separates the parts of a line. Lines after the first are indented by `indent`.
    """
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + len(between) + part.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], between, part)
        else:
            lines.append(Text.assemble(" " * indent if lines else "", part))
    return [_set_ellipsis(line) for line in lines]


def _group_renderables(*parts: RenderableType | None) -> Group:
    return Group(*(part for part in parts if part is not None))


def _set_ellipsis(text: Text) -> Text:
    """Make the terminal cut `text` with an ellipsis instead of wrapping it, and return `text`."""
    text.no_wrap = True
    text.overflow = "ellipsis"
    return text
