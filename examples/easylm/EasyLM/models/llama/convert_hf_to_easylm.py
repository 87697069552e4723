"""EasyLM's `convert_hf_to_easylm` on weft: `weft easylm convert_hf_to_easylm` with the same flags."""

import sys

from weft.apps.easylm import main

if __name__ == "__main__":
    sys.exit(main("convert_hf_to_easylm"))
