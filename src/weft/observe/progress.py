"""Display of a run's plan before its first step, and of its progress, live or as plain lines."""

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

# Maximum width of the label column; a longer label moves its text to the right.
MAX_LABEL_WIDTH = 14
MAX_ROW_LINES = 2  # maximum lines of a row on a terminal; longer text ends in an ellipsis
MAX_TABLE_LINES = 10  # maximum lines of the whole table on a terminal
ARROW = " -> "
GLUED_ARROW = " ->\N{NO-BREAK SPACE}"  # keeps an arrow on the line of the text after it


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
        """Yield the lines of the table; with `short`, rows are cut as in `_allot_lines`."""
        rows = [row for row in self.rows if row[0] not in self.hidden]
        label_width = min(MAX_LABEL_WIDTH, max((len(label) for label, _ in self.rows), default=0))
        indent = label_width + 2
        labels = [f"{label:<{label_width}}  " for label, _ in rows]
        # Wrap the text of each row.
        cells = []
        for label, (_, text) in zip(labels, rows, strict=True):
            if width is None:
                cells.append([text])
            else:
                cells.append(_wrap_text(text, width, len(label), indent))
        # Cut rows with too many lines.
        if short and width is not None:
            limits = _allot_lines([len(lines) for lines in cells])
            for label, lines, limit in zip(labels, cells, limits, strict=True):
                if len(lines) > limit:
                    num_free = width - (len(label) if limit == 1 else indent) - 2
                    lines[limit - 1 :] = [f"{lines[limit - 1][: max(0, num_free)].rstrip()} …"]
        for label, lines in zip(labels, cells, strict=True):
            yield f"{label}{lines[0]}"
            for line in lines[1:]:
                yield f"{' ' * indent}{line}"


def _allot_lines(line_counts: Sequence[int]) -> list[int]:
    """Return the number of lines for each row: that in `line_counts`, but at most `MAX_ROW_LINES`.

    If the table would then have more than `MAX_TABLE_LINES` lines, rows are reduced to one line,
    starting with the last row, until the table is short enough.
    """
    limits = [min(count, MAX_ROW_LINES) for count in line_counts]
    for index in reversed(range(len(limits))):
        if sum(limits) <= MAX_TABLE_LINES:
            break
        limits[index] = 1
    return limits


def _wrap_text(text: str, width: int, first: int, others: int) -> list[str]:
    """Wrap text for a terminal of `width` columns.

    Space is left free at the start of each line for a label or indentation: `first` columns in the
    first line, and `others` columns in all other lines.
    """
    wrapper = textwrap.TextWrapper(
        max(width, others + 20),
        initial_indent=" " * first,
        subsequent_indent=" " * others,
        break_on_hyphens=False,
    )
    lines = wrapper.wrap(text.replace(ARROW, GLUED_ARROW)) or [""]
    return [line.strip(" ").replace("\N{NO-BREAK SPACE}", " ") for line in lines]


