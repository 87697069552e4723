"""Status of a run, from its directory, its process and its Slurm job."""

from __future__ import annotations

from pathlib import Path

from weft.launch import slurm


def format_status(run: Path) -> str:
    """Return a readable line such as `runs/e/t: running, job 12 RUNNING`."""
    from weft.runtime.directory import find_owner

    status = read_run_status(run)
    job = slurm.find_running_job(run)
    pid = find_owner(run)
    if status == "running" and pid is None and job is None:
        status = "crashed or killed"
    return f"{run}: {status}" + (
        f", job {job[0]} {job[1]}" if job else f", process {pid}" if pid is not None else ""
    )


def read_run_status(run: Path) -> str:
    """Return "finished", "stopped", "failed", "running" or "not begun"."""
    from weft.runtime.directory import RunDirectory

    return RunDirectory(run).read_status() or "not begun"


def is_alive(run: Path) -> bool:
    """Return whether a process or a Slurm job, running or queued, belongs to the run."""
    from weft.runtime.directory import find_owner

    return find_owner(run) is not None or slurm.find_running_job(run) is not None
