"""Checks that users can run on their own datasets, model families and interfaces.

    from weft.testing import check_dataset

Each check is imported on first access, since `check_family` loads torch and transformers.
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
