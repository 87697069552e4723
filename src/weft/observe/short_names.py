"""How a checkpoint of a run is called wherever people read its path.

`weft.checkpoints.names` finds it by that name again.
"""

from __future__ import annotations

import re
from pathlib import Path

POLICIES = ("actor", "model")  # roles whose checkpoint serves as a policy, the likeliest first
CHECKPOINTS = "checkpoints"
STEP = re.compile(r"step(\d+)")


def short(path: str) -> str:
    """The shortest name of a run's checkpoint: `runs/E/T@step40` for that of a policy,
    `runs/E/T@step40:critic` for that of another role; `path` for anything else.
    """
    parts = Path(path).parts
    if len(parts) <= 3 or parts[-3] != CHECKPOINTS or STEP.fullmatch(parts[-1]) is None:
        return path
    named = f"{Path(*parts[:-3])}@{parts[-1]}"
    return named if parts[-2] in POLICIES else f"{named}:{parts[-2]}"


def served_name(path: str) -> str:
    """What clients of a server call a model, in characters that URLs may hold: the trial whose
    checkpoint it is, else the last part of its path. It stays the same when the run goes on.
    """
    parts = Path(path).parts
    if len(parts) > 3 and parts[-3] == CHECKPOINTS and STEP.fullmatch(parts[-1]):
        named = parts[-4]
    else:
        named = next((part for part in reversed(parts) if STEP.fullmatch(part) is None), path)
    return re.sub(r"[^A-Za-z0-9._-]", "-", named)
