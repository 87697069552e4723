"""Start of a run's device processes, in a private Ray cluster or in an existing one.

A private cluster runs on this machine only.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from weft.engine.spec import TPU
from weft.errors import ConfigError, RunError
from weft.experiment import Control, Experiment
from weft.extras import install
from weft.observe.memory import ALLOCATOR, build_segment_variables

if TYPE_CHECKING:
    from weft.runtime.ray import DeviceLaunch, RayCluster, RayNode

# Environment variables passed to processes on other machines; their values are never printed.
PASSED_VARIABLES = (
    "WANDB_API_KEY",
    "OPENAI_API_KEY",
    "TOKENIZERS_PARALLELISM",
    "PYTHONHASHSEED",
    "CUBLAS_WORKSPACE_CONFIG",
    *ALLOCATOR,
)
PASSED_PREFIXES = ("WEFT_", "HF_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_")


MAX_PROCESSES_PER_CORE = 64  # maximum number of processes (one per device) per CPU core
# time for a cluster to replace lost devices
RETURN_SECONDS = 300.0
RETURN_POLL_SECONDS = 5.0


# Variables that ray reads when it is imported: messages of its processes stay in their logs; the
# dashboard, which only collects usage statistics, does not delay the start.
RAY_READS = {"RAY_DEDUP_LOGS_SKIP_REGEX": ".", "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "0"}

# Device files of GPUs in /dev: NVIDIA, AMD, WSL.
GPU_FILES = ("nvidia*", "kfd", "dxg")


def relaunch_devices(experiment: Experiment, mode: str) -> DeviceLaunch:
    """Start device processes in place of lost ones.

    In an existing cluster, retries until the cluster has enough devices. Raises `RunError` if the
    cluster still has too few devices after `RETURN_SECONDS`.
    """
    end = time.monotonic() + RETURN_SECONDS
    while True:
        try:
            return launch_devices(experiment, mode)
        except ConfigError as error:
            if mode == "local" or time.monotonic() > end:
                raise RunError(f"the lost devices were not replaced: {error}") from error
        time.sleep(RETURN_POLL_SECONDS)


def launch_devices(
    experiment: Experiment, mode: str, cluster: RayCluster | None = None
) -> DeviceLaunch:
    """Start a process for each device of the experiment.

    `cluster` is the Ray cluster from `start_early`, or None if no cluster has been started. Raises
    `ConfigError` before any process starts if there are too few devices. Closes the cluster on
    errors.
    """
    count = experiment.num_devices
    kind = get_device_kind(experiment)
    control = experiment.control
    # If torch has found a GPU that has no device file, the cluster was started for CPUs by mistake.
    if cluster is not None and kind == "cuda":
        cluster.close()
        cluster = None
    if cluster is None:
        check_ray(experiment)
        if mode == "local":
            cluster = _start_cluster(find_local_resources(count, kind, control))
        else:
            from weft.runtime.ray import RayCluster

            cluster = RayCluster.join(
                str(control.ray_address or os.environ.get("RAY_ADDRESS") or "auto")
            )
    from weft.runtime.ray import MIN_SILENT_SECONDS, SILENT_SECONDS

    try:
        # Check the devices of the cluster before any process starts.
        nodes = cluster.list_nodes()
        if kind == "cpu" and control.device is None and any(node.gpus for node in nodes):
            raise ConfigError(
                "the cluster has GPUs and this machine has none; write device=cuda, or device=cpu "
                "to ignore them"
            )
        check_enough_devices(count, kind, nodes)
        # Start the processes; the shortest deadline bounds the silence of a device.
        environment = {**collect_environment(), **control.env}
        deadlines = []
        for call in experiment.calls.values():
            if call.deadline_s is not None:
                deadlines.append(call.deadline_s)
        cluster.silent_s = max(MIN_SILENT_SECONDS, min([SILENT_SECONDS, *deadlines]))
        return cluster.launch(count, kind, {**environment, **build_segment_variables(environment)})
    except BaseException:
        cluster.close()
        raise


def can_start_early(experiment: Experiment, mode: str) -> bool:
    """Return whether the run's Ray cluster can be started while torch is still being imported.

    This is possible if the run is local and uses several devices, all of them CPUs. If the device
    is not configured, CPUs are assumed unless the machine has device files of GPUs.
    """
    device = experiment.control.device
    if mode != "local" or experiment.num_devices == 1:
        return False
    return device == "cpu" or (
        device is None
        and not any(True for pattern in GPU_FILES for _ in Path("/dev").glob(pattern))
    )


def start_early(experiment: Experiment) -> RayCluster:
    """Start the private Ray cluster of a run, without its device processes.

    Must only be called if `can_start_early` returns True. Raises `ConfigError` if this machine has
    too few cores for the run's devices.
    """
    return _start_cluster(find_local_resources(experiment.num_devices, "cpu", experiment.control))


def check_ray(experiment: Experiment) -> None:
    """Raise `ConfigError` if the package ray is not installed.

    Also sets the environment variables that ray reads when it is imported.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"the run needs {experiment.num_devices} devices, and more than one, or mode=ray, "
            f"needs the package ray; "
            f"run: {install('ray')}"
        )
    for name, value in RAY_READS.items():
        os.environ.setdefault(name, value)


