"""EasyLM's `submit_open_instruct_eval.py` on weft, with the same flags; run it in this folder."""

import sys

from weft.apps.easylm import main

if __name__ == "__main__":
    sys.exit(main("submit_open_instruct_eval"))
