"""Status of a run, read from its directory, its process and its Slurm job."""

from __future__ import annotations

from pathlib import Path

from weft.launch import slurm


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
