"""Where a run's devices come from: a Ray of its own on this machine, or one that is there; and that there are enough."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from weft.errors import ConfigError
from weft.experiment import Experiment

if TYPE_CHECKING:
    from weft.runtime.ray import Cluster, Node, RayDevices

# What processes on other machines get of this one's environment; nothing of it is ever printed.
PASSED = ("WANDB_API_KEY", "OPENAI_API_KEY", "TOKENIZERS_PARALLELISM", "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG")
PASSED_PREFIXES = ("WEFT_", "HF_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_")


def start_devices(experiment: Experiment, mode: str) -> RayDevices:
    """A process for each device of the experiment. Raises `ConfigError` before any starts where there are too few devices."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"the run takes {experiment.num_devices} devices, and more than one, or mode=ray, needs the package ray; "
            "install it with: pip install 'weft[ray]'"
        )
    from weft.runtime.ray import Cluster

    count, kind = experiment.num_devices, device_kind(experiment)
    cluster = _own(count, kind) if mode == "local" else Cluster.join(_address(experiment))
    try:
        nodes = cluster.nodes()
        check_enough(count, kind, nodes)
        return cluster.launch(count, kind, environment(), nodes)
    except BaseException:
        cluster.close()
        raise


def _own(count: int, kind: str) -> Cluster:
    from weft.runtime.ray import Cluster

    gpus = torch.cuda.device_count() if kind == "cuda" else 0
    if kind == "cuda" and gpus < count:
        raise ConfigError(
            f"the run takes {count} devices and this machine has {gpus} GPUs; choose smaller layouts or other device_mesh "
            "numbers, write device=cpu, or run on more machines with mode=ray or mode=slurm"
        )
    return Cluster.start(max(count, len(os.sched_getaffinity(0))), gpus)


def _address(experiment: Experiment) -> str:
    return str(experiment.control.ray_address or os.environ.get("RAY_ADDRESS") or "auto")


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
    has = {node.host: (node.gpus if kind == "cuda" else node.cpus) for node in nodes}
    found = sum(min(node.gpus, node.cpus) if kind == "cuda" else node.cpus for node in nodes)
    if found < count:
        unit = "GPUs" if kind == "cuda" else "CPUs"
        shown = ", ".join(f"{host}: {number}" for host, number in has.items()) or "no machine is up"
        raise ConfigError(
            f"the run takes {count} devices and the Ray cluster has {found} {unit} ({shown}): {count - found} are missing; "
            "choose smaller layouts, or add machines"
        )


def environment() -> Mapping[str, str]:
    """What the processes of devices need of this one's environment."""
    return {name: value for name, value in os.environ.items() if name in PASSED or name.startswith(PASSED_PREFIXES)}
