"""How a run stands: its own word, its process, its Slurm job."""

from __future__ import annotations

from pathlib import Path

from weft.launch import slurm


def status_line(run: Path) -> str:
    """One line for people, such as `runs/e/t: running, job 12 RUNNING`."""
    from weft.runtime.directory import owner

    said = run_status(run)
    job = slurm.running_job(run)
    pid = owner(run)
    if said == "running" and pid is None and job is None:
        said = "nobody works on it, and it did not come to say how it ended"
    return f"{run}: {said}" + (
        f", job {job[0]} {job[1]}" if job else f", process {pid}" if pid is not None else ""
    )


def run_status(run: Path) -> str:
    """finished, stopped, failed, running, or not begun."""
    from weft.runtime.directory import RunDirectory

    return RunDirectory(run).status() or "not begun"


def is_alive(run: Path) -> bool:
    """Whether a process or a job works on the run or waits to."""
    from weft.runtime.directory import owner

    return owner(run) is not None or slurm.running_job(run) is not None
