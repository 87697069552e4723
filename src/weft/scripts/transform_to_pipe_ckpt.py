"""Script `python -m weft.scripts.transform_to_pipe_ckpt`, which runs `weft convert partition`.

Arguments: `--model_dir D --num_stages N --output_dir O`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from weft.cli.main import main as weft


def main(argv: Sequence[str] | None = None) -> int:
    return weft(["convert", "partition", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
