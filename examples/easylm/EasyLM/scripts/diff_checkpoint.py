"""EasyLM's `diff_checkpoint` on weft: `weft easylm diff_checkpoint` with the same flags."""

import sys

from weft.apps.easylm import main

if __name__ == "__main__":
    sys.exit(main("diff_checkpoint"))
