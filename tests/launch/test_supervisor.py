"""A run of several devices whose own process is ended: another goes on in its place, or one message
says what was lost.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests import overlap
from tests.launch.cases import prepare
from tests.launch.test_supervisor_restarts import status_of, undisturbed, words
from tests.runtime.placed import Command, timeless, write_hooks
from weft.launch.supervisor import _read_lines, needs_ray

pytest.importorskip("ray")
SECONDS = 400.0


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("supervise")
    prepare(folder)
    write_hooks(folder)
    return folder


@pytest.fixture(scope="module")
def whole(root) -> Iterator[Future[Path]]:
    with overlap.start(undisturbed, root, "whole", "max_steps=3") as run:
        yield run


def under_way(root: Path, folder: str, *more: str) -> tuple[Command, Path, int]:
    """The run, which waits in its second reference call for `go_on`, and the process that drives
    it.
    """
    flag = root / f"{folder}-waits"
    hang = f"ref_inf.pre_hooks=[{{function: hang, args: {{step: 1, flag: {flag}}}}}]"
    command = Command(*words(root, folder, "max_steps=3", hang, *more), cwd=root)
    command.after(flag, 300.0)
    (child,) = children(command.process.pid)
    return command, root / folder / "e" / "t", child


def go_on(root: Path, folder: str) -> None:
    (root / f"{folder}-waits.go").touch()


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.overlap
def test_another_process_goes_on_and_the_numbers_stay(root, whole):
    command, run, child = under_way(root, "lost")
    os.kill(child, signal.SIGKILL)
    code, out = command.end(SECONDS)
    assert code == 0 and command.none_left(20), out
    log = (run / "log.txt").read_text()
    lost = next(line for line in log.splitlines() if "was killed by SIGKILL in " in line)
    assert f"the run's process {child} on " in lost and "call 'ref_inf' of role 'ref'" in lost
    assert (
        "continuing with a new process (restart 1 of 3)" in log and "resuming after step 1" in log
    )
    assert timeless(run) == timeless(whole.result())


@pytest.mark.slow
@pytest.mark.overlap
def test_without_recovery_one_message_says_what_was_lost(root):
    command, run, child = under_way(root, "off", "recover_mode=disabled")
    os.kill(child, signal.SIGKILL)
    code, out = command.end(SECONDS)
    told = [line for line in out.splitlines() if line.startswith("error")]
    assert code == 1 and len(told) == 1 and "Traceback" not in out and command.none_left(20), out
    assert (
        f"process {child} on " in told[0]
        and "call 'ref_inf' of role 'ref' (firing 1, device 1 (" in told[0]
    )
    assert status_of(run) == "failed" and told[0] in (run / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.overlap
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_command_comes_to_the_run_once(root, number, code):
    command, run, _ = under_way(root, f"asked{code}")
    command.signal(number)
    command.says("finishing step 2, then stopping")
    go_on(root, f"asked{code}")
    ended, out = command.end(SECONDS)
    assert (
        ended == code
        and "after step 2" in out
        and "stopped at once" not in out
        and command.none_left(20)
    ), out
    assert (
        len((run / "metrics.jsonl").read_text().splitlines()) == 2 and status_of(run) == "stopped"
    )


@pytest.mark.slow
@pytest.mark.overlap
def test_with_the_command_its_processes_end(root):
    command, _, _ = under_way(root, "shot")
    assert len(command.left()) > 4, "the command, the run's process, two devices, and Ray"
    command.process.kill()
    assert command.none_left(150)


def test_what_one_process_computes_is_not_supervised(root):
    from tests.launch.cases import dpo

    config = dpo(root, "alone")
    assert not needs_ray(config.build(), "local") and needs_ray(config.build(), "ray")
    config.ref.device_mesh, config.actor.lora.r = "1", 0
    assert needs_ray(config.build(), "local")


def test_a_child_is_gone_though_what_it_left_holds_its_pipe():
    ours, its = os.pipe()
    left = f"import os; os.write({its}, b'one\\ntwo\\n'); print(os.fork() and os._exit(0) or __import__('time').sleep(60))"
    child = subprocess.Popen(
        [sys.executable, "-c", left], pass_fds=[its], stdout=subprocess.DEVNULL, process_group=0
    )
    os.close(its)
    try:
        assert list(_read_lines(child, ours)) == [b"one", b"two"] and child.returncode == 0
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        os.close(ours)


def test_ctrl_z_stops_the_run_and_fg_lets_it_go_on(tmp_path):
    """A supervisor in a process of its own, whose child sleeps in a group of its own."""
    script = (
        "import subprocess, sys\n"
        "from weft.launch.supervisor import Supervisor\n"
        "made = object.__new__(Supervisor)\n"
        "made._stop_signal = None\n"
        "made._child = subprocess.Popen(['sleep', '100'], process_group=0)\n"
        "with made._forward_signals():\n"
        "    print(made._child.pid, flush=True)\n"
        "    made._child.wait()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, process_group=0
    ) as own:
        assert own.stdout is not None
        child = int(own.stdout.readline())
        own.send_signal(signal.SIGTSTP)
        states_become((own.pid, child), "T")
        own.send_signal(signal.SIGCONT)
        states_become((own.pid, child), "S")
        own.send_signal(signal.SIGTERM)
        assert own.wait(30) == 0, "the child was ended, and it alone"


def states_become(pids, state: str) -> None:
    end = time.monotonic() + 30
    while [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids] != [
        state
    ] * len(pids):
        assert time.monotonic() < end, f"not all of them are {state}"
        time.sleep(0.01)
