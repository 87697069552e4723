"""`weft start` and user code: registered names, messages, and settings of the command line."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weft import registry
from weft.cli.main import main
from weft.cli.start import find_config
from weft.errors import ConfigError
from weft.launch import build_registered
from weft.models.families.common import TINY_LLAMA

SWEEP = """
from weft import register_experiment
from weft.experiments import DPOConfig

def one(size):
    config = DPOConfig(experiment_name="unset", trial_name="unset", max_steps=2)
    config.actor.path, config.dataset.train_path = "m", "rows.jsonl"
    config.dpo.beta = 0.5 / size
    return config.build()

for size in range(1, 6):
    register_experiment(f"test-dpo-s{size}", lambda size=size: one(size))

@register_experiment("test-class")
class Made:
    def initial_setup(self):
        return one(1)
"""
QUICKSTART = """
from dataclasses import dataclass
from weft import register_quickstart
from weft.experiments import SFTConfig
from weft.options import option

@dataclass
class Calm(SFTConfig):
    coefficient: float = option(0.1, "weight of the calm")

register_quickstart("test-calm", Calm)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a model, rows and nothing registered; what a test registers or
    imports is forgotten.
    """
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "m" / "model.safetensors").write_bytes(b"")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    before, modules, path = {}, set(sys.modules), list(sys.path)
    for kind in (registry.experiments, registry.quickstarts):
        before[kind] = dict(kind._objects)
    yield tmp_path
    for kind, things in before.items():
        kind._objects.clear()
        kind._objects.update(things)
    for name in set(sys.modules) - modules:
        if (
            str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path))
            or name == "experiments"
        ):
            del sys.modules[name]
    sys.path[:] = path


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the experiments that would have been run."""
    found: list[Any] = []
    monkeypatch.setattr("weft.launch.run", lambda experiment, **told: found.append(experiment))
    return found


def test_a_folder_of_experiments_is_found_and_listed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "experiments").mkdir()
    (folder / "experiments" / "sweep.py").write_text(SWEEP)
    (folder / "experiments" / "unrelated.py").write_text("raise RuntimeError('not for us')")
    assert main(["start", "--list"]) == 0
    listed = [
        name for name in capsys.readouterr().out.split() if name.startswith("test-")
    ]  # other tests register theirs
    assert listed == ["test-class", *(f"test-dpo-s{i}" for i in range(1, 6))]


def test_a_registered_experiment_runs_under_the_names_of_the_command_line(
    folder: Path, ran: list[Any]
) -> None:
    (folder / "sweep.py").write_text(SWEEP)
    words = ["--mode", "local", "--import", "sweep.py", "--fileroot", "elsewhere"]
    assert main(["start", "-e", "test-dpo-s4", "-f", "first", *words]) == 0
    assert main(["start", "-e", "test-class", "-f", "second", *words]) == 0
    first, second = ran
    control = first.control
    assert (control.experiment_name, control.trial_name, control.fileroot) == (
        "test-dpo-s4",
        "first",
        "elsewhere",
    )
    assert control.imports == ["sweep.py"]
    assert first.config["fileroot"] == "elsewhere"
    assert first.get_node("actor_train").args["loss_args"]["beta"] == 0.125
    assert (second.control.experiment_name, second.control.trial_name) == ("test-class", "second")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["-e", "test-dpo-s9", "-f", "a"],
            "unknown experiment 'test-dpo-s9'; did you mean test-dpo-s",
        ),
        (["-e", "test-dpo-s1"], "-f TRIAL is missing"),
        (["-f", "a"], "-e EXPERIMENT is missing"),
        (["-e", "test-dpo-s1", "-f", "a_b"], "write trial_name=a-b"),
        (
            ["-e", "test-dpo-s1", "-f", "a", "--mode", "rya"],
            "must be local, ray or slurm (did you mean ray?)",
        ),
        (["-e", "test-dpo-s1", "-f", "a", "--mod"], "weft start:"),
        (["-e", "test-dpo-s1", "-f", "a", "--import", "none.py"], "there is no such file"),
    ],
)
def test_wrong_input_is_exit_2(
    words: list[str], message: str, folder: Path, ran: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "sweep.py").write_text(SWEEP)
    assert main(["start", "--import", "sweep.py", *words]) == 2
    assert message in capsys.readouterr().err
    assert ran == []


def test_stop_says_when_there_is_nothing_to_stop(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stop", "-e", "a", "-f", "b"]) == 2
    assert "there is no run" in capsys.readouterr().err


def test_a_quickstart_of_ones_own(
    folder: Path, ran: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "calm.py").write_text(QUICKSTART)
    own = [
        "experiment_name=e",
        "trial_name=t",
        "model.path=m",
        "dataset.path=rows.jsonl",
        "coefficient=0.5",
    ]
    assert main(["quickstart", "test-calm", "--import", "calm.py", *own]) == 0
    assert (ran[0].coefficient, ran[0].imports) == (0.5, ["calm.py"])
    assert main(["quickstart", "test-calm", "imports=[calm.py]", *own]) == 0
    assert ran[1].imports == ["calm.py"]
    assert main(["quickstart", "test-calm", "--import", "calm.py", "--help"]) == 0
    assert "coefficient               weight of the calm [default 0.1]" in capsys.readouterr().out
    assert main(["quickstart", "--help", "--import", "calm.py"]) == 0
    assert "test-calm" in capsys.readouterr().out


def test_a_module_is_found_from_the_working_directory(folder: Path, ran: list[Any]) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "calm.py").write_text(QUICKSTART)
    own = ["experiment_name=e", "trial_name=t", "model.path=m", "dataset.path=rows.jsonl"]
    assert main(["quickstart", "test-calm", "--import", "mine.calm", *own]) == 0
    assert len(ran) == 1


