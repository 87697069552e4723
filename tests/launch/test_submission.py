"""Submissions with stand-ins for the clients: which commands run, and how failures read."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.job_clients import DATASET, StandInClients
from weft.errors import ConfigError
from weft.launch.eval_job import UNKNOWN_DATASET, EvalJob, ModelPlace
from weft.launch.job_steps import StepRecord
from weft.launch.job_template import JobTemplate, read_template
from weft.launch.submission import JobSubmission, check_partitions

FOLDER = Path("eval-jobs/tulu")
SLURM = EvalJob("tulu", "slurm", ModelPlace("folder", "m"), FOLDER)
BEAKER = replace(SLURM, system="beaker", workspace="o/w")
RAY = replace(SLURM, system="ray", clusters=["http://127.0.0.1:8265"], num_gpus=2)
SUBMIT = {
    "slurm": ["sbatch", "--parsable", "eval-jobs/tulu/tulu.slurm.sh"],
    "beaker": [
        "beaker",
        "experiment",
        "create",
        "eval-jobs/tulu/tulu.beaker.yaml",
        "--workspace",
        "o/w",
    ],
}
UPLOAD = ["beaker", "dataset", "create", "m", "--name", "tulu", "--workspace", "o/w"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work" / "m").mkdir(parents=True)
    (tmp_path / "work" / "m" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandInClients:
    made = StandInClients(tmp_path / "clients", "sbatch", "ray", "beaker")
    monkeypatch.setenv("PATH", made.path)
    return made


def submit(job: EvalJob, *, resubmit: bool = False, template: JobTemplate | None = None) -> int:
    """Submit as a command of its own does."""
    made = JobSubmission(
        job, template or read_template(job.system, None), StepRecord.read(job.folder), resubmit
    )
    made.check()
    return made.run()


def test_slurm(clients: StandInClients, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(SLURM) == 0
    assert clients.calls == [SUBMIT["slurm"]]
    file = here / FOLDER / "tulu.slurm.sh"
    assert file.stat().st_mode & 0o111 and f"suite {here}/m" in file.read_text()
    assert subprocess.run(["/bin/bash", "-n", file], check=False).returncode == 0
    assert "submitted 4711; its log is eval-jobs/tulu/tulu-4711.log" in capsys.readouterr().out


def test_ray(clients: StandInClients, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(RAY) == 0
    (call,) = clients.calls
    assert call == [
        *["ray", "job", "submit", "--no-wait", "--submission-id=weft-eval-tulu"],
        *["--address=http://127.0.0.1:8265", "--entrypoint-num-gpus=2"],
        *["--", "bash", f"{here}/eval-jobs/tulu/tulu.ray.sh"],
    ]
    assert "submitted weft-eval-tulu; ray job logs weft-eval-tulu" in capsys.readouterr().out


def test_beaker_uploads_first(clients: StandInClients, here: Path) -> None:
    assert submit(BEAKER) == 0
    assert clients.calls == [UPLOAD, SUBMIT["beaker"]]
    spec = yaml.safe_load((here / FOLDER / "tulu.beaker.yaml").read_text())
    assert spec["tasks"][0]["datasets"][0]["source"] == {"beaker": DATASET}


def test_a_dataset_is_not_uploaded(clients: StandInClients) -> None:
    assert submit(replace(BEAKER, place=ModelPlace("dataset", "01A"))) == 0
    assert clients.calls == [SUBMIT["beaker"]]


def test_the_id_in_the_output_of_an_older_beaker(clients: StandInClients, here: Path) -> None:
    clients.answer("beaker-dataset", "Uploading tulu (ds_as6t74lspoc5)...\nDone.\n")
    assert submit(BEAKER) == 0
    assert "ds_as6t74lspoc5" in (here / FOLDER / "tulu.beaker.yaml").read_text()


# -- a second run


def test_a_second_run_skips_what_is_finished(
    clients: StandInClients, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(BEAKER) == 0
    capsys.readouterr()
    assert submit(BEAKER) == 0
    out = capsys.readouterr().out
    assert len(clients.calls) == 2
    assert f"upload: skipped, dataset {DATASET} has this model" in out
    assert "submit: skipped, job 01EX was submitted at" in out and "--resubmit" in out


def test_another_model_is_uploaded_again(clients: StandInClients, here: Path) -> None:
    assert submit(BEAKER) == 0
    (here / "m" / "config.json").write_text("{ }")
    clients.answer("beaker-dataset", "Uploading tulu to 01OTHER\n")
    assert submit(BEAKER) == 0
    assert clients.calls[2:] == [
        UPLOAD,
        [word.replace("tulu.b", "tulu-2.b") for word in SUBMIT["beaker"]],
    ]
    assert DATASET in (here / FOLDER / "tulu.beaker.yaml").read_text()


def test_a_failed_submission_is_repeated_alone(clients: StandInClients) -> None:
    clients.answer("beaker-experiment", "error: no such budget\n", code=7)
    assert submit(BEAKER) == 7
    clients.answer("beaker-experiment", "Experiment 01EX submitted\n")
    assert submit(BEAKER) == 0
    assert clients.calls == [UPLOAD, SUBMIT["beaker"], SUBMIT["beaker"]]


def test_an_upload_that_was_killed_is_repeated(clients: StandInClients) -> None:
    record = StepRecord.read(FOLDER)
    submission = JobSubmission(BEAKER, read_template("beaker", None), record)
    record.begin("upload", submission._list_upload_inputs())
    assert submit(BEAKER) == 0
    assert clients.calls == [UPLOAD, SUBMIT["beaker"]]


def test_job_files_are_never_overwritten(clients: StandInClients, here: Path) -> None:
    folder = here / FOLDER
    assert submit(SLURM) == submit(replace(SLURM, tasks="a", shares=("a",))) == 0
    assert submit(SLURM, resubmit=True) == 0
    names = ["tulu.slurm.sh", "tulu-2.slurm.sh", "tulu-3.slurm.sh"]
    assert [call[2] for call in clients.calls] == [str(FOLDER / name) for name in names]
    assert (folder / names[0]).read_text() == (folder / names[2]).read_text()
    # an edited file is not the job that was submitted
    (folder / names[0]).write_text("mine")
    (folder / names[2]).write_text("mine too")
    assert submit(SLURM) == 0
    assert clients.calls[-1][2] == str(FOLDER / "tulu-4.slurm.sh")
    assert (folder / names[0]).read_text() == "mine"


# -- failures


@pytest.mark.parametrize(
    ("job", "key", "output", "message"),
    [
        (
            SLURM,
            "sbatch",
            "sbatch: error: Invalid qos specification\n",
            "error: sbatch failed with exit code 3: sbatch: error: Invalid qos specification; the "
            "job file is eval-jobs/tulu/tulu.slurm.sh\n",
        ),
        (
            RAY,
            "ray",
            "a\nb\nc\nConnectionError: no cluster\n",
            "error: ray job submit failed with exit code 3: b; c; ConnectionError: no cluster; the "
            "job file is eval-jobs/tulu/tulu.ray.sh\n",
        ),
        (
            RAY,
            "ray",
            "Traceback (most recent call last):\n  File x\n    y()\nConnectionError: no cluster\n",
            "error: ray job submit failed with exit code 3: ConnectionError: no cluster; the job "
            "file is eval-jobs/tulu/tulu.ray.sh\n",
        ),
        (
            BEAKER,
            "beaker-dataset",
            "",
            "error: beaker dataset create failed with exit code 3: no reason given; the same "
            "command begins again with this step; if a dataset tulu exists already, delete it, "
            "choose another --model_name, or use it by --location ID\n",
        ),
        (
            BEAKER,
            "beaker-experiment",
            "error: no such budget\n",
            "error: beaker experiment create failed with exit code 3: error: no such budget; the "
            "job file is eval-jobs/tulu/tulu.beaker.yaml\n",
        ),
    ],
)
def test_a_failure_is_one_message_with_the_client_s_exit_code(
    job: EvalJob,
    key: str,
    output: str,
    message: str,
    clients: StandInClients,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clients.answer(key, output, code=3)
    assert submit(job) == 3
    read = capsys.readouterr()
    assert read.err == message and "Traceback" not in read.out


def test_an_upload_without_an_id(
    clients: StandInClients, capsys: pytest.CaptureFixture[str]
) -> None:
    clients.answer("beaker-dataset", "Done.\n")
    assert submit(BEAKER) == 1
    assert "continue by --location ID" in capsys.readouterr().err
    assert clients.calls == [UPLOAD]


# -- without a client, and plans


@pytest.mark.parametrize("job", [SLURM, RAY, BEAKER], ids=lambda job: job.system)
def test_without_the_client_commands_are_printed(
    job: EvalJob,
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert submit(job) == 0
    out = capsys.readouterr().out
    client = {"slurm": "sbatch", "ray": "ray", "beaker": "beaker"}[job.system]
    assert f"not submitted: this machine has no {client}" in out
    (file,) = (here / FOLDER).glob("tulu.*")
    assert (f"$ {' '.join(UPLOAD)}\n" in out) == (job is BEAKER)
    assert (UNKNOWN_DATASET in file.read_text()) == (job is BEAKER)
    assert submit(job) == 0, "the file is used again"
    assert "job file: skipped" in capsys.readouterr().out
    assert list((here / FOLDER).glob("tulu*")) == [file]


@pytest.mark.parametrize("job", [SLURM, RAY, BEAKER], ids=lambda job: job.system)
def test_a_plan_runs_and_writes_nothing(
    job: EvalJob, clients: StandInClients, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan() -> str:
        template = read_template(job.system, None)
        JobSubmission(job, template, StepRecord.read(FOLDER)).print_plan()
        return capsys.readouterr().out

    first = plan()
    assert not (here / "eval-jobs").exists() and clients.calls == []
    assert submit(job) == 0
    for call in clients.calls:
        line = " ".join(call).replace(DATASET, UNKNOWN_DATASET)
        assert f"$ {line}\n" in first
    assert (f"$ {' '.join(UPLOAD)}" in first) == (job is BEAKER)
    capsys.readouterr()
    later = plan()
    assert "submit: skipped" in later and "$ " not in later.replace("pids $!", "")


# -- secrets and clusters


def test_the_value_of_a_secret_variable_is_not_written(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "abcdef123")
    template = JobTemplate("slurm", "#!/bin/bash\nexport X=abcdef123\n{{ command }}\n", "t")
    with pytest.raises(ConfigError, match="t: line 2 of the job file would contain the value"):
        submit(SLURM, template=template)
    assert not (here / "eval-jobs").exists()


def test_folders_are_not_taken_for_secrets(
    clients: StandInClients, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PWD", str(here))
    monkeypatch.setenv("OLDPWD", os.fspath(here.parent))
    assert submit(SLURM) == 0


def test_an_unknown_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(SLURM, clusters=["gup"])
    monkeypatch.setenv("PATH", str(tmp_path))
    check_partitions(job)  # nobody can be asked
    clients = StandInClients(tmp_path / "sinfo", "sinfo")
    monkeypatch.setenv("PATH", clients.path)
    check_partitions(replace(SLURM, clusters=["gpu", "all"]))
    with pytest.raises(ConfigError, match=r"unknown --cluster 'gup'; did you mean gpu\?"):
        check_partitions(job)
    clients.answer("sinfo", "slurm_load_partitions: error\n", code=1)
    check_partitions(job)
