"""Evaluation jobs: what they ask of a cluster, and the places of models."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.errors import CheckpointError, ConfigError
from weft.launch.eval_job import (
    UNKNOWN_DATASET,
    EvalJob,
    ModelPlace,
    locate_data,
    locate_place,
    split_tasks,
)
from weft.observe.eval_table import shorten_names

FOLDER = Path("/jobs/tulu")
SLURM = EvalJob("tulu", "slurm", ModelPlace("folder", "/models/tulu"), FOLDER)
BEAKER = replace(SLURM, system="beaker", place=ModelPlace("dataset", "01A"), workspace="o/w")
RAY = replace(SLURM, system="ray")


def words_of(job: EvalJob) -> list[str]:
    """The words after `eval suite` of a job's only command."""
    words = shlex.split(job.build_values()["command"])
    return words[words.index("suite") + 1 :]


def test_a_job_runs_the_suite_where_the_model_is() -> None:
    default = ["--tasks", "open-instruct", "--output"]
    assert words_of(SLURM) == ["/models/tulu", *default, "/jobs/tulu/results"]
    assert words_of(BEAKER) == ["/model/tulu", *default, "/output"]
    more = replace(
        BEAKER,
        is_tuned=True,
        words=["--limit", "5"],
        data=ModelPlace("dataset", "us/data"),
        subfolder="step40",
    )
    assert words_of(more) == [
        *["/model/tulu/step40", *default, "/output"],
        *["--apply_chat_template", "--data_dir", "/data", "--limit", "5"],
    ]
    url = replace(BEAKER, place=ModelPlace("url", "gs://b/m/"), subfolder="x")
    assert words_of(url)[0] == "gs://b/m/x" and url.build_values()["mounts"] == []


def test_beaker_jobs_name_their_results_after_the_model() -> None:
    other = replace(BEAKER, model_name="other")
    names = [words_of(job)[0] for job in (BEAKER, other)]
    assert list(shorten_names(names).values()) == ["tulu", "other"]


def test_beaker_mounts_datasets_and_folders_of_its_hosts() -> None:
    job = replace(BEAKER, data=ModelPlace("host", "/net/data"))
    assert job.build_values()["mounts"] == [
        {"path": "/model/tulu", "kind": "beaker", "source": "01A"},
        {"path": "/data", "kind": "hostPath", "source": "/net/data"},
    ]
    local = replace(BEAKER, place=ModelPlace("folder", "m"))
    assert local.needs_upload and not BEAKER.needs_upload and not SLURM.needs_upload
    assert local.build_values()["mounts"][0]["source"] == UNKNOWN_DATASET
    assert local.with_dataset("01B").build_values()["mounts"][0]["source"] == "01B"


@pytest.mark.parametrize(
    ("job", "priority", "expected"),
    [
        (SLURM, None, (None, False)),
        (SLURM, "high", ("high", False)),
        (SLURM, "preemptible", ("preemptible", True)),
        (BEAKER, None, ("low", True)),
        (BEAKER, "preemptible", ("low", True)),
        (BEAKER, "urgent", ("urgent", False)),
    ],
)
def test_priorities(job: EvalJob, priority: str | None, expected: tuple[str | None, bool]) -> None:
    values = replace(job, priority=priority).build_values()
    assert (values["priority"], values["preemptible"]) == expected


def test_all_clusters_are_no_constraint() -> None:
    assert replace(BEAKER, clusters=["all"]).build_values()["clusters"] == []
    assert replace(BEAKER, clusters=["o/a", "o/b"]).build_values()["clusters"] == ["o/a", "o/b"]


def test_each_gpu_runs_its_tasks_and_the_first_failure_is_the_job_s(tmp_path: Path) -> None:
    shares = split_tasks(["a", "b", "c"], 2)
    assert shares == ["a,c", "b"]
    text = replace(RAY, shares=shares, num_gpus=2).build_values()["command"]
    weft = tmp_path / "weft"
    weft.write_text('#!/bin/sh\necho "$@" > "$HOME/$5"\ncase $5 in b) exit 5;; esac\n')
    weft.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", text], env=environment, check=False)
    assert done.returncode == 5
    begin = "eval suite /models/tulu --tasks"
    end = "--output /jobs/tulu/results --device"
    assert (tmp_path / "a,c").read_text() == f"{begin} a,c {end} cuda:0\n"
    assert (tmp_path / "b").read_text() == f"{begin} b {end} cuda:1\n"


def test_more_gpus_than_tasks() -> None:
    assert split_tasks(["a", "b"], 1) == ["a,b"] == split_tasks(["a", "b"], 0)
    with pytest.raises(ConfigError, match=r"--num_gpus 3: .*there are 2; write --num_gpus 2"):
        split_tasks(["a", "b"], 3)