ACCENT = "cyan"
QUIET = "bright_black"
STRONG = "bold"
NARROW_WIDTH = 76  # columns; below this the header is stacked vertically
REFRESH_RATE = 4  # per second
SPARE_LINES = 2  # lines of the terminal kept free below the view: the cursor's and one more
# Width of the headline's sparkline: the maximum, and the minimum at the end of a line of text.
MAX_SPARKLINE = 60
MIN_SPARKLINE = 8
BROKEN_PIPE_NOTE = "the reader of the output has exited; the run continues, and log.txt in its directory has every line"
FLAGGED_MARK = ("!", "yellow")  # replaces the tick if a metric is out of range
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

    def show_activity(self, activity: str) -> AbstractContextManager[None]:
        """Show `activity` as the current activity during the body of a `with` statement."""
        ...

    def print_note(self, line: str) -> None:
        """Print a line."""
        ...

    def show_stop_request(self, line: str) -> None:
        """Show that the run has been asked to stop.

        Called from a signal handler, possibly in the middle of any other method.
        """
        ...

    def close(self, status: str, *, is_flagged: bool = False) -> list[str]:
        """Close the view and print a line that summarizes the run.

        `status` is the outcome of the run, and `is_flagged` is True if a metric of the run is out
        of range. Returns the lines to be written to the log file.
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

    is_stopping = False  # the run was asked to stop: Ctrl-C ends the reader of the pipe too

    def on_broken_pipe(self) -> None:
        self.quiet = True
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, sys.stdout.fileno())  # later writes do not fail
        os.close(null_device)
        if not self.is_stopping:
            with suppress(OSError):
                os.write(2, f"{BROKEN_PIPE_NOTE}\n".encode())


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

    def show_activity(self, activity: str) -> AbstractContextManager[None]:
        return nullcontext()

    def print_note(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show_stop_request(self, line: str) -> None:
        if isinstance(self._console, _PipeSafeConsole):
            self._console.is_stopping = True
        with suppress(OSError):  # bypasses the console, which can be in the middle of a line
            os.write(2, f"\n{line}\n".encode())

    def close(self, status: str, *, is_flagged: bool = False) -> list[str]:
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
        self._live = Live(self, console=console, refresh_per_second=REFRESH_RATE, transient=True)
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
    def show_activity(self, activity: str) -> Iterator[None]:
        entry = (activity, time.monotonic())
        self._activities.append(entry)
        try:
            yield
        finally:
            self._activities.remove(entry)

    def print_note(self, line: str) -> None:
        # Lines are not wrapped without a live view, so that commands can be copied.
        has_view = self._live.is_started
        self._console.print(line, markup=False, highlight=False, soft_wrap=not has_view)

    def show_stop_request(self, line: str) -> None:
        # Shown at the next refresh: a signal handler must not write while the view is being drawn.
        self._stop_note = line

    def close(self, status: str, *, is_flagged: bool = False) -> list[str]:
        if self._live.is_started:
            self._console.pop_render_hook()
        self._live.stop()
        mark, colour = OUTCOMES.get(status, ("·", QUIET))
        if is_flagged and status == "finished":
            mark, colour = FLAGGED_MARK
        parts = [Text.assemble((f"{mark} ", colour), (self._run, STRONG))]
        summary_parts = self._pace.format_summary_parts(status)
        *first, last = summary_parts
        parts += [Text(f"{part},") for part in first] + [Text(last)]
        lines = pack_lines(parts, self._console.width, " ", indent=2)
        num_free = self._console.width - lines[-1].cell_len - 2
        if num_free >= MIN_SPARKLINE:
            lines[-1].append(f"  {draw_sparkline(self._pace.values, min(24, num_free))}", ACCENT)
        for line in lines:
            self._console.print(line, no_wrap=True, overflow="ellipsis")
        return [", ".join(summary_parts)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        options = options.update(height=None)
        first = [self._render_head(width), self._render_numbers(width)]
        last = self._render_activity(width)
        fixed_lines = console.render_lines(_group_renderables(*first, last), options)
        num_free = console.size.height - len(fixed_lines) - SPARE_LINES
        calls = self._render_calls(width, min(8, num_free - 1))
        num_free -= calls.row_count if calls is not None else 0
        content = _group_renderables(
            *first, calls, last, self._render_completion(width, min(6, num_free - 1))
        )
        lines = console.render_lines(content, options, pad=False)
        self._reflow.record_drawn([Segment.get_line_length(line) for line in lines])
        for line in lines:
            yield from line
            yield Segment.line()
        # Room for the cursor and for the echo of typed characters, such as ^C.
        yield Segment(" ")

    def _render_head(self, width: int) -> RenderableType:
        """Render the run's name, its step, a progress bar and the elapsed and remaining time."""
        pace = self._pace
        title = Text.assemble(("weft ", f"{STRONG} {ACCENT}"), (self._run, STRONG))
        position = [pace.format_step()] if pace.latest or pace.done else ["starting"]
        position += [f"epoch {pace.epoch:.2f}"] if pace.latest else []
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
        if width < NARROW_WIDTH:
            grid.add_row(title)
            grid.add_row(bar)
            for line in pack_lines(
                [Text(part, QUIET) for part in (*position, *times)], width, "  ·  "
            ):
                grid.add_row(line)
            return grid
        grid.add_column(justify="right", no_wrap=True)
        grid.add_row(title, "  ·  ".join(position))
        grid.add_row(bar, Text("  ·  ".join(times), QUIET))
        return grid

    def _render_numbers(self, width: int) -> RenderableType | None:
        """Render the latest metrics; None before the first step."""
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
                draw_sparkline(pace.values, min(MAX_SPARKLINE, width - line.cell_len - len(best))),
                ACCENT,
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
        longest_seconds = max(seconds.values()) or 1.0
        total = sum(seconds.values()) or 1.0
        durations = {name: f"{seconds[name]:.2f} s" for name in names}
        text_width = max(map(len, names.values())) + max(map(len, durations.values()))
        bar_width = width - text_width - len("100%") - 6
        for name, label in names.items():
            num_characters = max(1, round(bar_width * seconds[name] / longest_seconds))
            bar = Text("━" * num_characters, ACCENT, overflow="crop")
            table.add_row(label, durations[name], f"{seconds[name] / total:.0%}", bar)
        return table

    def _render_activity(self, width: int) -> RenderableType | None:
        if self._stop_note is not None:
            lines = [Text.assemble(("■ ", "yellow"), self._stop_note)]
        else:
            lines = []
        if self._activities:
            activity, began = self._activities[-1]
            duration = format_duration(time.monotonic() - began)
            lines.append(Text.assemble(("▸ ", ACCENT), activity, (f"  {duration}", QUIET)))
        return Group(Text(), *map(_set_ellipsis, lines)) if lines else None

    def _render_completion(self, width: int, max_lines: int) -> RenderableType | None:
        """Render the latest sampled prompt and completion, cut to at most `max_lines` lines.

        Returns None if there is no sample or too little space.
        """
        if self._sample is None or max_lines < 2:
            return None
        step, row = self._sample
        caption = f"step {step}"
        reward = row.get("reward")
        if isinstance(reward, int | float):
            caption += f" · reward {format_number(float(reward))}"
        num_characters = (max_lines - 1) * max(20, width - 1)
        completion = " ".join(str(row.get("completion", "")).split())
        prompt = " ".join(str(row.get("prompt", "")).split())
        prompt_space = max(num_characters - min(len(completion), num_characters * 2 // 3) - 2, 20)
        prompt_text = prompt if len(prompt) <= prompt_space else f"…{prompt[-prompt_space + 1 :]}"
        completion_space = max(20, num_characters - len(prompt_text) - 2)
        if len(completion) > completion_space:
            completion = f"{completion[: completion_space - 1]}…"
        text = Text.assemble((f"{prompt_text} ", QUIET), completion)
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
        self._widths: list[int] = []  # widths in columns of the lines on the screen

    def record_drawn(self, widths: list[int]) -> None:
        self._widths = widths

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        terminal_width = max(1, self._console.width)
        num_leftover = sum(max(0, (width - 1) // terminal_width) for width in self._widths)
        self._widths = []
        controls = [(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * num_leftover
        return [Control(*controls), *renderables] if num_leftover else renderables


def elide_middle(text: str, width: int) -> str:
    """Shorten `text` to at most `width` characters by cutting the middle.

    Both ends are kept, because they are needed to identify a name.
    """
    if len(text) <= width:
        return text
    num_last = max(0, (width - 1) * 2 // 3)
    return f"{text[: max(0, width - 1 - num_last)]}…{text[len(text) - num_last :]}"


def pack_lines(parts: Sequence[Text], width: int, separator: str, *, indent: int = 0) -> list[Text]:
    """Join the parts into as few lines as possible, without breaking any part.

    `separator` separates the parts of a line. Lines after the first are indented by `indent`.
    """
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + len(separator) + part.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], separator, part)
        else:
            lines.append(Text.assemble(" " * indent if lines else "", part))
    return [_set_ellipsis(line) for line in lines]


def _group_renderables(*parts: RenderableType | None) -> Group:
    """Group the parts that are not None."""
    return Group(*(part for part in parts if part is not None))


def _set_ellipsis(text: Text) -> Text:
    """Make the terminal cut `text` with an ellipsis instead of wrapping it, and return `text`."""
    text.no_wrap = True
    text.overflow = "ellipsis"
    return text
