"""Supervision of a run in a child process, which is replaced if it is killed.

Runs that use Ray need this, since Ray can kill the process that uses it. The new child resumes from
the last recovery point.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from weft.errors import RunError
from weft.experiment import Experiment
from weft.launch.recover import RESTARTS
from weft.observe.jsonl import read_rows
from weft.observe.logs import append
from weft.observe.observer import METRICS
from weft.runtime.directory import RunDirectory
from weft.runtime.processes import adopt_orphans, descendants, kill
from weft.runtime.supervised import SUPERVISED

LOOK_SECONDS = 1.0  # interval between checks of the child
END_SECONDS = 120.0  # time for a child to exit after it has reported its exit code


def uses_ray(experiment: Experiment, mode: str) -> bool:
    """Return whether the run uses Ray, and thus needs supervision."""
    return mode == "ray" or experiment.num_devices > 1


def _told_by(child: subprocess.Popen[bytes], pipe: int) -> Iterator[bytes]:
    """Yield the lines that a child writes, until it has ended.

    Waiting for the end of the pipe is not enough: orphans of the child can keep it open.
    """
    held = b""
    while True:
        gone = child.poll() is not None
        if select.select([pipe], [], [], LOOK_SECONDS)[0]:
            found = os.read(pipe, 1 << 16)
            if not found:
                return
            *lines, held = (held + found).split(b"\n")
            yield from lines
        elif gone:
            return


class Supervisor:
    """Run this process's command in a child, restarting it until one reports its exit code."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._directory = RunDirectory.of(experiment.control)
        self._child: subprocess.Popen[bytes] | None = None
        self._asked: int | None = None  # signal that asked the run to stop
        self._calls: dict[int, dict[str, Any]] = {}  # running calls by job number
        self._gone: str | None = None  # lost part of Ray
        self._code: int | None = None

    def run(self) -> int:
        """Run the children and return the exit code.

        Raises `RunError`, naming process, machine and calls, if a child was killed and is not
        replaced.
        """
        lost = ""
        restarts = 0
        left = RESTARTS
        furthest = -1
        adopt_orphans()  # so that processes left by a killed child can be ended here
        with self._signals_passed_on():
            while True:
                self._follow(restarts)
                if self._code is not None:
                    return self._code
                kill(descendants())
                if self._directory.status() == "finished":
                    return 0
                lost = self._told()
                step = self._step()
                if step > furthest:
                    left = RESTARTS
                    furthest = step
                why_not = self._why_not(left, step)
                if why_not is not None:
                    raise self._failed(f"{lost}{why_not}", step)
                left = left - 1
                restarts = restarts + 1
                self._note(
                    f"{lost}; continuing with a new process (restart {RESTARTS - left} of "
                    f"{RESTARTS})"
                )

    def _follow(self, restarts: int) -> None:
        """Run one child to its end."""
        self._calls = {}
        self._gone = None
        self._code = None
        ours, its = os.pipe()
        environment = {**os.environ, SUPERVISED: f"{its}:{restarts}:{os.getpid()}"}
        self._child = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]], env=environment, pass_fds=[its], process_group=0
        )
        os.close(its)
        if self._asked is not None:
            self._pass_on(self._asked)
        try:
            for each in _told_by(self._child, ours):
                with suppress(ValueError):  # incomplete last line
                    self._hear(json.loads(each))
                if self._code is not None:
                    break
        finally:
            os.close(ours)
        try:
            self._child.wait(None if self._code is None else END_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _hear(self, told: dict[str, Any]) -> None:
        if "began" in told:
            self._calls[told["began"]] = told
        elif "over" in told:
            self._calls.pop(told["over"], None)
        elif "anew" in told:
            self._calls = {}
            self._gone = None
        elif "gone" in told:
            self._gone = told["gone"]
        elif "ends" in told:
            self._code = told["ends"]

    @contextmanager
    def _signals_passed_on(self) -> Iterator[None]:
        """Forward signals to the child within the block.

        The child has its own process group, so it gets Ctrl-C only once, from this process. Ctrl-Z
        stops both, and fg resumes both.
        """

        def hear(number: int, frame: FrameType | None) -> None:
            self._asked = number
            self._pass_on(number)

        def pause(number: int, frame: FrameType | None) -> None:
            self._pass_to_group(signal.SIGTSTP)
            os.kill(os.getpid(), signal.SIGSTOP)

        def resume(number: int, frame: FrameType | None) -> None:
            self._pass_to_group(signal.SIGCONT)

        handlers = {
            signal.SIGINT: hear,
            signal.SIGTERM: hear,
            signal.SIGTSTP: pause,
            signal.SIGCONT: resume,
        }
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int) -> None:
        if self._child is not None:
            self._child.send_signal(number)

    def _pass_to_group(self, number: int) -> None:
        """Send a signal to the child's process group, if the child is alive."""
        if self._child is not None and self._child.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)

    def _told(self) -> str:
        """Describe the killed child: process, machine, signal and running calls."""
        assert self._child is not None and self._child.returncode is not None
        code = self._child.returncode
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        roles = {call.name: call.role for call in self._experiment.calls()}
        calls = []
        for each in list(self._calls.values())[:3]:
            name = each["call"].rpartition("/")[2]
            calls.append(
                f"call {name!r} of role {roles[name]!r} (firing {each['firing']}, "
                f"{', '.join(each['where'])})"
            )
        at = f" in {' or '.join(calls)}" if calls else ""
        why = (
            self._gone
            or "Ray kills it if the raylet of its machine dies, the system if memory runs out"
        )
        return f"the run's process {self._child.pid} on {socket.gethostname()} {how}{at}; {why}"

    def _why_not(self, left: int, step: int) -> str | None:
        """Return why the child is not replaced, or None if it is."""
        if self._asked is not None:
            return (
                "; it had been asked to stop; the same command resumes from the last recovery point"
            )
        if self._experiment.control.recover_mode != "auto":
            return f"; recover_mode={self._experiment.control.recover_mode} does not restart it"
        if not left:
            return f"; {RESTARTS} restarts made no progress after step {step}"
        return None if self._directory.holds_run() else "; it had not started"

    def _step(self) -> int:
        """Return the last step in metrics.jsonl."""
        return max(
            (int(line["step"]) for line in read_rows(self._directory.path / METRICS)), default=0
        )

    def _failed(self, message: str, step: int) -> RunError:
        if self._directory.holds_run():
            append(self._directory.path, f"error: {message}")
            self._directory.set_status("failed", step)
        return RunError(message)

    def _note(self, line: str) -> None:
        append(self._directory.path, line)
        print(line, file=sys.stderr, flush=True)
