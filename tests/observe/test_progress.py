"""The live view and the plain lines."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from weft.observe.progress import LiveView, PlainView, View, make_view

LINE = {"step": 3, "epoch": 0.3, "step_seconds": 0.5, "rew_inf/reward": 0.25, "actor_train/num_tokens": 1000.0}
CALLS = {"time/actor_gen": 0.3, "time/actor_train": 0.15, "time/advantages": 0.01}


def terminal(width: int = 100, height: int = 40) -> Console:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=width, height=height, color_system=None, highlight=False)


def drawn(view: View, console: Console) -> str:
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
    lines = view.step(LINE | CALLS | {"eval/reward": 0.2}, shown=True)
    assert view.step({"step": 4}, shown=False) == []
    view.note("saved [bold]checkpoints/actor/step4")
    lines += view.close("finished")
    assert told(console) == "\n".join([lines[0], "saved [bold]checkpoints/actor/step4", lines[1]]) + "\n"
    assert "step  3/10" in lines[0] and "\x1b" not in told(console)


def test_the_live_view_shows_what_was_asked_for() -> None:
    console = terminal()
    view = LiveView("e/t", console)
    assert "starting" in drawn(view, console)
    view.expect(10, 2)
    assert "step  2/10" in drawn(view, console)
    view.step(LINE | CALLS | {"peak_memory_gb": 1.5}, shown=True)
    view.sample(3, {"prompt": "How are you?", "completion": "[bold]Well,\n thank you", "reward": 0.5})
    with view.doing("actor_train"):
        text = drawn(view, console)
    for part in ("e/t", "step  3/10", "left", "reward 0.25", "2,000", "1.50", "actor_gen", "0.30 s", "65%"):
        assert part in text
    for part in ("▸ actor_train", "step 3 · reward 0.5", "How are you? [bold]Well, thank you"):
        assert part in text
    assert "▸" not in drawn(view, console)


@pytest.mark.parametrize(("width", "height"), [(40, 12), (60, 18), (76, 24), (200, 60)])
def test_the_live_view_fits_its_terminal(width: int, height: int) -> None:
    console = terminal(width, height)
    view = LiveView("experiment/trial", console)
    view.expect(10, 2)
    view.step(LINE | {f"time/call{i}": 1.0 + i for i in range(12)}, shown=True)
    view.sample(3, {"prompt": "a long prompt " * 80, "completion": "a long completion " * 80})
    lines = drawn(view, console).splitlines()
    assert len(lines) <= height
    assert max(len(line) for line in lines) <= width


def test_a_resumed_run_is_summed_up_from_its_beginning() -> None:
    view = PlainView(terminal())
    view.expect(3, 2, [{"step": 1.0, "loss": 1.0}, {"step": 2.0, "loss": 0.25}])
    view.step({"step": 3.0, "loss": 0.5}, shown=True)
    (line,) = view.close("finished")
    assert line.startswith("finished after step 3 of 3 in") and "since step 2, loss 1 -> 0.5 (best 0.25)" in line
    elsewhere = PlainView(terminal())
    elsewhere.expect(3, 2)
    elsewhere.step({"step": 3.0, "loss": 0.5}, shown=True)
    assert elsewhere.close("finished")[0].endswith("loss 0.5 -> 0.5 (best 0.5) since step 2")


def test_closing_leaves_one_line_and_notes_scroll_by() -> None:
    console = terminal()
    view = LiveView("e/t", console)
    view.start()
    view.step(LINE, shown=True)
    view.note("a note [/bold]")
    (line,) = view.close("stopped")
    last = told(console).rstrip("\n").splitlines()[-1]
    assert line.startswith("stopped after step 3") and line in last and "■ e/t" in last
    assert "a note [/bold]" in told(console)
