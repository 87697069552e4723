"""EasyLM's `convert_easylm_to_hf` on weft: `weft easylm convert_easylm_to_hf` with the same flags."""

import sys

from weft.apps.easylm import main

if __name__ == "__main__":
    sys.exit(main("convert_easylm_to_hf"))
