"""Running experiments: `run` a configuration, `start` a registered experiment, `stop` a run."""

from weft.launch.run import RunResult, run
from weft.launch.start import check_machines, registered, scheduling, start
from weft.launch.stop import stop

__all__ = ["RunResult", "check_machines", "registered", "run", "scheduling", "start", "stop"]
