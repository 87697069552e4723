"""Script `python -m weft.scripts.transform_to_pipe_ckpt`, which runs `weft convert partition`.

Arguments: `--model_dir D --num_stages N --output_dir O`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from weft.cli import dialects
from weft.cli.main import run_guarded


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    return run_guarded(lambda given: dialects.load("scripts").partition_checkpoint(given), words)


if __name__ == "__main__":
    sys.exit(main())
