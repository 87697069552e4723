"""Running of experiments: `run`, `dry_run`, `start` for registered ones, and `stop`."""

from weft.launch.run import RunResult, dry_run, run
from weft.launch.start import check_machines, registered, scheduling, start
from weft.launch.stop import stop

__all__ = [
    "RunResult",
    "check_machines",
    "dry_run",
    "registered",
    "run",
    "scheduling",
    "start",
    "stop",
]
