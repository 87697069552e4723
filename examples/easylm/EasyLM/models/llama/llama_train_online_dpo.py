"""EasyLM's `llama_train_online_dpo` on weft: `weft easylm llama_train_online_dpo` with the same flags."""

import sys

from weft.apps.easylm import main

if __name__ == "__main__":
    sys.exit(main("llama_train_online_dpo"))
