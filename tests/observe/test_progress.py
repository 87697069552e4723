"""Live view and plain lines."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from weft.observe.pace import RunPace
from weft.observe.progress import (
    BROKEN_PIPE_NOTE,
    LiveView,
    PlainView,
    ProgressView,
    elide_middle,
    make_view,
    pack_lines,
)

LINE = {
    "step": 3,
    "epoch": 0.3,
    "step_seconds": 0.5,
    "rew_inf/reward": 0.25,
    "actor_train/num_tokens": 1000.0,
}
CALLS = {"time/actor_gen": 0.3, "time/actor_train": 0.15, "time/advantages": 0.01}


def terminal(width: int = 100, height: int = 40) -> Console:
    file = io.StringIO()
    return Console(
        file=file,
        force_terminal=True,
        width=width,
        height=height,
        color_system=None,
        highlight=False,
    )


def drawn(view: ProgressView, console: Console) -> str:
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def told(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_no_terminal_gets_plain_lines_and_a_terminal_can_ask_for_them() -> None:
    assert isinstance(make_view("e/t", console=Console(file=io.StringIO())), PlainView)
    assert isinstance(make_view("e/t", progress=False, console=terminal()), PlainView)
    assert isinstance(make_view("e/t", console=terminal()), LiveView)


def test_plain_lines_are_one_a_step_without_escapes_or_wraps() -> None:
    console = Console(file=io.StringIO(), width=40)
    view = PlainView(console)
    view.expect(10, 2)
    lines = view.record_step(LINE | CALLS | {"eval/reward": 0.2}, is_shown=True)
    assert view.record_step({"step": 4}, is_shown=False) == []
    view.print_note("saved [bold]checkpoints/actor/step4")
    lines += view.close("finished")
    assert (
        told(console)
        == "\n".join([lines[0], "saved [bold]checkpoints/actor/step4", lines[1]]) + "\n"
    )
    assert "step  3/10" in lines[0] and "\x1b" not in told(console)


def test_the_live_view_shows_all_parts() -> None:
    console = terminal()
    view = LiveView("e/t", console)
    assert "starting" in drawn(view, console)
    view.expect(10, 2)
    assert "step  2/10" in drawn(view, console)
    view.record_step(LINE | CALLS | {"peak_memory_gb": 1.5}, is_shown=True)
    view.show_sample(
        3, {"prompt": "How are you?", "completion": "[bold]Well,\n thank you", "reward": 0.5}
    )
    with view.show_activity("actor_train"):
        text = drawn(view, console)
    for part in (
        "e/t",
        "step  3/10",
        "left",
        "reward 0.25",
        "2,000",
        "1.50",
        "actor_gen",
        "0.30 s",
        "65%",
    ):
        assert part in text
    for part in ("▸ actor_train", "step 3 · reward 0.5", "How are you? [bold]Well, thank you"):
        assert part in text
    assert "▸" not in drawn(view, console)
    view.show_stop_request("finishing step 4, then stopping; Ctrl-C again stops now")
    assert "■ finishing step 4, then stopping; Ctrl-C again stops now" in drawn(view, console)


@pytest.mark.parametrize(("width", "height"), [(40, 12), (60, 18), (76, 24), (200, 60)])
def test_the_live_view_fits_its_terminal(width: int, height: int) -> None:
    console = terminal(width, height)
    view = LiveView("experiment/trial", console)
    view.expect(10, 2)
    long = {
        "time/a_call_with_a_name_of_more_signs_than_anybody_reads": 1.0,
        "actor_train/kl": 0.1,
        "eval/reward": 1.0,
    }
    view.record_step(LINE | long | {f"time/call{i}": 1.0 + i for i in range(12)}, is_shown=True)
    view.show_stop_request("finishing step 4, then stopping; Ctrl-C again stops now")
    view.show_sample(3, {"prompt": "a long prompt " * 80, "completion": "a long completion " * 80})
    lines = drawn(view, console).splitlines()
    assert len(lines) <= height
    assert max(len(line) for line in lines) <= width


def test_bars_use_the_available_width() -> None:
    bars = []
    for width in (60, 160):
        console = terminal(width)
        view = LiveView("e/t", console)
        view.expect(10, 2)
        view.record_step(LINE | CALLS, is_shown=True)
        lines = drawn(view, console).splitlines()
        assert sum("elapsed" in line for line in lines) == 1, (
            "the times stand on a line of their own, or beside the bar"
        )
        bars.append(max(line.count("━") for line in lines if line.startswith("actor_gen")))
    assert bars[1] - bars[0] == 100


def test_names_keep_both_ends_and_parts_stay_whole() -> None:
    assert (
        elide_middle("reward", 6) == "reward"
        and elide_middle("reward_of_a_long_name", 12) == "rewa…ng_name"
    )
    lines = pack_lines([Text("one two"), Text("three"), Text("four")], 14, ", ", indent=2)
    assert [line.plain for line in lines] == ["one two, three", "  four"]


def test_rows_of_broken_lines_are_erased_in_a_narrower_terminal() -> None:
    console = terminal(80)
    view = LiveView("e/t", console)
    view.start()
    view.expect(10, 2)
    view._live.refresh()
    written = len(told(console))
    console.width = 50
    view._live.refresh()
    up = told(console)[written:].partition("weft")[0].count("\x1b[1A")
    view.close("stopped")
    assert up == 2 + 2, (
        "two lines of 80 columns take a row more each; rich itself goes up by the lines that it "
        "wrote"
    )


def test_the_reader_of_a_pipe_may_exit(tmp_path: Path) -> None:
    code = (
        "import time\nfrom weft.observe.progress import make_view\nview = make_view('e/t')\n"
        "for at in range(200):\n    view.print_note('a line ' * 100)\n    time.sleep(0.001)\nprint('and "
        "more')\n"
        "open({path!r}, 'w').write('went on')"
    )
    path = tmp_path / "end"
    child = subprocess.Popen(
        [sys.executable, "-c", code.format(path=str(path))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read().decode() == f"{BROKEN_PIPE_NOTE}\n" and child.wait(30) == 0
    assert path.read_text() == "went on"


def test_the_summary_of_a_resumed_run_starts_at_its_beginning() -> None:
    view = PlainView(terminal())
    view.expect(3, 2, [{"step": 1.0, "loss": 1.0}, {"step": 2.0, "loss": 0.25}])
    view.record_step({"step": 3.0, "loss": 0.5}, is_shown=True)
    (line,) = view.close("finished")
    assert (
        line.startswith("finished after step 3 of 3 in")
        and "since step 2, loss 1 -> 0.5 (-0.5)" in line
    )
    elsewhere = PlainView(terminal())
    elsewhere.expect(3, 2)
    elsewhere.record_step({"step": 3.0, "loss": 0.5}, is_shown=True)
    assert elsewhere.close("finished")[0].endswith("loss 0.5 since step 2")


def test_closing_leaves_one_line_and_notes_scroll_by() -> None:
    console = terminal()
    view = LiveView("e/t", console)
    view.start()
    view.record_step(LINE, is_shown=True)
    view.print_note("a note [/bold]")
    (line,) = view.close("stopped")
    last = told(console).rstrip("\n").splitlines()[-1]
    assert line.startswith("stopped after step 3") and line in last and "■ e/t" in last
    assert "a note [/bold]" in told(console)


def test_a_flagged_run_gets_no_tick() -> None:
    for flagged, sign in ((False, "✓ e/t"), (True, "! e/t")):
        console = terminal()
        view = LiveView("e/t", console)
        view.record_step(LINE, is_shown=True)
        view.close("finished", is_flagged=flagged)
        assert told(console).startswith(f"{sign} finished after step 3")


def test_the_evaluation_before_the_first_step_is_the_first_value() -> None:
    """The first step shows which of its metrics is the headline."""
    pace = RunPace(clock=iter([0.0, 0.0, 100.0, 101.0, 102.0, 103.0]).__next__)
    pace.expect(2, 0)
    start = {"step": 0.0, "epoch": 0.0, "eval/loss": 6.0, "eval/a/loss": 6.0, "eval/num_rows": 2.0}
    pace.record_step(start | {"eval/accuracy": 0.0})
    assert pace.format_line() == "step 0/2  epoch 0.00  eval accuracy 0  eval loss 6"
    pace.record_step({"step": 1.0, "epoch": 0.5, "train/loss": 3.0, "eval/loss": 4.0})
    assert pace.remaining == 1.0, "the 100 s of the evaluation are no step"
    assert pace.evaluations == {"eval/loss": [6.0, 4.0]}
