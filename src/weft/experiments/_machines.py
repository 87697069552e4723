"""Options for the environment of processes (`launch.*`) and for jobs on a cluster (`slurm.*`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from weft.options import option
from weft.redaction import is_secret

TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}")
MEMORY = re.compile(r"\d+[KMGT]?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET = re.compile(r".*(KEY|TOKEN|SECRET|PASSWORD)", re.I)
# Secrets that a run reads from the environment of its user and never writes to a file.
SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "OPENAI_API_KEY")


def _find_env_problem(env: Mapping[str, str]) -> str | None:
    for name in env:
        if not VARIABLE.fullmatch(name):
            return f"{name!r} is not a valid environment variable name; write letters, digits and _, no digit first"
        if is_secret(name) or SECRET.fullmatch(name):
            return (
                f"{name} looks like a secret, and options are written to config.yaml; export it "
                f"in the shell instead, from "
                "where workers have it"
            )
    return None


def _find_time_problem(time: str) -> str | None:
    if TIME.fullmatch(time):
        return None
    return "must be minutes, HH:MM:SS or DAYS-HH:MM:SS, such as 24:00:00"


def _find_memory_problem(memory: str) -> str | None:
    if MEMORY.fullmatch(memory):
        return None
    return "must be a size with K, M, G or T, such as 64G"


def _find_mounts_problem(mounts: list[str]) -> str | None:
    wrong = next((m for m in mounts if not re.fullmatch(r"/[^:,]*(:/[^:,]*)?(:[a-z+]+)?", m)), None)
    if wrong:
        return f"{wrong!r}: a mount is /SOURCE, /SOURCE:/TARGET or /SOURCE:/TARGET:ro"
    return None


def _find_lines_problem(lines: list[str]) -> str | None:
    wrong = next((line for line in lines if not line.startswith("-") or "\n" in line), None)
    if wrong:
        return f"{wrong!r}: a line is an option of sbatch, such as --mail-type=END"
    return None


@dataclass
class LaunchSpec:
    """Options for starting processes, in every mode."""

    env: dict[str, str] = option(
        {},
        "environment of the run and its workers: launch.env.NAME=value; secrets come from the "
        "shell's own "
        f"({', '.join(SECRETS)})",
        check=_find_env_problem,
    )


@dataclass
class SlurmSpec:
    """Resources and settings of a Slurm job (`mode=slurm`); absent ones are the cluster's."""

    partition: str | None = option(None, "partition, or several with commas")
    account: str | None = option(None, "account that is charged")
    qos: str | None = option(None, "quality of service")
    time: str | None = option(None, "time limit, such as 24:00:00", check=_find_time_problem)
    cpus_per_node: int | None = option(
        None, "processors of each node; many clusters give one by default", at_least=1
    )
    mem_per_node: str | None = option(
        None, "memory of each node, such as 64G; 0 is all of it", check=_find_memory_problem
    )
    gpu_type: str | None = option(
        None, "kind of GPU as the cluster calls it, such as a100; any when absent"
    )
    nodelist: str | None = option(None, "nodes to use, such as node[01-04]")
    exclude: str | None = option(None, "nodes not to use")
    constraint: str | None = option(None, "features that nodes must have")
    container: str | None = option(
        None,
        "image that everything runs in: FILE.sif (apptainer exec), or one that srun "
        "--container-image takes (pyxis)",
    )
    container_mounts: list[str] = option(
        [],
        "more folders for the container, /SOURCE:/TARGET; the working directory, fileroot and "
        "/tmp are there",
        check=_find_mounts_problem,
    )
    modules: list[str] = option([], "environment modules to load")
    setup: list[str] = option(
        [], "shell commands before anything else, such as 'source venv/bin/activate'"
    )
    python: str | None = option(
        None, "Python interpreter on the nodes; this one when absent, in a container python3"
    )
    sbatch: list[str] = option(
        [], "more options of sbatch, such as --mail-type=END", check=_find_lines_problem
    )
    grace_s: int = option(
        120,
        "seconds before the time limit at which the run finishes its step and writes a recovery "
        "point",
        at_least=0,
    )
    join_timeout_s: float = option(
        300.0, "seconds in which every node must have joined Ray", at_least=1.0
    )
