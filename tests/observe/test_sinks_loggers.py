"""W&B and Trackio, with stand-ins for the packages."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from weft.errors import ConfigError
from weft.observe.sinks import RunInfo, make_sinks

SECRET = "0123456789abcdef0123456789abcdef01234567"


class Session:
    """W&B run of which the server has all steps before `step`."""

    def __init__(self, step: int = 0) -> None:
        self.step, self.logged, self.finished = step, [], False  # type: ignore[var-annotated]

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


class StandIn(ModuleType):
    class Error(Exception):
        pass

    class Table:
        def __init__(self, columns: list[str], data: list[list[str]]) -> None:
            self.columns, self.data = columns, data

    def __init__(self, name: str, session: Session, problem: str | None = None) -> None:
        super().__init__(name)
        self.session, self.problem, self.started = session, problem, []  # type: ignore[var-annotated]

    def login(self, **options: Any) -> bool:
        if self.problem:
            raise self.Error(self.problem)
        return True

    def init(self, **options: Any) -> Session:
        self.started.append(options)
        return self.session


@pytest.fixture(autouse=True)
def no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(name: str, session: Session, problem: str | None = None) -> StandIn:
        module = StandIn(name, session, problem)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
        return module

    return make


def test_a_resumed_wandb_run_continues_without_repeats(tmp_path: Path, stand_in: Any) -> None:
    info = RunInfo(tmp_path, "exp", "trial", {"seed": 1})
    first = stand_in("wandb", Session())
    (sink,) = make_sinks({"wandb": {"mode": "online", "project": "p", "prefix": "mine"}}, info)
    sink.log_samples(1, [{"prompt": "a", "completion": "b"}])
    sink.log(1, {"train/loss": 0.5})
    sink.close()
    (options,) = first.started
    assert (options["project"], options["name"], options["resume"], options["config"]) == (
        "p",
        "trial",
        "allow",
        {"seed": 1},
    )
    assert first.session.logged[1] == (1, {"mine/train/loss": 0.5}) and first.session.finished
    assert first.session.logged[0][1]["mine/samples"].data == [["1", "", "a", "b", ""]]

    second = stand_in("wandb", Session(step=3))
    (again,) = make_sinks({"wandb": {"mode": "online"}}, info)
    for step in (2, 3, 4):
        again.log(step, {"train/loss": 1.0})
    assert second.started[0]["id"] == options["id"] and second.started[0]["project"] == "exp"
    assert [step for step, _ in second.session.logged] == [3, 4]


def test_options_of_wandb_are_passed_on_and_an_id_is_taken_as_given(
    tmp_path: Path, stand_in: Any
) -> None:
    module = stand_in("wandb", Session())
    given = {
        "mode": "offline",
        "entity": "team",
        "name": "n",
        "id": "abc",
        "dir": "/d",
        "project": "p",
    }
    make_sinks({"wandb": given}, RunInfo(tmp_path, "exp", "trial", {}))
    assert given.items() <= module.started[0].items()
    assert not (tmp_path / "wandb-id.txt").exists()


def test_a_failed_login_is_reported_before_anything_is_written(
    tmp_path: Path, stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("wandb", Session(), problem="invalid key.")
    with pytest.raises(ConfigError, match="the login failed: invalid key; run `wandb login`"):
        make_sinks({"wandb": {"mode": "online"}}, RunInfo(tmp_path, "exp", "trial", {}))
    assert list(tmp_path.iterdir()) == []


def test_offline_needs_no_login_and_skips_logged_steps(tmp_path: Path, stand_in: Any) -> None:
    module = stand_in("wandb", Session(), problem="no network")
    (sink,) = make_sinks(
        {"wandb": {"mode": "offline"}},
        RunInfo(tmp_path, "exp", "trial", {}, resumed_step=1, last_logged_step=2),
    )
    for step in (2, 3):
        sink.log(step, {"x": 1.0})
    assert [step for step, _ in module.session.logged] == [3]


@pytest.mark.parametrize(
    ("options", "variable", "mode"),
    [
        ({}, "offline", "offline"),
        ({}, "disabled", "disabled"),
        ({"mode": "online"}, "offline", "online"),
        ({}, "", "online"),
    ],
)
def test_the_environment_sets_the_mode_without_an_option(
    tmp_path: Path,
    stand_in: Any,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    variable: str,
    mode: str,
) -> None:
    monkeypatch.setenv("WANDB_MODE", variable)
    module = stand_in("wandb", Session(), problem=None if mode == "online" else "no network")
    make_sinks({"wandb": {"project": "p", **options}}, RunInfo(tmp_path, "exp", "trial", {}))
    assert module.started[0]["mode"] == mode


def test_a_mode_that_does_not_exist_is_refused_before_anything_is_written(
    tmp_path: Path, stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "ofline")
    stand_in("wandb", Session())
    with pytest.raises(
        ConfigError, match=r"WANDB_MODE='ofline': must be one of online, offline, disabled"
    ):
        make_sinks({"wandb": {"project": "p"}}, RunInfo(tmp_path, "exp", "trial", {}))
    assert list(tmp_path.iterdir()) == []


def test_the_key_is_written_nowhere(
    tmp_path: Path, stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    module = stand_in("wandb", Session())
    (sink,) = make_sinks(
        {"wandb": {"mode": "online"}}, RunInfo(tmp_path, "exp", "trial", {"seed": 1})
    )
    sink.log(1, {"x": 1.0})
    sink.close()
    assert SECRET not in repr(module.started) + repr(module.session.logged)
    assert all(SECRET not in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


def test_trackio_continues_under_the_same_name(tmp_path: Path, stand_in: Any) -> None:
    module = stand_in("trackio", Session())
    (sink,) = make_sinks(
        {"trackio": {"project": "p"}},
        RunInfo(tmp_path, "exp", "trial", {}, resumed_step=1, last_logged_step=2),
    )
    for step in (2, 3):
        sink.log_samples(step, [{"completion": "c"}])
        sink.log(step, {"x": 1.0})
    sink.close()
    options = module.started[0]
    assert (options["project"], options["name"], options["resume"]) == ("p", "trial", "allow")
    assert [step for step, _ in module.session.logged] == [3, 3] and module.session.finished
