"""How a checkpoint of a run is called wherever people read its path. `weft.checkpoints.names` finds it by that name again."""

from __future__ import annotations

import re
from pathlib import Path

POLICIES = ("actor", "model")  # roles whose checkpoint serves as a policy, the likeliest first
CHECKPOINTS = "checkpoints"
STEP = re.compile(r"step(\d+)")


def short(path: str) -> str:
    """The shortest name of a run's checkpoint: `runs/E/T@step40` for that of a policy, `runs/E/T@step40:critic` for that of
    another role; `path` for anything else."""
    parts = Path(path).parts
    if len(parts) <= 3 or parts[-3] != CHECKPOINTS or STEP.fullmatch(parts[-1]) is None:
        return path
    named = f"{Path(*parts[:-3])}@{parts[-1]}"
    return named if parts[-2] in POLICIES else f"{named}:{parts[-2]}"
