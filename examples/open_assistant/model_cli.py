"""Open-Assistant's `model_cli.py` on weft: prints the command that its arguments come to, and runs
it.
"""

import sys

from weft.compat.scripts import run

if __name__ == "__main__":
    sys.exit(run("model_cli", sys.argv[1:]))
