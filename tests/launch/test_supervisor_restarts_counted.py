"""When a run comes back and when it does not, with sessions that a test plays."""

from __future__ import annotations

import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from weft.errors import ConfigError, DevicesLost, Interrupted, RunError
from weft.experiment import Control
from weft.launch import supervisor
from weft.launch.supervisor import RestartingRun, Supervisor
from weft.runtime.directory import RunDirectory


class Played:
    """A session that makes steps up to `until` and then meets `trouble`."""

    def __init__(
        self, until: int, trouble: BaseException | None = None, at_open: BaseException | None = None
    ) -> None:
        self.step, self._until, self._trouble, self._at_open = 0, until, trouble, at_open
        self.said: list[str] = []

    def open(self, *, resumes: bool, instead_of: Any = None) -> None:
        if self._at_open is not None:
            raise self._at_open
        self.said.append(f"open {resumes}")
        if instead_of is not None:
            self.step = instead_of.step
            instead_of.said.append("retired")

    def run(self) -> None:
        self.step = max(self.step, self._until)
        if self._trouble is not None:
            raise self._trouble

    def build_interruption(self) -> None:
        return None

    def release_devices(self, why: str) -> None:
        self.said.append(why)

    def close(self, status: str, error: BaseException | None = None) -> None:
        self.said.append(status)

    def metrics(self) -> list[dict[str, Any]]:
        return [{"step": step + 1} for step in range(self.step)]


def lost(who: str = "device 1 died") -> DevicesLost:
    return DevicesLost(who)


def drive(*sessions: Any, restarts_automatically: bool = True) -> list[dict[str, Any]]:
    rest = iter(sessions[1:])

    def anew() -> Any:
        made = next(rest)
        if isinstance(made, BaseException):
            raise made
        return made

    control = SimpleNamespace(recover_mode="auto" if restarts_automatically else "resume")
    experiment: Any = SimpleNamespace(control=control, roles={})
    return RestartingRun(sessions[0], anew, experiment).run(resumes=False)


def test_a_run_goes_on_in_another_session_and_the_first_says_why():
    first, second = Played(3, lost()), Played(5)
    assert len(drive(first, second)) == 5
    assert first.said == [
        "open False",
        "device 1 died; continuing with new processes (restart 1 of 3)",
        "retired",
    ]
    assert second.said == ["open True", "finished"]


@pytest.mark.parametrize(
    "error", [ConfigError("x=1: wrong"), RunError("the disk is full"), KeyboardInterrupt()]
)
def test_nothing_else_brings_it_back(error):
    first = Played(3, error)
    with pytest.raises(type(error)):
        drive(first, Played(5))
    assert first.said == [
        "open False",
        "stopped" if isinstance(error, KeyboardInterrupt) else "failed",
    ]


def test_recover_mode_says_whether():
    first = Played(3, lost())
    with pytest.raises(DevicesLost, match=r"^device 1 died$"):
        drive(first, Played(5), restarts_automatically=False)
    assert first.said == ["open False", "failed"]


def test_three_restarts_without_a_step_are_the_end():
    sessions = [Played(3, lost(f"death {index}")) for index in range(4)]
    with pytest.raises(
        RunError, match="death 3; 3 restarts made no progress after step 3"
    ) as caught:
        drive(*sessions)
    assert not isinstance(caught.value, DevicesLost)
    assert sessions[3].said == ["open True", "failed"]


def test_a_new_step_is_worth_three_more():
    assert len(drive(*(Played(step // 3, lost()) for step in range(9)), Played(4))) == 4


def test_devices_that_die_while_the_session_is_made_count_too():
    first, last = Played(3, lost()), Played(5)
    half_made = Played(0, at_open=lost("device 0 died"))
    assert len(drive(first, lost("device 2 died"), half_made, last)) == 5
    assert first.said[2:4] == [
        "device 2 died; continuing with new processes (restart 2 of 3)",
        "device 0 died; continuing with new processes (restart 3 of 3)",
    ]
    assert half_made.said == ["failed"], "its devices are let go of"


def test_where_no_devices_come_the_message_has_both():
    first = Played(3, lost())
    with pytest.raises(
        RunError, match="device 1 died; the lost devices were not replaced: 1 is missing"
    ):
        drive(first, RunError("the lost devices were not replaced: 1 is missing"))
    assert first.said[-1] == "failed"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("has_run", [True, False])
def test_a_signal_while_ray_starts_ends_the_run(tmp_path, monkeypatch, number, code, has_run):
    """`weft stop` signals the child, whose session does not handle signals yet."""
    control = Control(experiment_name="e", trial_name="t", fileroot=str(tmp_path))
    directory = RunDirectory.from_control(control)
    if has_run:
        directory.path.mkdir(parents=True)
        directory.write_config({})
        (directory.path / "metrics.jsonl").write_text('{"step": 4}\n')
    number = int(number)
    ends_itself = f"import os, signal; signal.signal({number}, signal.SIG_DFL); os.kill(os.getpid(), {number})"
    monkeypatch.setattr(supervisor, "adopt_orphans", lambda: None)
    monkeypatch.setattr(supervisor, "find_descendants", list)  # processes of other tests
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", ends_itself])
    with pytest.raises(Interrupted, match="outside of a step; the same command") as caught:
        Supervisor(SimpleNamespace(control=control)).run()
    assert caught.value.exit_code == code
    if has_run:
        assert directory.read_status() == "stopped"
        assert "outside of a step" in (directory.path / "log.txt").read_text()
    else:
        assert not directory.path.exists()
