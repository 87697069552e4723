"""`python -m weft.apps.main start ...`: the same as `weft start ...`, and so for every other
command; and `find_config`.
"""

from __future__ import annotations

import sys

from weft.cli.main import guarded
from weft.cli.main import main as weft
from weft.cli.start import find_config


def main() -> int:
    """Run the command of this process's words. Returns the exit code."""
    if sys.argv[1:2] == ["find_config"]:
        return guarded(lambda: find_config(sys.argv[2:]), sys.argv[1:])
    return weft()


if __name__ == "__main__":
    sys.exit(main())