def test_errors_in_user_code_are_reported_with_the_file(folder: Path) -> None:
    (folder / "broken_code.py").write_text("import weft\nraise ValueError('half done')")
    with pytest.raises(ConfigError, match=r"broken_code\.py' failed: ValueError: half done"):
        registry.import_user_code(["broken_code.py"])
    assert "broken_code" not in sys.modules


def test_a_file_called_like_a_known_module_is_refused(folder: Path) -> None:
    (folder / "json.py").write_text("")
    with pytest.raises(ConfigError, match="another module is called 'json'"):
        registry.import_user_code(["json.py"])


def test_a_file_may_be_imported_twice(folder: Path) -> None:
    (folder / "calm.py").write_text(QUICKSTART)
    registry.import_user_code(["calm.py"])
    registry.import_user_code([str(folder / "calm.py"), "calm.py"])
    assert "test-calm" in registry.quickstarts


def test_the_command_line_replaces_settings_of_an_experiment(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SWEEP.replace("return config.build()", "return config").replace(
        "return one(1)", "return one(1).build()"
    )
    (folder / "sweep.py").write_text(text)
    words = [
        "--import",
        "sweep.py",
        "--trial_name",
        "t",
        "--mode",
        "slurm",
        "--print-script",
        "--experiment_name",
    ]
    (folder / "m" / "config.json").write_text(json.dumps({"model_type": "llama", **TINY_LLAMA}))
    more = ("--partition", "dev", "--wandb_mode", "disabled", "--allocation_mode", "heuristic")
    assert main(["start", *words, "test-dpo-s2", *more]) == 0
    assert "#SBATCH --partition=dev" in capsys.readouterr().out
    experiment = build_registered("test-dpo-s2", "t", allocation_mode="d2")
    assert experiment.config["allocation_mode"] == "d2" and str(
        experiment.placement["ref_inf"]
    ).startswith("d2")
    with pytest.raises(ConfigError, match="the layouts of 'test-class' are set in its code"):
        build_registered("test-class", "t", allocation_mode="d2")
    assert main(["start", *words, "test-class", "--allocation_mode", "pipe_mode"]) == 2
    assert "--allocation_mode pipe_mode: must be manual" in capsys.readouterr().err


def test_a_registered_experiment_has_a_plan_file_and_keeps_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "sweep.py").write_text(SWEEP.replace("return config.build()", "return config"))
    (folder / "m" / "config.json").write_text(json.dumps({"model_type": "llama", **TINY_LLAMA}))
    calls = "{ref_inf: {layout: d1, devices: 1}, actor_train: {layout: d2, devices: 0-1}}"
    (folder / "plan.yaml").write_text(f"weft_plan: 1\ncalls: {calls}\n")
    words = ["--import", "sweep.py", "-e", "test-dpo-s2", "-f", "t", "--print-script"]
    more = ["--mode", "slurm", "--allocation_mode", "plan.yaml"]
    assert main(["start", *words, *more]) == 0
    assert "--allocation_mode plan.yaml" in capsys.readouterr().out
    experiment = build_registered("test-dpo-s2", "t", allocation_mode="plan.yaml", fileroot="r")
    assert experiment.call_meshes["ref_inf"].ranks == (1,)
    # A resumed run reads the plan in its own folder.
    run = folder / "r" / "test-dpo-s2" / "t"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("allocation_mode: plan.yaml\n")
    (run / "plan.yaml").write_text(experiment.plan)
    (folder / "plan.yaml").unlink()
    again = build_registered("test-dpo-s2", "t", allocation_mode="plan.yaml", fileroot="r")
    assert again.call_meshes == experiment.call_meshes
    assert "the run continues with" in again.resume_notes[0]


def test_experiments_are_found_by_a_pattern(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "sweep.py").write_text(SWEEP)
    assert find_config(["--regex", "test-dpo-s[12]", "--import", "sweep.py"]) == 0
    assert capsys.readouterr().out == "test-dpo-s1\ntest-dpo-s2\n"
    assert find_config(["-r", "nothing"]) == 0
    assert capsys.readouterr().out == "no registered experiment has such a name\n"
    with pytest.raises(ConfigError, match="is not a regular expression"):
        find_config(["-r", "["])


def test_stop_and_show_accept_the_same_names(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder / "runs" / "a" / "b"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("experiment_name: a\n")
    stopped: list[Path] = []
    module = importlib.import_module("weft.launch.stop")
    monkeypatch.setattr(module, "stop_run", lambda run: stopped.append(run) or "stopped")
    for word in ("a/b", "runs/a/b", str(run), "latest"):
        assert main(["stop", word]) == 0
    assert [path.resolve() for path in stopped] == [run.resolve()] * 4
    assert main(["stop", "a/bb"]) == 2
    assert "did you mean runs/a/b?" in capsys.readouterr().err
