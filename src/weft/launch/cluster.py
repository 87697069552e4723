"""Where a run's devices come from: a Ray of its own on this machine, or one that is there; and that there are enough."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from weft.errors import ConfigError, RunError
from weft.experiment import Control, Experiment
from weft.extras import install
from weft.observe.memory import ALLOCATOR, growing_segments

if TYPE_CHECKING:
    from weft.runtime.ray import Node, RayDevices

# What processes on other machines get of this one's environment; nothing of it is ever printed.
PASSED = (
    "WANDB_API_KEY",
    "OPENAI_API_KEY",
    "TOKENIZERS_PARALLELISM",
    "PYTHONHASHSEED",
    "CUBLAS_WORKSPACE_CONFIG",
    *ALLOCATOR,
)
PASSED_PREFIXES = ("WEFT_", "HF_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_")


MOST_A_CORE = 64  # processes, one a device, that a processor's core is given
RETURN_SECONDS, RETURN_POLL_SECONDS = 300.0, 5.0  # that a cluster has to give devices again in place of lost ones


def start_devices_anew(experiment: Experiment, mode: str) -> RayDevices:
    """As `start_devices`, in place of devices that were lost: a cluster may take its time to have enough of them again. Raises
    `RunError` where it does not."""
    end = time.monotonic() + RETURN_SECONDS
    while True:
        try:
            return start_devices(experiment, mode)
        except ConfigError as error:
            if mode == "local" or time.monotonic() > end:
                raise RunError(f"no devices in place of those: {error}") from error
        time.sleep(RETURN_POLL_SECONDS)


def start_devices(experiment: Experiment, mode: str) -> RayDevices:
    """A process for each device of the experiment. Raises `ConfigError` before any starts where there are too few devices."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"the run takes {experiment.num_devices} devices, and more than one, or mode=ray, needs the package ray; "
            f"run: {install('ray')}"
        )
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # its processes' messages stay in their logs
    from weft.runtime.ray import LEAST_SILENT_SECONDS, SILENT_SECONDS, Cluster

    count, kind, control = experiment.num_devices, device_kind(experiment), experiment.control
    if mode == "local":
        resources = local_resources(count, kind, control)
        try:
            cluster = Cluster.start(*resources)
        except RunError:  # its own wait of 30 s is short for a machine that is busy
            cluster = Cluster.start(*resources)
    else:
        cluster = Cluster.join(str(control.ray_address or os.environ.get("RAY_ADDRESS") or "auto"))
    try:
        nodes = cluster.nodes()
        if kind == "cpu" and control.device is None and any(node.gpus for node in nodes):
            raise ConfigError(
                "the cluster has GPUs and this machine has none; write device=cuda, or device=cpu to leave them"
            )
        check_enough(count, kind, nodes)
        told = {**environment(), **control.env}
        deadlines = [call.deadline_s for call in experiment.calls() if call.deadline_s is not None]
        cluster.silent_s = max(LEAST_SILENT_SECONDS, min([SILENT_SECONDS, *deadlines]))
        return cluster.launch(count, kind, {**told, **growing_segments(told)}, nodes)
    except BaseException:
        cluster.close()
        raise


def local_resources(count: int, kind: str, control: Control) -> tuple[int, int]:
    """(CPUs, GPUs) of this machine that a Ray of the run's own is told of. Raises `ConfigError` where they are too few."""
    if kind == "cpu":
        check_processes(count)
    there = torch.cuda.device_count() if kind == "cuda" else 0
    gpus = there if control.n_gpus_per_node is None else min(there, control.n_gpus_per_node)
    if kind == "cuda" and gpus < count:
        raise ConfigError(
            f"the run takes {count} devices and may use {gpus} GPUs of the {there} of this machine; choose smaller layouts or "
            "other device_mesh numbers, raise n_gpus_per_node, write device=cpu, or run on more machines with mode=ray"
        )
    return max(count, len(os.sched_getaffinity(0))), gpus  # a device on CPUs is a process, whatever cores there are


def check_processes(count: int) -> None:
    """Raises `ConfigError` for more processes, one a device, than the processors of this machine could serve."""
    cores = len(os.sched_getaffinity(0))
    if count > (most := MOST_A_CORE * cores):
        raise ConfigError(
            f"the run takes {count:,} devices, each a process, and this machine's {cores} CPU cores take at most {MOST_A_CORE} "
            f"each, {most:,}: choose smaller layouts or lower device_mesh numbers, or plan for GPUs with device=cuda"
        )


def device_kind(experiment: Experiment) -> str:
    """`cuda` or `cpu`: what every device of a run of several is. Raises `ConfigError` for a name of one device."""
    name = experiment.control.device
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ConfigError(
            f"device={name}: names one device, and the run takes {experiment.num_devices}; write cuda or cpu, and say which "
            "by layout and device_mesh"
        )
    return name


def check_enough(count: int, kind: str, nodes: Sequence[Node]) -> None:
    """Raises `ConfigError` saying what each machine has where all of them together have fewer devices than the run takes."""
    has = [f"{node.host}: {node.gpus if kind == 'cuda' else node.cpus}" for node in nodes]
    found = sum(min(node.gpus, node.cpus) if kind == "cuda" else node.cpus for node in nodes)
    if found < count:
        unit = "GPUs" if kind == "cuda" else "CPUs"
        shown = ", ".join(has) or "no machine is up"
        raise ConfigError(
            f"the run takes {count} devices and the Ray cluster has {found} {unit} ({shown}), {count - found} too few; "
            "choose smaller layouts, or add machines"
        )


def environment() -> Mapping[str, str]:
    """What the processes of devices need of this one's environment."""
    return {name: value for name, value in os.environ.items() if name in PASSED or name.startswith(PASSED_PREFIXES)}