@pytest.mark.parametrize(
    ("job", "changes", "message"),
    [
        (SLURM, {"model_name": "a/b"}, "--model_name 'a/b': must have only letters"),
        (SLURM, {"model_name": ""}, "--model_name ''"),
        (SLURM, {"num_gpus": -1}, "--num_gpus -1: must be 0"),
        (SLURM, {"priority": "hgih"}, r"--priority hgih: unknown priority; did you mean high\?"),
        (SLURM, {"priority": "x"}, "--priority x: .*one of preemptible, low"),
        (SLURM, {"clusters": ["a b"]}, "--cluster a b: must be the name of a partition"),
        (SLURM, {"place": ModelPlace("url", "us/m"), "subfolder": "x"}, "on the hub has no"),
        (SLURM, {"image": "x"}, "--image x: only Beaker's jobs have an image"),
        (BEAKER, {"clusters": ["gpu"]}, "--cluster gpu: must be ORGANIZATION/CLUSTER"),
        (BEAKER, {"workspace": None}, "--workspace is missing"),
        (RAY, {"clusters": ["gpu"]}, "--cluster gpu: must be an address"),
        (RAY, {"clusters": ["auto", "auto"]}, "has one address"),
        (RAY, {"workspace": "w"}, "--workspace w: Ray has nothing of this kind"),
        (RAY, {"priority": "low"}, "--priority low: Ray has nothing of this kind"),
    ],
)
def test_what_a_system_cannot_have(job: EvalJob, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(job, **changes).check()


def test_the_value_of_a_secret_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as raised:
        replace(SLURM, secrets=["HF_TOKEN=hf_abcdef"]).check()
    assert "--secret: takes the name" in str(raised.value) and "abcdef" not in str(raised.value)


# -- places


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("m", "runs/e/t/checkpoints/actor/step4"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_places_of_models(here: Path) -> None:
    run = "runs/e/t/checkpoints/actor/step4"
    for system in ("slurm", "ray", "beaker"):
        assert locate_place("m", system) == ModelPlace("folder", "m")
        assert locate_place(f"{here}/m", system) == ModelPlace("folder", f"{here}/m")
        assert locate_place("runs/e/t@step4", system) == ModelPlace("folder", run)
        assert locate_place("/net/x", system) == ModelPlace("host", "/net/x")
        assert locate_place("gs://b/m", system) == ModelPlace("url", "gs://b/m")
        assert locate_place("hub:us/m", system) == ModelPlace("url", "us/m")
    for dataset in ("01GVYXDGJC6DV0JW9JZ16YM07G", "us/tulu-7b"):
        assert locate_place(dataset, "beaker") == ModelPlace("dataset", dataset)
    relative = replace(SLURM, place=ModelPlace("folder", "m"))
    assert relative.build_values()["model"] == f"{here}/m"


@pytest.mark.parametrize(
    ("text", "system", "message"),
    [
        ("mm", "slurm", "--location mm: there is no such path on this machine; did you mean m?"),
        ("01GVYX", "slurm", "ids of Beaker's datasets are for --system beaker"),
        ("./mm", "beaker", "there is no such path on this machine"),
        ("empty/mm", "beaker", "there is no such path on this machine"),
        ("empty", "beaker", "has no config.json"),
        ("runs/e/t@step5", "beaker", "has no such checkpoint"),
        (" ", "beaker", "--location is empty"),
        ("hub:a/b/c", "slurm", "--location hub:a/b/c: write hub:OWNER/NAME"),
        ("m/config.json", "slurm", "is no model directory"),
    ],
)
def test_places_that_are_refused(text: str, system: str, message: str, here: Path) -> None:
    with pytest.raises((ConfigError, CheckpointError)) as raised:
        locate_place(text, system)
    assert message in str(raised.value)


def test_a_model_in_a_subfolder(here: Path) -> None:
    steps = "runs/e/t/checkpoints/actor"
    assert locate_place(steps, "beaker", "step4") == ModelPlace("folder", steps)
    with pytest.raises(ConfigError, match=r"--subfolder step5: .* is no model directory; did you"):
        locate_place(steps, "beaker", "step5")


def test_places_of_data(here: Path) -> None:
    assert locate_data("empty", "slurm") == ModelPlace("folder", f"{here}/empty")
    assert locate_data("/net/x", "ray") == ModelPlace("host", "/net/x")
    assert locate_data("/net/x", "beaker") == ModelPlace("host", "/net/x")
    assert locate_data("us/data", "beaker") == ModelPlace("dataset", "us/data")
    with pytest.raises(ConfigError, match="there is no such folder; did you mean empty"):
        locate_data("emtpy", "slurm")
    with pytest.raises(ConfigError, match="must be a Beaker dataset, or the absolute path"):
        locate_data("empty", "beaker")
