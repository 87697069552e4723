"""Functions that tell the status of a run and stop it, from another process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from weft.errors import ConfigError, RunError
from weft.launch import slurm

POLL_SECONDS = 0.1


def stop(
    experiment_name: str, trial_name: str, *, fileroot: str = "./runs", deadline_s: float = 600.0
) -> str:
    """Stop the run `trial_name` of the experiment `experiment_name`, as `stop_run` does.

    Raises `ConfigError` if there is no such run, and otherwise the same errors as `stop_run`.
    """
    return stop_run(
        find_run_directory(experiment_name, trial_name, fileroot), deadline_s=deadline_s
    )


def stop_run(run: Path, *, deadline_s: float = 600.0) -> str:
    """Send SIGTERM to the run's Slurm job or process, and wait until it has ended.

    The run first finishes its step and writes a recovery point. A pending job is cancelled. `run`
    is the run's directory. Returns a message for the user. Raises `ConfigError` if the run has no
    job or process, and `RunError` if the job or process does not end within `deadline_s` seconds.
    """
    from weft.runtime.directory import find_owner

    job = slurm.find_running_job(run)
    if job is not None:
        return slurm.cancel_job(run, job[0], deadline_s=deadline_s)
    pid = find_owner(run)
    if pid is None:
        raise ConfigError(f"no process runs {run}; there is nothing to stop")
    os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + deadline_s
    while find_owner(run) == pid:
        if time.monotonic() > end:
            raise RunError(
                f"process {pid} still runs {run} after {deadline_s:g} s; it finishes its step "
                f"first, so wait, or end it with "
                f"kill -9 {pid} and lose that step"
            )
        time.sleep(POLL_SECONDS)
    return f"stopped {run} (process {pid}); the command that started it resumes it"


def find_run_directory(experiment_name: str, trial_name: str, fileroot: str) -> Path:
    """Return the directory of a run.

    Raises `ConfigError`, with a list of existing runs, if the directory does not exist.
    """
    run = Path(fileroot).expanduser() / experiment_name / trial_name
    if not run.is_dir():
        runs = sorted(
            str(p.relative_to(run.parent.parent))
            for p in run.parent.parent.glob("*/*")
            if p.is_dir()
        )
        raise ConfigError(f"there is no run {run}; runs here: {', '.join(runs[:8]) or 'none'}")
    return run


def format_status(run: Path) -> str:
    """Return a line with the status of a run, such as `runs/e/t: running, job 12 RUNNING`.

    `run` is the run's directory.
    """
    from weft.runtime.directory import find_owner

    status = read_run_status(run)
    job = slurm.find_running_job(run)
    pid = find_owner(run)
    if status == "running" and pid is None and job is None:
        status = "crashed or killed"
    if job:
        owner = f", job {job[0]} {job[1]}"
    elif pid is not None:
        owner = f", process {pid}"
    else:
        owner = ""
    return f"{run}: {status}{owner}"


def read_run_status(run: Path) -> str:
    """Return the status that is stored in the run's directory, or "not begun" if none is stored.

    The stored status is "running", "finished", "stopped" or "failed". A run that was killed can
    still have the status "running".
    """
    from weft.runtime.directory import RunDirectory

    return RunDirectory(run).read_status() or "not begun"


def is_alive(run: Path) -> bool:
    """Return whether the run has a live process, or a Slurm job that is running or queued."""
    from weft.runtime.directory import find_owner

    return find_owner(run) is not None or slurm.find_running_job(run) is not None
