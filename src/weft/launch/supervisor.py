"""Restarts of a run from its last recovery point, after a loss of devices or of its process.

`RestartingRun` replaces the session if devices are lost. `Supervisor` runs the whole run in a child
process, which is replaced if it is killed. This is needed for runs with Ray: if Ray's daemon
(raylet) dies on a machine, Ray kills all processes on this machine that use the daemon.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from weft.engine.service_spec import NO_NETWORK
from weft.errors import CheckpointError, DevicesLost, Interrupted, NotFinite, RunError
from weft.experiment import Experiment
from weft.experiments.models import find_option_role
from weft.observe.jsonl import read_rows
from weft.observe.logs import append
from weft.observe.observer import METRICS
from weft.runtime.directory import RunDirectory
from weft.runtime.processes import (
    SIGNAL_NAMES,
    SIGNALS,
    SUPERVISOR_VARIABLE,
    adopt_orphans,
    find_descendants,
    kill_processes,
)

if TYPE_CHECKING:
    from weft.runtime.session import Session

MAX_RESTARTS = 3  # maximum restarts without a new step
POLL_SECONDS = 1.0  # interval between checks of the child
EXIT_SECONDS = 120.0  # time for a child to exit after it has reported its exit code


def needs_ray(experiment: Experiment, mode: str) -> bool:
    """Return whether the run uses Ray, and therefore needs supervision."""
    return mode == "ray" or experiment.num_devices > 1


def _read_lines(child: subprocess.Popen[bytes], pipe: int) -> Iterator[bytes]:
    """Yield the lines that a child process writes to `pipe`, until the child has ended.

    Does not wait for the end of the pipe, because orphans of the child can keep the pipe open.
    """
    unfinished = b""
    while True:
        has_ended = child.poll() is not None
        if select.select([pipe], [], [], POLL_SECONDS)[0]:
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                return
            *lines, unfinished = (unfinished + chunk).split(b"\n")
            yield from lines
        elif has_ended:
            return


class Supervisor:
    """Parent process of a run, which executes the run in a child process with the same command.

    If the child is killed, a new child continues the run. If the child reports an exit code, `run`
    returns it.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._directory = RunDirectory.from_control(experiment.control)
        self._child: subprocess.Popen[bytes] | None = None
        self._stop_signal: int | None = None  # signal that asked the run to stop
        self._calls: dict[int, dict[str, Any]] = {}  # running calls by job number
        self._lost_part: str | None = None  # lost part of Ray
        self._exit_code: int | None = None

    def run(self) -> int:
        """Run child processes and return the exit code that the last one reports.

        Raises `Interrupted` if a signal stopped the child outside of its steps, and `RunError` if a
        child was killed and is not replaced. The message names the process, the machine and the
        calls that were running.
        """
        lost = ""
        restarts = 0
        restarts_left = MAX_RESTARTS
        furthest = -1
        adopt_orphans()  # so that processes left by a killed child can be ended here
        with self._forward_signals():
            while True:
                code = self._run_child(restarts)
                if self._exit_code is not None:
                    return self._exit_code
                kill_processes(find_descendants())
                if self._directory.read_status() == "finished":
                    return 0
                step = self._read_last_step()
                if -code in SIGNALS and self._lost_part is None:
                    raise self._record_stop(-code, step)
                lost = self._describe_killed()
                if step > furthest:
                    restarts_left = MAX_RESTARTS
                    furthest = step
                why_not = self._explain_no_restart(restarts_left, step)
                if why_not is not None:
                    raise self._record_failure(f"{lost}{why_not}", step)
                restarts_left = restarts_left - 1
                restarts = restarts + 1
                self._print_note(
                    f"{lost}; continuing with a new process "
                    f"(restart {MAX_RESTARTS - restarts_left} of {MAX_RESTARTS})"
                )

    def _run_child(self, restarts: int) -> int:
        """Run one child until it ends, and return its exit code, or -number if a signal ended it.

        `restarts` is the number of earlier children.
        """
        self._calls = {}
        self._lost_part = None
        self._exit_code = None
        read_end, write_end = os.pipe()
        environment = {**os.environ, SUPERVISOR_VARIABLE: f"{write_end}:{restarts}:{os.getpid()}"}
        child = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env=environment,
            pass_fds=[write_end],
            process_group=0,
        )
        self._child = child
        os.close(write_end)
        if self._stop_signal is not None:
            self._send_signal(self._stop_signal)
        try:
            for line in _read_lines(child, read_end):
                with suppress(ValueError):  # incomplete last line
                    self._process_message(json.loads(line))
                if self._exit_code is not None:
                    break
        finally:
            os.close(read_end)
        try:
            child.wait(None if self._exit_code is None else EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        return child.returncode

    def _process_message(self, message: dict[str, Any]) -> None:
        if "started_call" in message:
            self._calls[message["started_call"]] = message
        elif "finished_call" in message:
            self._calls.pop(message["finished_call"], None)
        elif "released_devices" in message:
            self._calls = {}
            self._lost_part = None
        elif "lost_part" in message:
            self._lost_part = message["lost_part"]
        elif "exit_code" in message:
            self._exit_code = message["exit_code"]

    @contextmanager
    def _forward_signals(self) -> Iterator[None]:
        """Forward signals to the child during the body of a `with` statement.

        The child has its own process group, so it receives Ctrl-C only once, from this process.
        Ctrl-Z stops both processes, and `fg` resumes both.
        """

        def forward(number: int, frame: FrameType | None) -> None:
            self._stop_signal = number
            self._send_signal(number)

        def pause(number: int, frame: FrameType | None) -> None:
            self._send_signal_to_group(signal.SIGTSTP)
            os.kill(os.getpid(), signal.SIGSTOP)

        def resume(number: int, frame: FrameType | None) -> None:
            self._send_signal_to_group(signal.SIGCONT)

        handlers = {
            signal.SIGINT: forward,
            signal.SIGTERM: forward,
            signal.SIGTSTP: pause,
            signal.SIGCONT: resume,
        }
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _send_signal(self, number: int) -> None:
        if self._child is not None:
            self._child.send_signal(number)

    def _send_signal_to_group(self, number: int) -> None:
        """Send a signal to the child's process group, if the child is alive."""
        if self._child is not None and self._child.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)

    def _describe_killed(self) -> str:
        """Return a description of the killed child: process, machine, signal, running calls."""
        assert self._child is not None and self._child.returncode is not None
        code = self._child.returncode
        if code < 0:
            ending = f"was killed by {signal.Signals(-code).name}"
        else:
            ending = f"ended with exit code {code}"
        roles = {call.name: call.role for call in self._experiment.calls.values()}
        calls = []
        for running in list(self._calls.values())[:3]:
            name = running["call"].rpartition("/")[2]
            calls.append(
                f"call {name!r} of role {roles[name]!r} (firing {running['firing']}, "
                f"{', '.join(running['where'])})"
            )
        place = f" in {' or '.join(calls)}" if calls else ""
        cause = (
            self._lost_part
            or "Ray kills it if the raylet of its machine dies, the system if memory runs out"
        )
        process = f"the run's process {self._child.pid} on {socket.gethostname()}"
        return f"{process} {ending}{place}; {cause}"

    def _explain_no_restart(self, restarts_left: int, step: int) -> str | None:
        """Return the reason why a killed child is not replaced, or None if it should be replaced.

        `restarts_left` is the number of restarts left, and `step` is the last step that the run
        completed.
        """
        if self._stop_signal is not None:
            return (
                "; it had been asked to stop; the same command resumes from the last recovery point"
            )
        if self._experiment.control.recover_mode != "auto":
            return f"; recover_mode={self._experiment.control.recover_mode} does not restart it"
        if not restarts_left:
            return f"; {MAX_RESTARTS} restarts made no progress after step {step}"
        return None if self._directory.has_run() else "; it had not started"

    def _read_last_step(self) -> int:
        """Return the last step recorded in metrics.jsonl, or 0 if the file has no steps."""
        return max(
            (int(line["step"]) for line in read_rows(self._directory.path / METRICS)), default=0
        )

    def _record_stop(self, number: int, step: int) -> Interrupted:
        """Return the error for a child that the signal `number` has ended, and record the stop.

        During its steps, a session finishes a step after a signal and reports its exit code. At
        other times, for example while Ray starts, the signal ends the process.
        """
        name = SIGNAL_NAMES.get(number, signal.Signals(number).name)
        message = f"stopped by {name} outside of a step; the same command continues the run"
        if self._directory.has_run():
            append(self._directory.path, message)
            self._directory.set_status("stopped", step)
        return Interrupted(message, number)

    def _record_failure(self, message: str, step: int) -> RunError:
        if self._directory.has_run():
            append(self._directory.path, f"error: {message}")
            self._directory.set_status("failed", step)
        return RunError(message)

    def _print_note(self, line: str) -> None:
        append(self._directory.path, line)
        print(line, file=sys.stderr, flush=True)


