"""Templates of job files: what they make, and how mistakes in them read."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from weft.errors import ConfigError
from weft.launch.job_template import (
    PLACEHOLDERS,
    SYSTEMS,
    JobTemplate,
    read_template,
    write_template,
)

VALUES: dict[str, Any] = {
    "command": "weft eval suite /m --tasks a --output '/o p'",
    "name": "weft-eval-tulu",
    "model_name": "tulu",
    "model": "/m",
    "tasks": "a",
    "results": "/o p",
    "folder": "/jobs here/tulu",
    "num_gpus": 2,
    "clusters": ["gpu", "big"],
    "workspace": "team",
    "priority": "high",
    "preemptible": False,
    "secrets": ["OPENAI_API_KEY"],
    "image": "weft: 'new'",
    "mounts": [{"path": "/model", "kind": "beaker", "source": "01A"}],
}


def test_every_placeholder_is_described() -> None:
    assert list(VALUES) == list(PLACEHOLDERS)


def test_a_slurm_job_has_its_directives_first() -> None:
    text = read_template("slurm", None).render(VALUES)
    lines = text.splitlines()
    directives = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert lines[0] == "#!/bin/bash" and lines[1] == f"#SBATCH {directives[0]}"
    assert directives == [
        "--job-name=weft-eval-tulu",
        '--output="/jobs here/tulu/tulu-%j.log"',
        "--open-mode=append",
        "--export=ALL",
        "--nodes=1",
        "--ntasks=1",
        "--gpus-per-node=2",
        "--partition=gpu,big",
        "--account=team",
        "--qos=high",
    ]
    assert lines[-1] == VALUES["command"]


@pytest.mark.parametrize("system", ["slurm", "ray"])
def test_a_script_ends_if_a_secret_is_not_set(system: str) -> None:
    text = read_template(system, None).render({**VALUES, "command": "echo done"})
    for environment, code in (({}, 1), ({"OPENAI_API_KEY": "k"}, 0)):
        done = subprocess.run(
            ["bash", "-c", text], env=environment, capture_output=True, text=True, check=False
        )
        assert min(done.returncode, 1) == code and (done.stdout == "done\n") == (code == 0)
        assert ("OPENAI_API_KEY: is not set" in done.stderr) == (code == 1)


def test_without_options_of_the_cluster_a_slurm_job_has_its_defaults() -> None:
    less = {"num_gpus": 0, "clusters": [], "workspace": None, "priority": None, "secrets": []}
    text = read_template("slurm", None).render({**VALUES, **less})
    for name in ("gpus", "partition", "account", "qos", "requeue", ":?"):
        assert name not in text


def test_a_beaker_spec_has_what_beaker_reads() -> None:
    command = "a 'b\n  c'\nexit"
    spec = yaml.safe_load(read_template("beaker", None).render({**VALUES, "command": command}))
    assert spec["version"] == "v2" and spec["description"] == "weft-eval-tulu"
    (task,) = spec["tasks"]
    assert task["arguments"] == [command + "\n"] and task["image"] == {"beaker": "weft: 'new'"}
    assert task["envVars"][-1] == {"name": "OPENAI_API_KEY", "secret": "OPENAI_API_KEY"}
    assert task["datasets"] == [{"mountPath": "/model", "source": {"beaker": "01A"}}]
    assert task["result"] == {"path": "/o p"} and task["resources"] == {"gpuCount": 2}
    assert task["context"] == {"priority": "high", "preemptible": False}
    assert task["constraints"] == {"cluster": ["gpu", "big"]}
    bare = {"mounts": [], "clusters": []}
    (task,) = yaml.safe_load(read_template("beaker", None).render({**VALUES, **bare}))["tasks"]
    assert "datasets" not in task and "constraints" not in task


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n{{ modell }}", r"t:2: unknown placeholder \{\{ modell \}\}; did you mean model\?"),
        ("a\n{{ xyzzy }}", r"t:2: unknown placeholder .*; known: command, name"),
        ("a\n{% if model %}\n{{ gpus }}{% endif %}", r"t:3: .*did you mean num_gpus\?"),
        ("\n\n{{ model", r"t:3: "),
        ("\n{% for x in mounts %}", r"t:2: .*endfor"),
        ("a\n{{ model | shout }}", r"t:2: No filter named 'shout'"),
        ("a\n{% for m in mounts %}\n{{ m.pth }}\n{% endfor %}", r"t:3: .*no attribute 'pth'"),
        ("a\n{{ num_gpus / 0 }}", r"t:2: division by zero"),
        ("{{ 'a\"b' | sbatch }}", r"t:1: .*sbatch cannot read quotes"),
        ("{{ ''.__class__.__mro__ }}", r"t:1: .*unsafe"),
    ],
)
def test_a_mistake_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        JobTemplate("slurm", text, "t").render(VALUES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks: [", "t: the job file that it makes:1: is not YAML"),
        ("name: x", "t: makes no Beaker spec"),
    ],
)
def test_a_spec_must_be_yaml_with_tasks(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobTemplate("beaker", text, "t").render(VALUES)


def test_local_names_and_functions_of_jinja_are_no_placeholders() -> None:
    text = "{% set n = 2 %}{% for i in range(n) %}{{ i }}{{ model | quote }}{% endfor %}"
    assert JobTemplate("ray", text, "t").render({**VALUES, "model": "a b"}) == "0'a b'1'a b'"


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_template_is_written_for_editing_once(system: str, tmp_path: Path) -> None:
    file = tmp_path / "new" / "job.jinja"
    write_template(system, file)
    assert read_template(system, file).render(VALUES) == read_template(system, None).render(VALUES)
    file.write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        write_template(system, file)
    assert file.read_text() == "mine"


def test_a_template_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--template .*x: there is no such file"):
        read_template("slurm", tmp_path / "x")


def test_quoting_is_that_of_shells() -> None:
    text = JobTemplate("ray", "{{ model | quote }}", "t").render({**VALUES, "model": "a'b $c"})
    assert shlex.split(text) == ["a'b $c"]
