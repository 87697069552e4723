"""Support for `mode=slurm`: an sbatch script starts Ray on the job's nodes.

The script then runs the command with `mode=ray`. `start_job` writes and submits the script, and
`plan_job` shows what the job would do. `find_running_job` and `cancel_job` find and end the job.
The script, the logs and the job's id are in `slurm/` in the run's directory.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from weft.errors import ConfigError, RunError
from weft.experiment import Experiment, Scheduling
from weft.experiments.common import ExperimentConfig
from weft.experiments.machines import SlurmSpec
from weft.launch.run import (
    build_with_files,
    check,
    mark_as_planned,
    plan_checked,
    set_up_experiment,
)
from weft.launch.run_lock import check_bucket
from weft.observe.jsonl import read_json
from weft.options import read, validate
from weft.redaction import mask_words
from weft.writing import write

FOLDER = "slurm"
SCRIPT = "job.sh"
JOB_FILE = "job.json"
POLL_SECONDS = 0.5
QUEUE_SECONDS = 60.0  # timeout of a Slurm command
MODULE = "weft.cli.main"


@dataclass(frozen=True)
class SlurmRequest:
    """Command to run in a Slurm job, with the resources to request.

    `command` has the command-line words after `weft`.
    """

    name: str
    run: Path  # the run's directory
    command: Sequence[str]
    n_nodes: int = 1
    gpus_per_node: int = 0
    devices_per_node: int = 1  # device processes; Ray needs one CPU for each
    spec: SlurmSpec = field(default_factory=SlurmSpec)
    env: Mapping[str, str] = field(default_factory=dict)
    module: str = MODULE  # module to run with the command's words

    @property
    def folder(self) -> Path:
        return (self.run / FOLDER).absolute()


def start_job(
    config: ExperimentConfig | Experiment,
    command: Sequence[str],
    scheduling: Scheduling | None = None,
    *,
    print_only: bool = False,
) -> str:
    """Submit a job that runs `config` with `command`, the command-line words after `weft`.

    Returns a message for the user. With `print_only`, submits nothing and returns the script.
    Raises `UserError` for every problem that can be detected before the job is submitted.
    """
    from weft.runtime.directory import RunDirectory, admit

    experiment = _build_experiment(config)
    masked_command = mask_words(command)
    if masked_command != list(command):
        raise ConfigError(
            f"mode=slurm: the command is written into the job's script, and contains a secret: "
            f"{shlex.join(masked_command)}; write "
            "${oc.env:NAME} as its value and export NAME, which sbatch passes on"
        )
    directory = RunDirectory.from_control(experiment.control)
    request = build_request(experiment, command, directory.path, scheduling)
    _check_networks(experiment)
    if print_only:
        return build_script(request)
    admit(directory, experiment.control, experiment.resolve(), experiment.left_at_default)
    number = submit_job(request)
    names = f"-e {experiment.control.experiment_name} -f {experiment.control.trial_name}"
    if experiment.control.fileroot == "./runs":
        root_option = ""
    else:
        root_option = f" --fileroot {shlex.quote(experiment.control.fileroot)}"
    return (
        f"submitted job {number} on {request.n_nodes} node{'' if request.n_nodes == 1 else 's'}; "
        f"its script and logs are in "
        f"{request.folder}\nweft logs {names}{root_option} --follow shows what it does, weft stop "
        f"{names}{root_option} ends it"
    )


def plan_job(
    config: ExperimentConfig | Experiment,
    scheduling: Scheduling | None = None,
    *,
    data: bool = True,
    width: int | None = None,
) -> list[str]:
    """Return the lines that `--dry-run` prints for a job.

    They show the plan of the run on the devices that the job would request. Raises `UserError` for
    invalid input.
    """
    from weft.runtime.directory import RunDirectory

    experiment = _build_experiment(mark_as_planned(config), data=data)
    request = build_request(
        experiment, (), RunDirectory.from_control(experiment.control).path, scheduling
    )
    # even if the submitting machine has no GPU
    if request.gpus_per_node and experiment.control.device is None:
        experiment = replace(experiment, control=replace(experiment.control, device="cuda"))
    count = request.gpus_per_node or request.devices_per_node
    if request.gpus_per_node:
        kind = "GPU" if count == 1 else "GPUs"
    else:
        kind = "CPU process" if count == 1 else "CPU processes"
    job = f"{request.n_nodes} node{'' if request.n_nodes == 1 else 's'} with {count} {kind}"
    return [
        f"mode=slurm: a job of {job}{' each' if request.n_nodes > 1 else ''}, not submitted",
        *plan_checked(experiment, "ray", data=data, width=width),
    ]


def _build_experiment(config: ExperimentConfig | Experiment, *, data: bool = True) -> Experiment:
    """Take the stages of `weft.launch.run` that precede the job: set_up_experiment, check and download.

    With `data`, the availability of tokenizers and datasets is checked too. The checks assume that
    the nodes see the same files and, unless the job runs in a container, the same packages.
    """
    experiment, _ = set_up_experiment(config, "slurm")
    check_bucket(experiment.control, "slurm")
    if experiment.config.get("slurm", {}).get("container") is None:
        check(experiment)
    else:
        experiment.check()
    return build_with_files(config, experiment, data=data)


def _check_networks(experiment: Experiment) -> None:
    """Raise `UserError`, naming the option, if a network does not support its layouts.

    Reads only config.json, no weights.
    """
    import torch

    from weft.launch.cluster import get_device_kind
    from weft.launch.resolve import resolve_run

    roles = {name: replace(spec, planned=True) for name, spec in experiment.roles.items()}
    device = torch.device(get_device_kind(experiment))
    resolve_run(replace(experiment, roles=roles), device, tokenizers=False)


def build_request(
    experiment: Experiment, command: Sequence[str], run: Path, scheduling: Scheduling | None = None
) -> SlurmRequest:
    """Return the request for a Slurm job that runs `command`.

    The resources come from the options `slurm.*`, `n_nodes` and `n_gpus_per_node`. If `scheduling`
    is given, it determines the number of nodes and of devices per node, and fills in `slurm.*`
    options that the user has left unset. `run` is the run's directory. Raises `ConfigError` if the
    layouts need more devices than are requested.
    """
    control = experiment.control
    config = experiment.config
    # Take the resources from the options, completed by the experiment.
    spec = read(SlurmSpec(), config.get("slurm", {}), "slurm.")
    validate(spec, "slurm.")
    nodes = int(config.get("n_nodes", 1))
    per_node = config.get("n_gpus_per_node")
    if per_node is None:
        gpus = math.ceil(experiment.num_devices / nodes)
    else:
        gpus = int(per_node)
    if scheduling is not None:
        nodes = scheduling.n_nodes
        gpus = scheduling.gpus_per_node
        memory = scheduling.memory_per_node_gb
        spec = replace(
            spec,
            cpus_per_node=spec.cpus_per_node or scheduling.cpus_per_node,
            mem_per_node=spec.mem_per_node or (f"{math.ceil(memory * 1024)}M" if memory else None),
            **{
                name: getattr(spec, name) or scheduling.get_common_value(name)
                for name in ("nodelist", "exclude", "container")
            },
        )
    # Check that they suffice for the layouts.
    devices = max(nodes * max(1, gpus), scheduling.num_devices if scheduling is not None else 0)
    if experiment.num_devices > devices:
        raise ConfigError(
            f"the layouts need {experiment.num_devices} devices, and n_nodes={nodes} x "
            f"n_gpus_per_node={gpus} are {devices}; "
            "raise one of them, choose smaller layouts or lower device_mesh numbers"
        )
    devices_per_node = math.ceil(experiment.num_devices / nodes)
    on_cpus = control.device == "cpu" or gpus == 0
    if on_cpus and spec.cpus_per_node is None:
        spec = replace(spec, cpus_per_node=devices_per_node)
    return SlurmRequest(
        name=f"weft-{control.experiment_name}-{control.trial_name}",
        run=run,
        command=command,
        n_nodes=nodes,
        gpus_per_node=0 if on_cpus else gpus,
        devices_per_node=devices_per_node,
        spec=spec,
        env=control.env,
    )


# -- the script


def build_script(request: SlurmRequest) -> str:
    """Return the text of the sbatch script."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # only needed here

    spec = request.spec
    python = spec.python or ("python3" if spec.container else sys.executable)
    wrapped, pyxis, apptainer = _build_container(request)
    on_first = 'srun --overlap --cpu-bind=none --nodes=1 --ntasks=1 --nodelist="${nodes[0]}"'
    preparations = [f"module load {shlex.quote(name)}" for name in spec.modules] + list(spec.setup)
    for name, value in request.env.items():
        preparations.append(f"export {name}={shlex.quote(value)}")
    templates = Environment(
        loader=PackageLoader("weft.launch", "."),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    templates.filters["quote"] = shlex.quote
    return templates.get_template("slurm.sh.jinja").render(
        directives=_build_directives(request),
        preparations=preparations,
        folder=str(request.folder),
        python=python,
        pyxis=pyxis,
        apptainer=apptainer,
        on_head=f"{on_first} {pyxis}" if wrapped == "pyxis" else apptainer,
        gpus=request.gpus_per_node,
        devices=request.devices_per_node,
        join_timeout=f"{spec.join_timeout_s:g}",
        command=shlex.join([python, "-m", request.module, *request.command]),
    )


def _build_directives(request: SlurmRequest) -> list[str]:
    spec = request.spec
    if spec.gpu_type:
        gpus = f"{spec.gpu_type}:{request.gpus_per_node}"
    else:
        gpus = str(request.gpus_per_node)
    directives = {
        "job-name": request.name,
        "chdir": str(Path.cwd()),
        "output": str(request.folder / "%j.log"),
        "open-mode": "append",
        "export": "ALL",
        "nodes": str(request.n_nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(spec.cpus_per_node) if spec.cpus_per_node else None,
        "mem": spec.mem_per_node,
        "gpus-per-node": gpus if request.gpus_per_node else None,
        "partition": spec.partition,
        "account": spec.account,
        "qos": spec.qos,
        "time": spec.time,
        "signal": f"B:TERM@{spec.grace_s}",
        "nodelist": spec.nodelist,
        "exclude": spec.exclude,
        "constraint": spec.constraint,
    }
    for name, value in directives.items():
        if value is not None and any(c in value for c in "\n\"'\\"):
            raise ConfigError(
                f"{name}={value!r}: sbatch cannot read quotes, backslashes or line breaks; leave "
                f"them out"
            )
    return [
        f'--{name}="{value}"' if " " in value else f"--{name}={value}"
        for name, value in directives.items()
        if value is not None
    ] + list(spec.sbatch)


def _build_container(request: SlurmRequest) -> tuple[str, str, str]:
    """Return the type of container, the srun options for pyxis, and the prefix for apptainer.

    The type is "pyxis" or "apptainer". The prefix precedes each command in the container. The srun
    options are empty for apptainer, and the prefix is empty for pyxis. Without a container, all
    three are empty.
    """
    spec = request.spec
    if spec.container is None:
        return "", "", ""
    folder = str(Path.cwd())
    run = request.run.absolute()
    root = str(run.parent.parent)
    mounts = list(
        dict.fromkeys([f"{folder}:{folder}", f"{root}:{root}", "/tmp:/tmp", *spec.container_mounts])
    )
    if not spec.container.endswith(".sif"):
        words = [f"--container-image={spec.container}", f"--container-mounts={','.join(mounts)}"]
        return "pyxis", shlex.join([*words, f"--container-workdir={folder}"]), ""
    nvidia = ["--nv"] if request.gpus_per_node else []
    bindings = []
    for mount in mounts:
        for word in ("--bind", mount):
            bindings.append(word)
    return (
        "apptainer",
        "",
        shlex.join(["apptainer", "exec", *nvidia, *bindings, "--pwd", folder, spec.container]),
    )


# -- submitting


def submit_job(request: SlurmRequest) -> str:
    """Write the script into the run's directory, submit it with sbatch and return the job's id.

    Raises `ConfigError` if an earlier job of the run is still in the queue, or if sbatch is missing
    or rejects the job.
    """
    # Check that the job can be submitted.
    running = find_running_job(request.run)
    if running is not None:
        raise ConfigError(
            f"job {running[0]} of {request.run} is already in the queue ({running[1]}); wait for "
            "it, end it with `weft stop`, or choose another trial_name"
        )
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "mode=slurm: this machine has no sbatch; start from a login node of the cluster, or "
            "add --print-script and submit "
            "what it prints by hand"
        )
    # Write the script and submit it.
    text = build_script(request)
    request.folder.mkdir(parents=True, exist_ok=True)
    file = request.folder / SCRIPT
    write(file, text)
    file.chmod(0o755)
    result = _run_slurm("sbatch", "--parsable", str(file))
    if result.returncode:
        raise ConfigError(
            f"sbatch rejected the job: {_get_first_line(result.stderr)}; the script is {file}, its "
            f"options are slurm.*"
        )
    # Record the number, by which other commands find the job.
    number = result.stdout.strip().splitlines()[-1].split(";")[0]
    write(
        request.folder / JOB_FILE,
        json.dumps({"job": number, "time": time.time(), "script": str(file)}) + "\n",
    )
    return number


# -- the job in the queue


def find_running_job(run: Path) -> tuple[str, str] | None:
    """Return the id and state, such as PENDING, of the run's unfinished job.

    Returns None if the run has no unfinished job.
    """
    number = read_json(run / FOLDER / JOB_FILE).get("job")
    if not isinstance(number, str) or not number.isdecimal():
        return None
    state = _read_state(number)
    return None if state is None else (number, state)


def cancel_job(run: Path, number: str, *, deadline_s: float = 600.0) -> str:
    """Cancel a pending job, or send SIGTERM to a running job and wait until it has ended.

    `number` is the job's id. A running job writes a recovery point before it ends. Returns a
    message for the user. Raises `RunError` if the job does not end within `deadline_s` seconds.
    """
    state = _read_state(number)
    if state in ("PENDING", "CONFIGURING"):
        _run_checked("scancel", number)
        return f"job {number} of {run} was still waiting and is cancelled"
    _run_checked("scancel", "--batch", "--signal=TERM", number)
    end = time.monotonic() + deadline_s
    while _read_state(number) is not None:
        if time.monotonic() > end:
            raise RunError(
                f"job {number} still runs {run} after {deadline_s:g} s; it finishes its step "
                f"first, so wait, or end it with "
                f"scancel {number} and lose that step"
            )
        time.sleep(POLL_SECONDS)
    return f"stopped {run} (job {number}); the command that started it resumes it"


def _read_state(number: str) -> str | None:
    """Return the state of the job with the id `number`, or None if the job has ended.

    Raises `RunError` if Slurm does not answer.
    """
    if shutil.which("squeue") is None:
        raise RunError(
            f"job {number} is a Slurm job, and this machine has no squeue; ask on a login node of "
            f"the cluster"
        )
    result = _run_slurm("squeue", "--noheader", "--jobs", number, "--states=all", "--format=%T")
    if result.returncode:
        if "Invalid job id" in result.stderr:  # ended long ago and removed from Slurm's records
            return None
        raise RunError(
            f"squeue did not report the state of job {number}: {_get_first_line(result.stderr)}"
        )
    state = result.stdout.strip()
    if state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED"):
        return state
    return None


def _run_checked(*words: str) -> None:
    result = _run_slurm(*words)
    if result.returncode:
        raise RunError(f"{words[0]} failed: {_get_first_line(result.stderr)}")


def _run_slurm(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            check=False,
            timeout=QUEUE_SECONDS,
            env=os.environ,
        )
    except subprocess.TimeoutExpired:
        raise RunError(
            f"{words[0]} has not answered in {QUEUE_SECONDS:g} s; is Slurm's controller running?"
        ) from None


def _get_first_line(text: str) -> str:
    lines = []
    for line in text.strip().splitlines():
        lines.append(line.removeprefix("sbatch: error: ").removeprefix("sbatch: "))
    return "; ".join(dict.fromkeys(lines[:3])) or "no reason given"
