"""Open-Assistant's `trainer_rl.py` on weft: prints the command that its arguments come to, and runs
it.
"""

import sys

from weft.cli.open_assistant.commands import run

if __name__ == "__main__":
    sys.exit(run("trainer_rl", sys.argv[1:]))
