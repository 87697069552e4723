"""Entry point `python -m weft.apps.main COMMAND ...`, compatible with `realhf.apps.main`.

`find_config` lists experiments as in ReaL; any other command runs as `weft COMMAND ...`.
"""

from __future__ import annotations

import sys

from weft.cli.main import main as weft
from weft.cli.main import run_guarded
from weft.cli.start import find_config


def main() -> int:
    """Run the command in `sys.argv` and return the exit code."""
    if sys.argv[1:2] == ["find_config"]:
        return run_guarded(lambda words: find_config(words[1:]), sys.argv[1:])
    return weft()


if __name__ == "__main__":
    sys.exit(main())