def _start_cluster(resources: tuple[int, int]) -> RayCluster:
    from weft.runtime.ray import RayCluster

    try:
        return RayCluster.start(*resources)
    except RunError:  # try again: ray waits only 30 s, which is short on a busy machine
        return RayCluster.start(*resources)


def find_local_resources(count: int, kind: str, control: Control) -> tuple[int, int]:
    """Return the numbers of CPUs and GPUs that a private Ray cluster on this machine should have.

    The option `n_gpus_per_node` in `control` limits the number of GPUs. Raises `ConfigError` if
    this machine cannot provide `count` devices of the type `kind`.
    """
    if kind == "cpu":
        check_processes(count)
    num_found = 0
    if kind == "cuda":
        import torch  # imported late: a run on CPUs starts Ray while torch is loading

        num_found = torch.cuda.device_count()
    if control.n_gpus_per_node is None:
        gpus = num_found
    else:
        gpus = min(num_found, control.n_gpus_per_node)
    if kind == "cuda" and gpus < count:
        raise ConfigError(
            f"the run needs {count} devices and may use {gpus} GPUs of the {num_found} of this "
            f"machine; choose smaller layouts or "
            "other device_mesh numbers, raise n_gpus_per_node, write device=cpu, or run on more "
            "machines with mode=ray"
        )
    # a CPU device is a process, even if there are fewer cores
    return max(count, len(os.sched_getaffinity(0))), gpus


def check_processes(count: int) -> None:
    """Raise `ConfigError` if this machine has too few cores for `count` processes."""
    cores = len(os.sched_getaffinity(0))
    if count > (most := MAX_PROCESSES_PER_CORE * cores):
        raise ConfigError(
            f"the run needs {count:,} devices, each a process, and this machine's {cores} CPU "
            f"cores can run at most {MAX_PROCESSES_PER_CORE} "
            f"each, {most:,}: choose smaller layouts or lower device_mesh numbers, or plan for "
            f"GPUs with device=cuda"
        )


def get_device_kind(experiment: Experiment) -> str:
    """Return the device type, `cuda` or `cpu`, of a run that has device processes.

    Raises `ConfigError` if the option `device` names a single device, such as `cuda:1`.
    """
    name = experiment.control.device
    if name == TPU:
        raise ConfigError(
            f"device={TPU}: a run on a TPU has one process on each host, without device processes; "
            f"write mode=local, and divide the role's devices by its layout, such as 1,-1,1"
        )
    if name is None:
        import torch  # imported late, as in find_local_resources

        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ConfigError(
            f"device={name}: names one device, and the run needs {experiment.num_devices}; write "
            f"cuda or cpu, and say which "
            "by layout and device_mesh"
        )
    return name


def check_enough_devices(count: int, kind: str, nodes: Sequence[RayNode]) -> None:
    """Raise `ConfigError` if the machines of the cluster together have fewer than `count` devices.

    `kind` is the type of the devices, `cuda` or `cpu`. The message lists the devices of each
    machine.
    """
    has = [f"{node.host}: {node.gpus if kind == 'cuda' else node.cpus}" for node in nodes]
    num_available = sum(
        min(node.gpus, node.cpus) if kind == "cuda" else node.cpus for node in nodes
    )
    if num_available < count:
        unit = "GPUs" if kind == "cuda" else "CPUs"
        machines = ", ".join(has) or "no machine is up"
        raise ConfigError(
            f"the run needs {count} devices and the Ray cluster has {num_available} {unit} ({machines}), "
            f"{count - num_available} too few; "
            "choose smaller layouts, or add machines"
        )


def collect_environment() -> Mapping[str, str]:
    """Return the environment variables of this process that are passed on to device processes."""
    environment = {}
    for name, value in os.environ.items():
        if name in PASSED_VARIABLES or name.startswith(PASSED_PREFIXES):
            environment[name] = value
    return environment


def start_ray_while_torch_loads(experiment: Experiment, mode: str) -> RayCluster | None:
    """Start a private Ray cluster while another thread imports `weft.launch.assemble` and torch.

    A cluster is started only if the run has several devices that are all CPUs of this machine;
    otherwise, returns None. Ray is started in the main thread, because the cluster ends with the
    thread that started it.
    """
    if not can_start_early(experiment, mode):
        return None
    check_ray(experiment)
    # imported first, because two threads importing one package can interfere
    import_module("weft.runtime.ray")

    def load_assemble() -> None:
        with suppress(Exception):  # the next import raises the error
            import_module("weft.launch.assemble")

    loader = threading.Thread(target=load_assemble, name="weft-imports")
    loader.start()
    try:
        return start_early(experiment)
    finally:
        loader.join()