class RestartingRun:
    """Run that restarts itself after a loss of devices, if `recover_mode` is `auto`.

    For each restart, `create_session` is called to create a new session. If the run fails because
    of non-finite numbers, the weight files of all roles are searched for the cause.
    """

    def __init__(
        self,
        session: Session,
        create_session: Callable[[], Session],
        experiment: Experiment,
    ) -> None:
        self._session = session
        self._create_session = create_session
        self._experiment = experiment
        self._restarts_left = MAX_RESTARTS
        self._last_step = -1

    def run(self, *, resumes: bool) -> list[dict[str, Any]]:
        """Run to the end and return the metrics: one mapping per line of metrics.jsonl.

        With `resumes`, an earlier run in the same directory is resumed. The outcome of the run
        (finished, stopped or failed) is recorded in any case. If recording fails, a note on this is
        added to the error that ended the run.
        """
        try:
            self._session.open(resumes=resumes)
            is_over = False
            while not is_over:
                try:
                    self._session.run()
                    is_over = True
                except DevicesLost as lost:
                    if self._experiment.control.recover_mode != "auto":
                        raise
                    self._restart(lost)
                except NotFinite as error:
                    raise find_damaged_weights(self._experiment) or error from error
        except BaseException as error:
            stopped = isinstance(error, Interrupted | KeyboardInterrupt)
            try:
                self._session.close("stopped" if stopped else "failed", None if stopped else error)
            except RunError as trouble:
                error.add_note(str(trouble))
            if isinstance(error, KeyboardInterrupt):
                interruption = self._session.build_interruption()
            else:
                interruption = None
            if interruption is not None:
                raise interruption from error
            raise
        self._session.close("finished")
        return self._session.metrics()

    def _restart(self, lost: DevicesLost) -> None:
        """Replace the session that lost its devices with a new one.

        The new session resumes from the last recovery point. `lost` is the error that reported the
        loss. Raises `RunError` after too many restarts.
        """
        while True:
            self._count_restart(lost)
            attempt = f"restart {MAX_RESTARTS - self._restarts_left} of {MAX_RESTARTS}"
            self._session.release_devices(f"{lost}; continuing with new processes ({attempt})")
            try:
                session = self._create_session()
                try:
                    session.open(resumes=True, instead_of=self._session)
                except BaseException:
                    session.close("failed")
                    raise
            except DevicesLost as error:
                lost = error
                continue
            except RunError as error:
                raise RunError(f"{lost}; {error}") from error
            self._session = session
            return

    def _count_restart(self, lost: DevicesLost) -> None:
        """Count a restart, and raise `RunError` if there were too many without progress.

        At most `MAX_RESTARTS` restarts without progress are allowed. The count is reset if the run
        has completed more steps than at any earlier restart. `lost` is the error that reported the
        loss of devices.
        """
        if self._session.step > self._last_step:
            self._restarts_left = MAX_RESTARTS
            self._last_step = self._session.step
        if not self._restarts_left:
            raise RunError(
                f"{lost}; {MAX_RESTARTS} restarts made no progress after step {self._last_step}"
            )
        self._restarts_left -= 1


def find_damaged_weights(experiment: Experiment) -> CheckpointError | None:
    """Return an error that names a role whose weight files contain non-finite values.

    Returns None if the files of all roles are intact. Reads all weight files again, which can take
    a long time, so it should be called only after a run has failed.
    """
    from weft.checkpoints.hf_io import find_weights
    from weft.checkpoints.weight_files import WeightFiles

    for role, spec in experiment.roles.items():
        if spec.path is None or spec.init_from_scratch or spec.backend in NO_NETWORK:
            continue
        damage = WeightFiles(find_weights(spec.path)).find_not_finite()
        if damage is not None:
            option = f"{find_option_role(experiment.config, role, spec.path)}.path"
            return CheckpointError(
                f"{option}={spec.path}: the weights are damaged: they have non-finite values "
                f"({damage}); "
                "take another checkpoint, or download the model again"
            )
    return None
