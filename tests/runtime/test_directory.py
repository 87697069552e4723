"""Which directories a run may enter, and who keeps it out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.errors import ConfigError
from weft.experiment import Control
from weft.runtime.directory import RunDirectory, RunLock, admit, find_owner, list_differences

CONFIG = {"seed": 1, "model": {"path": "m", "optimizer": {"lr": 1e-5}}, "recover_mode": "auto"}


@pytest.fixture
def control(tmp_path) -> Control:
    return Control("e", "t", fileroot=str(tmp_path))


def begun(control: Control) -> RunDirectory:
    directory = RunDirectory.from_control(control)
    directory.write_config(CONFIG)
    directory.set_status("running", 0)
    return directory


def test_an_empty_place_begins_a_run_and_an_unfinished_one_goes_on(control):
    assert admit(RunDirectory.from_control(control), control, CONFIG) is False
    directory = begun(control)
    assert admit(directory, control, CONFIG) is True
    assert admit(directory, control, CONFIG | {"recover_mode": "resume"}) is True, (
        "how to go on is no other run"
    )


def test_another_configuration_is_refused_and_what_differs_is_named(control):
    directory = begun(control)
    with pytest.raises(
        ConfigError, match=r"model\.optimizer\.lr: 1e-05 there, 0\.1 here"
    ) as caught:
        admit(
            directory,
            control,
            {"seed": 1, "model": {"path": "m", "optimizer": {"lr": 0.1}}, "recover_mode": "auto"},
        )
    assert "seed" not in str(caught.value) and "trial_name" in str(caught.value)


def test_a_finished_run_is_refused(control):
    directory = begun(control)
    directory.set_status("finished", 5)
    with pytest.raises(ConfigError, match="finished run"):
        admit(directory, control, CONFIG)


def test_recover_modes_demand_or_refuse_a_run(control, tmp_path):
    resume = Control("e", "t", fileroot=str(tmp_path), recover_mode="resume")
    with pytest.raises(ConfigError, match="recover_mode=resume: there is no run"):
        admit(RunDirectory.from_control(resume), resume, CONFIG)
    directory = begun(control)
    with pytest.raises(ConfigError, match="recover_mode=disabled"):
        admit(directory, Control("e", "t", fileroot=str(tmp_path), recover_mode="disabled"), CONFIG)


def test_files_that_are_no_runs_are_left_alone(control):
    directory = RunDirectory.from_control(control)
    directory.path.mkdir(parents=True)
    (directory.path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        admit(directory, control, CONFIG)


def test_differences_survive_the_way_through_yaml(control):
    directory = begun(control)
    assert list_differences(directory.read_config(), CONFIG) == []
    assert list_differences({"a": {"b": 1}}, {"a": {"c": 1}}) == [
        "a.b: 1 there, null here",
        "a.c: null there, 1 here",
    ]
    assert list_differences({"a": {"b": True}}, {"a": None}) == ["a: set there, null here"]


def test_an_option_that_an_older_weft_did_not_have_is_at_its_default(control):
    directory = begun(control)
    newer = CONFIG | {
        "model": {**CONFIG["model"], "fp8": False},
        "search": {"gpu": None, "memory": {"share": 0.9}},
    }
    assert (
        admit(directory, control, newer, {"model.fp8", "search.gpu", "search.memory.share"}) is True
    )
    with pytest.raises(ConfigError, match=r"model\.fp8: null there, false here"):
        admit(directory, control, newer, {"search.gpu", "search.memory.share"})
    with pytest.raises(ConfigError, match=r"model\.optimizer\.lr: 1e-05 there, 0\.1 here"):
        admit(
            directory,
            control,
            CONFIG | {"model": {"path": "m", "optimizer": {"lr": 0.1}}},
            {"model.optimizer.lr"},
        )


def test_a_second_process_is_kept_out_and_a_dead_one_is_not_waited_for(tmp_path):
    run = tmp_path / "e" / "t"
    lock = RunLock(run)
    lock.take()
    code = f"from pathlib import Path; from weft.runtime.directory import RunLock; RunLock(Path({str(run)!r})).take()"
    second = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert f"written by process {os.getpid()}" in second.stderr
    assert find_owner(run) == os.getpid()
    lock.release()
    assert find_owner(run) is None and not run.exists(), "nothing is left of a run that never began"
    killed = code + "; import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", killed], check=False)
    assert (run / "run.lock").is_file() and find_owner(run) is None
    lock.take()
    assert json.loads((run / "run.lock").read_text())["pid"] == os.getpid()
    lock.release()


def test_release_leaves_what_others_made(tmp_path: Path):
    (tmp_path / "e" / "other").mkdir(parents=True)
    lock = RunLock(tmp_path / "e" / "t")
    lock.take()
    lock.release()
    assert [p.name for p in (tmp_path / "e").iterdir()] == ["other"]
