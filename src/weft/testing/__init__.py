"""weft's own tests of the things users write, for them to run: `from weft.testing import
check_dataset`.

Nothing is imported before it is asked for: the checks of a family load torch and transformers,
those of others need not.
"""

from __future__ import annotations

import importlib
from typing import Any

HOMES = {
    "check_dataset": "weft.testing.datasets",
    "check_family": "weft.testing.families",
    "check_interface": "weft.testing.interfaces",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"weft.testing has no {name!r}; it has {', '.join(sorted(HOMES))}")
    return getattr(importlib.import_module(HOMES[name]), name)
