"""Progress line of a run in the demo."""

from __future__ import annotations

import io

from rich.console import Console

from weft.cli.demo import StageView


def view(console: Console) -> StageView:
    shown = StageView(console, "starting")
    shown.expect(400, 0)
    return shown


def test_a_stage_is_one_line_of_a_terminal_and_nothing_stays() -> None:
    console = Console(
        file=io.StringIO(), force_terminal=True, width=80, color_system=None, highlight=False
    )
    stage = view(console)
    with console.capture() as capture:
        console.print(stage)
    assert "starting" in capture.get()
    assert stage.record_step({"step": 120.0, "train/loss": 0.5}, is_shown=True)[0].startswith(
        "step 120/400"
    ), "for the log"
    stage.print_note("writing to runs")
    with console.capture() as capture:
        console.print(stage)
    (line,) = [line for line in capture.get().splitlines() if line.strip()]
    assert "step 120/400  loss 0.5" in line and len(line.rstrip()) <= 80
    stage.start()
    (summary,) = stage.close("finished")
    assert (
        summary.startswith("finished after step 120 of 400")
        and "writing" not in console.file.getvalue()
    )  # type: ignore[attr-defined]


def test_without_a_terminal_a_stage_is_silent() -> None:
    console = Console(file=io.StringIO())
    stage = view(console)
    stage.start()
    stage.record_step({"step": 1.0}, is_shown=True)
    stage.close("finished")
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
