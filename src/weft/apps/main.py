"""`python -m weft.apps.main start ...`: the same as `weft start ...`, and so for every other command."""

from __future__ import annotations

import sys

from weft.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
