"""Names of runs without a name, and unfinished runs that are continued in their place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_llama, prompt_answer_rows, write_jsonl
from weft.cli.main import main
from weft.cli.named_run import with_names
from weft.experiments import SFTConfig
from weft.experiments.common import build_experiment
from weft.runtime.directory import RunDirectory, RunLock


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SFTConfig:
    monkeypatch.chdir(tmp_path)
    made = SFTConfig(max_steps=2)
    made.model.path = str(make_llama(tmp_path / "model"))
    made.dataset.path = str(write_jsonl(tmp_path / "rows.jsonl", prompt_answer_rows()))
    return made


def leave(config: SFTConfig, trial: str, status: Any) -> RunDirectory:
    """Write the files of a run of the configuration with the status `status`."""
    experiment = build_experiment(replace(config, experiment_name="my-recipe", trial_name=trial))
    directory = RunDirectory.from_control(experiment.control)
    directory.write_config(experiment.resolve())
    directory.set_status(status, 1)
    return directory


def chosen(config: SFTConfig) -> tuple[str, str | None]:
    named, told = with_names(config, "my_recipe")
    assert named.experiment_name == "my-recipe"
    return named.trial_name, told


def test_new_runs_get_the_next_number(
    config: SFTConfig,
) -> None:
    assert chosen(config) == ("1", "this run is runs/my-recipe/1")
    leave(config, "1", "finished")
    leave(config, "9", "finished")
    leave(config, "mine", "stopped")
    assert chosen(config) == ("10", "this run is runs/my-recipe/10")


def test_the_newest_unfinished_run_of_the_same_configuration_is_continued(
    config: SFTConfig,
) -> None:
    for trial in ("1", "2"):
        leave(config, trial, "stopped")
    leave(replace(config, seed=5), "3", "failed")
    goes_on = ("2", "continuing runs/my-recipe/2, an unfinished run of this configuration")
    assert chosen(config) == goes_on
    assert chosen(replace(config, seed=5))[0] == "3"
    assert chosen(replace(config, max_steps=7))[0] == "4"
    assert chosen(replace(config, recover_mode="disabled"))[0] == "4"
    assert chosen(replace(config, resume_from="runs/my-recipe/2"))[0] == "4"
    lock = RunLock(Path("runs/my-recipe/2"))
    lock.take()
    try:
        assert chosen(config)[0] == "1", "somebody works on the newer one"
    finally:
        lock.release()


def test_names_that_are_given_stay(config: SFTConfig) -> None:
    whole = replace(config, experiment_name="e", trial_name="t")
    assert with_names(whole, "sft") == (whole, None)
    assert with_names(replace(config, trial_name="t"), "sft")[0] == replace(
        config, experiment_name="sft", trial_name="t"
    )
    assert with_names(replace(config, experiment_name="e"), "sft")[0] == replace(
        config, experiment_name="e", trial_name="1"
    )


def test_commands_without_names_make_one_run_after_the_other(
    config: SFTConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "quickstart",
        "sft",
        f"model.path={config.model.path}",
        f"dataset.path={config.dataset.path}",
        "max_steps=1",
        "dataset.train_bs_n_seqs=4",
    ]
    for number in (1, 2):
        assert main(words) == 0
        assert f"note: this run is runs/sft/{number}\n" in capsys.readouterr().err
        assert (Path("runs/sft") / str(number) / "report.html").is_file()


def test_every_missing_option_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_HOST_RM", raising=False)
    assert main(["quickstart", "grpo", "max_steps=1"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: these options are missing: ") and len(told.splitlines()) == 1
    assert [part.partition("=")[0] for part in told.partition("missing: ")[2].split("; ")] == [
        "actor.path",
        "dataset.path",
        "reward",
    ]
    assert not (tmp_path / "runs").exists()
