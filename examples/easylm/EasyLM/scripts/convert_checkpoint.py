"""EasyLM's `convert_checkpoint` on weft: `weft easylm convert_checkpoint` with the same flags."""

import sys

from weft.apps.easylm import main

if __name__ == "__main__":
    sys.exit(main("convert_checkpoint"))
