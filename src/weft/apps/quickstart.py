"""Entry point `python -m weft.apps.quickstart NAME key=value ...`: the same as `weft quickstart`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from weft.cli.main import main as weft


def main(argv: Sequence[str] | None = None) -> int:
    """Run `weft quickstart` with the arguments `argv`, and return the exit code.

    By default, the arguments are read from `sys.argv`. A script that registers a quickstart can end
    with `sys.exit(main())`.
    """
    if argv is None:
        sys.argv.insert(1, "quickstart")
    return weft(None if argv is None else ["quickstart", *argv])


if __name__ == "__main__":
    sys.exit(main())
