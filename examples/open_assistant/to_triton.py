"""Open-Assistant's `to_triton.py` on weft: prints the command that its arguments come to, and runs
it.
"""

import sys

from weft.compat.scripts import run

if __name__ == "__main__":
    sys.exit(run("to_triton", sys.argv[1:]))
