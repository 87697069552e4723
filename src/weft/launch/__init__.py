"""Functions that run, plan, start and stop experiments.

`start` runs an experiment registered by name.
"""

from weft.launch.run import RunResult, dry_run, run
from weft.launch.start import build_registered, build_scheduling, check_machines, start
from weft.launch.stop import stop

__all__ = [
    "RunResult",
    "build_registered",
    "build_scheduling",
    "check_machines",
    "dry_run",
    "run",
    "start",
    "stop",
]
