"""`mode=slurm` on the command line: what is handed to sbatch, told, stopped and refused.

Slurm's commands are stand-ins.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from tests.tiny import make_llama, prompt_answer_rows, write_jsonl
from weft import registry
from weft.cli import main as weft
from weft.errors import ConfigError
from weft.launch import slurm
from weft.observe import sinks

PROGRAMS = {
    "sbatch": 'cp "$2" submitted.sh; echo "7;cluster"',
    "squeue": 'cat state 2>/dev/null || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }',
    "scancel": 'echo "$@" >> cancelled; rm -f state',
}
EXPERIMENT = """
from weft import register_experiment
from weft.experiment import Scheduling, Workers
from weft.experiments import SFTConfig

@register_experiment("test-large")
class Large:
    def scheduling_setup(self):
        both = {"nodelist": "n[1-2]", "memory_gb": 1.5}
        return Scheduling(n_nodes=2, workers={
            "actor": Workers(count=3, gpus=1, cpus=4, env={"GREETING": "hello"}, **both),
            "reward": Workers(count=1, gpus=0, cpus=1, **both)})

    def initial_setup(self):
        config = SFTConfig(experiment_name="unset", trial_name="unset")
        config.model.path, config.dataset.train_path = "m", "rows.jsonl"
        return config.build()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model, rows and stand-ins for Slurm's commands, which note what
    they are given.
    """
    make_llama(tmp_path / "m")
    write_jsonl(tmp_path / "rows.jsonl", prompt_answer_rows())
    (tmp_path / "bin").mkdir()
    for name, body in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry.experiments, "_objects", dict(registry.experiments._objects))
    return tmp_path


def sft(*words: str) -> list[str]:
    base = [
        "quickstart",
        "sft",
        "experiment_name=e",
        "trial_name=t",
        "model.path=m",
        "dataset.train_path=rows.jsonl",
    ]
    return [*base, "mode=slurm", "device=cpu", *words]


def last_command(text: str) -> list[str]:
    """Return the words after `weft` in the command that a script runs."""
    line = next(line for line in text.splitlines() if line.startswith("on_head bash"))
    words = shlex.split(line.removesuffix(" &"))
    return words[words.index("weft.cli.main") + 1 :]


def test_the_script_runs_the_same_command_with_ray(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        weft.main(sft("n_nodes=2", "'launch.env={GREETING: a b}'".strip("'"), "--print-script"))
        == 0
    )
    printed = capsys.readouterr().out
    words = sft("n_nodes=2", "launch.env={GREETING: a b}")
    assert last_command(printed) == [*(word for word in words if word != "mode=slurm"), "mode=ray"]
    assert (
        "#SBATCH --nodes=2" in printed
        and "gpus-per-node" not in printed
        and "export GREETING='a b'" in printed
    )
    assert not (folder / "runs").exists() and not (folder / "submitted.sh").exists()


def test_a_job_is_submitted_reported_and_stopped(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert weft.main(sft()) == 0
    told = capsys.readouterr().out
    assert "submitted job 7 on 1 node" in told and "weft logs -e e -f t --follow" in told
    assert json.loads((folder / "runs/e/t/slurm/job.json").read_text())["job"] == "7"
    assert (folder / "submitted.sh").read_text() == (folder / "runs/e/t/slurm/job.sh").read_text()
    (folder / "state").write_text("RUNNING\n")
    assert weft.main(sft()) == 2
    assert "job 7 of runs/e/t is already in the queue (RUNNING)" in capsys.readouterr().err
    assert weft.main(["stop", "-e", "e", "-f", "t"]) == 0
    assert "stopped runs/e/t (job 7)" in capsys.readouterr().out
    (folder / "state").write_text("PENDING\n")
    assert weft.main(["stop", "-e", "e", "-f", "t", "--mode", "slurm"]) == 0
    assert (folder / "cancelled").read_text() == "--batch --signal=TERM 7\n7\n"
    assert weft.main(["stop", "-e", "e", "-f", "t"]) == 2, (
        "the job is gone, and nobody holds the lock"
    )
    assert weft.main(sft()) == 0, "the folder slurm/ is no obstacle, and a job that is gone neither"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (sft("slurm.time=soon"), "slurm.time='soon': must be minutes, HH:MM:SS or DAYS-HH:MM:SS"),
        (sft("slurm.partion=a"), "unknown option 'slurm.partion'; did you mean slurm.partition"),
        (sft("slurm.sbatch=[mail]"), "'mail': a line is an option of sbatch"),
        (sft("slurm.container_mounts=[data]"), "'data': a mount is /SOURCE"),
        (sft("launch.env.HF_TOKEN=1"), "HF_TOKEN looks like a secret"),
        (sft("launch.env={a-b: x}"), "'a-b' is not a valid environment variable name"),
        (sft("dataset.args.api_key=abc"), "contains a secret: quickstart sft"),
        (sft("dataset.args.url=http://me:pw@h/x"), "dataset.args.url=http://***@h/x"),
        (
            sft("n_nodes=2", "model.layout=t3"),
            "model.layout=d1f1t3p1c1e1: t=3 does not divide the model's 4 attention",
        ),
        (
            sft("allocation_mode=p8", "--print-script"),
            "model.layout=d1f1t1p8c1e1: p=8 stages of a model with 2 layers",
        ),
        (sft("model.path=nowhere"), "model.path='nowhere': there is no such directory"),
        (
            sft("model.path=nowhere", "--print-script"),
            "model.path='nowhere': there is no such directory",
        ),
        (sft("device=cuda:1", "model.layout=d2"), "device=cuda:1: names one device"),
        (
            sft("--dry-run=config", "model.layout=t3"),
            "model.layout=d1f1t3p1c1e1: t=3 does not divide",
        ),
        (
            [*sft("--print-script"), "mode=local"],
            "--print-script prints the script of a Slurm job; add mode=slurm",
        ),
    ],
)
def test_wrong_input_is_exit_2(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert weft.main(words) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "submitted.sh").exists() and not (folder / "runs").exists()


def test_options_are_written_as_the_page_writes_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).resolve().parent.parent.parent / "docs" / "cluster.md").read_text()
    written = re.findall(r"slurm\.\w+=[^\s`]+", page)
    assert {
        "slurm.sbatch=[--mail-type=END]",
        "slurm.nodelist=node[01-02]",
        "slurm.partition=gpu,large",
    } <= set(written)
    for word in written:
        assert weft.main([*sft(word), "--print-script"]) == 0, word
    assert (
        weft.main(
            [*sft("slurm.sbatch=[--mail-type=END]", "slurm.nodelist=node[01-02]"), "--print-script"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "#SBATCH --mail-type=END\n" in printed and "#SBATCH --nodelist=node[01-02]\n" in printed


def test_a_job_is_planned_and_not_submitted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["device=null", "n_nodes=2", "n_gpus_per_node=4", "allocation_mode=d8"]
    assert weft.main([*sft(*words), "--dry-run=config"]) == 0
    job, *_, verdict = capsys.readouterr().out.splitlines()
    assert job == "mode=slurm: a job of 2 nodes with 4 GPUs each, not submitted"
    assert "fits: each of 8 devices needs about" in verdict and "GPU of 24 GB" in verdict
    assert weft.main([*sft(), "--dry-run=config"]) == 0
    job, *_, verdict = capsys.readouterr().out.splitlines()
    assert (
        job == "mode=slurm: a job of 1 node with 1 CPU process, not submitted" and "cpu" in verdict
    )
    assert weft.main([*sft(*words, "model.device_mesh=8-15"), "--dry-run=config"]) == 2
    assert (
        "the layouts need 16 devices, and n_nodes=2 x n_gpus_per_node=4 are 8"
        in capsys.readouterr().err
    )
    assert not (folder / "submitted.sh").exists() and not (folder / "runs").exists()


def test_a_registered_experiment_s_scheduling(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "slurm_experiment.py").write_text(EXPERIMENT)
    words = [
        "start",
        "-e",
        "test-large",
        "-f",
        "t",
        "--import",
        "slurm_experiment.py",
        "--mode",
        "slurm",
    ]
    assert weft.main([*words, "--print-script"]) == 0
    printed = capsys.readouterr().out
    for line in ("nodes=2", "gpus-per-node=2", "cpus-per-task=7", "mem=3072M", "nodelist=n[1-2]"):
        assert f"#SBATCH --{line}\n" in printed
    assert "export GREETING=hello" in printed and last_command(printed) == [*words, "--mode", "ray"]
    assert weft.main([*words, "--dry-run=config"]) == 0
    assert "a job of 2 nodes with 2 GPUs each, not submitted" in capsys.readouterr().out
    assert weft.main([*words[:-2], "--print-script"]) == 2
    assert "add --mode slurm" in capsys.readouterr().err
    assert weft.main(words[:-2]) == 2
    assert "requests 2 x 2 devices, and mode=local is one machine" in capsys.readouterr().err


def test_local_runs_name_the_options_they_ignore(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GREETING", "from the shell")
    text = EXPERIMENT.replace("n_nodes=2, ", "").replace("test-large", "test-one")
    short = text.replace(
        "return config.build()", "config.max_steps = 1\n        return config.build()"
    )
    (folder / "one_experiment.py").write_text(short)
    assert weft.main(["start", "-e", "test-one", "-f", "t", "--import", "one_experiment.py"]) == 0
    told = "note: mode=local ignores actor.cpus, actor.memory_gb, actor.nodelist, reward.cpus, reward.memory_gb"
    assert told in capsys.readouterr().err
    assert os.environ["GREETING"] == "hello"
    monkeypatch.setenv("WEFT_SUPERVISED", f"5:0:{os.getppid()}")  # the supervisor has printed it
    assert (
        weft.main(
            ["start", "-e", "test-one", "-f", "t", "--import", "one_experiment.py", "--dry-run"]
        )
        == 0
    )
    assert "note: mode" not in capsys.readouterr().err


def test_options_of_the_user_come_before_a_scheduling(folder: Path) -> None:
    from weft.experiment import Scheduling, Workers
    from weft.experiments import SFTConfig

    config = SFTConfig(experiment_name="e", trial_name="t", mode="slurm", n_gpus_per_node=1)
    config.model.path, config.dataset.train_path = "m", "rows.jsonl"
    config.slurm.cpus_per_node, config.slurm.mem_per_node, config.slurm.nodelist = 3, "5G", "n7"
    wanted = {"cpus": 4, "memory_gb": 1.5, "nodelist": "n[1-2]"}
    scheduling = Scheduling(workers={"actor": Workers(count=1, gpus=1, **wanted)})
    spec = slurm.build_request(config.build(), ["x"], folder / "run", scheduling).spec
    assert (spec.cpus_per_node, spec.mem_per_node, spec.nodelist) == (3, "5G", "n7")


def test_too_few_devices_are_refused(folder: Path) -> None:
    from weft.experiments import SFTConfig

    config = SFTConfig(
        experiment_name="e", trial_name="t", mode="slurm", n_nodes=2, n_gpus_per_node=1
    )
    config.model.path, config.dataset.train_path, config.model.device_mesh = "m", "rows.jsonl", "2"
    with pytest.raises(
        ValueError, match="the layouts need 3 devices, and n_nodes=2 x n_gpus_per_node=1 are 2"
    ):
        slurm.start_job(config.build(), ["x"], print_only=True)


def test_a_job_is_refused_if_its_run_would_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Jobs in a container are not checked, because it may have other packages."""

    def refuse(options: object) -> None:
        raise ConfigError("logger.tensorboard: no")

    start = sinks.LOGGERS["tensorboard"][1]
    monkeypatch.setitem(sinks.LOGGERS, "tensorboard", (refuse, start))
    words = sft("logger.tensorboard=true", "--print-script")
    assert weft.main(words) == 2
    assert "logger.tensorboard: no" in capsys.readouterr().err
    assert weft.main([*words, "slurm.container=image.sif"]) == 0
