"""Running experiments: `run` a configuration, `start` a registered experiment, `stop` a run."""

from weft.launch.run import RunResult, run
from weft.launch.start import registered, start
from weft.launch.stop import stop

__all__ = ["RunResult", "registered", "run", "start", "stop"]
