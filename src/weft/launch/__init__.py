"""Running experiments: `run` a configuration (`dry_run`: as far as its plan), `start` a registered
experiment, `stop` a run.
"""

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
