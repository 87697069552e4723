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
# Secrets that a run reads from the user's environment and never writes to a file.
SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "OPENAI_API_KEY")


def _find_env_problem(env: Mapping[str, str]) -> str | None:
    for name in env:
        if not VARIABLE.fullmatch(name):
            return f"{name!r} is not a valid environment variable name; write letters, digits and _, no digit first"
        if is_secret(name) or SECRET.fullmatch(name):
            return (
                f"{name} looks like a secret, and options are written to config.yaml; export it "
                "in the shell instead, from which workers inherit it"
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
    """Options for starting the processes of a run, in every `mode`."""

    env: dict[str, str] = option(
        {},
        "environment of the run and its workers: launch.env.NAME=value; secrets are taken from "
        f"the shell's environment ({', '.join(SECRETS)})",
        check=_find_env_problem,
    )


@dataclass
class SlurmSpec:
    """Resources and settings of a Slurm job (`mode=slurm`).

    The cluster's defaults apply to options that are not set.
    """

    partition: str | None = option(None, "partition, or several separated by commas")
    account: str | None = option(None, "account that is charged")
    qos: str | None = option(None, "quality of service")
    time: str | None = option(None, "time limit, such as 24:00:00", check=_find_time_problem)
    cpus_per_node: int | None = option(
        None, "CPUs per node; many clusters allocate one by default", at_least=1
    )
    mem_per_node: str | None = option(
        None, "memory of each node, such as 64G; 0 means all of it", check=_find_memory_problem
    )
    gpu_type: str | None = option(
        None, "type of GPU by the cluster's name, such as a100; absent: any"
    )
    nodelist: str | None = option(None, "nodes to use, such as node[01-04]")
    exclude: str | None = option(None, "nodes not to use")
    constraint: str | None = option(None, "features that nodes must have")
    container: str | None = option(
        None,
        "container image for all processes: FILE.sif (apptainer exec), or an image for srun "
        "--container-image (pyxis)",
    )
    container_mounts: list[str] = option(
        [],
        "additional folders to mount in the container, /SOURCE:/TARGET; the working directory, "
        "fileroot and /tmp are always mounted",
        check=_find_mounts_problem,
    )
    modules: list[str] = option([], "environment modules to load")
    setup: list[str] = option([], "shell commands to run first, such as 'source venv/bin/activate'")
    python: str | None = option(
        None, "Python interpreter on the nodes; absent: the current one, or python3 in a container"
    )
    sbatch: list[str] = option(
        [], "additional options of sbatch, such as --mail-type=END", check=_find_lines_problem
    )
    grace_s: int = option(
        120,
        "seconds before the time limit at which the run finishes its step and writes a recovery "
        "point",
        at_least=0,
    )
    join_timeout_s: float = option(
        300.0, "maximum seconds until all nodes have joined Ray", at_least=1.0
    )
