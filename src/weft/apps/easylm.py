"""Entry point `python -m weft.apps.easylm COMMAND --flag=value ...`: the same as `weft easylm`."""

from __future__ import annotations

import sys

from weft.cli.main import main as weft


def main(command: str | None = None) -> int:
    """Run `weft easylm` with the arguments in `sys.argv`, and return the exit code.

    A script that stands for one of EasyLM's commands passes its name as `command`.
    """
    sys.argv[1:1] = ["easylm"] if command is None else ["easylm", command]
    return weft()


if __name__ == "__main__":
    sys.exit(main())
