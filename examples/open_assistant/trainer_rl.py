"""Open-Assistant's `trainer_rl.py` on weft: prints the command that its arguments come to, and runs
it.
"""

import sys

from weft.compat.scripts import run

if __name__ == "__main__":
    sys.exit(run("trainer_rl", sys.argv[1:]))
