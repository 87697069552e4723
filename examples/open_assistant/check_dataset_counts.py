"""Open-Assistant's `check_dataset_counts.py` on weft: prints the command that its arguments come
to, and runs it.
"""

import sys

from weft.compat.scripts import run

if __name__ == "__main__":
    sys.exit(run("check_dataset_counts", sys.argv[1:]))
