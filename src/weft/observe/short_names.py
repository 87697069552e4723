"""Short names of runs' checkpoints, for display.

`weft.checkpoints.names` resolves a short name to the checkpoint.
"""

from __future__ import annotations

import re
from pathlib import Path

POLICIES = ("actor", "model")  # roles whose checkpoint is a policy, most likely first
CHECKPOINTS = "checkpoints"
STEP = re.compile(r"step(\d+)")


def shorten_path(path: str) -> str:
    """Return the short name of a run's checkpoint, or `path` itself for any other path.

    Examples are `runs/E/T@step40` for a policy, and `runs/E/T@step40:critic` for another role,
    where E is the experiment and T the trial.
    """
    parts = Path(path).parts
    if len(parts) <= 3 or parts[-3] != CHECKPOINTS or STEP.fullmatch(parts[-1]) is None:
        return path
    named = f"{Path(*parts[:-3])}@{parts[-1]}"
    return named if parts[-2] in POLICIES else f"{named}:{parts[-2]}"


def build_served_name(path: str) -> str:
    """Return the name by which clients of a server refer to a model.

    For a run's checkpoint, this is the name of the trial. Otherwise it is the last part of the
    path, ignoring step folders such as `step40`. The name is safe in URLs, and does not change when
    a run continues.
    """
    parts = Path(path).parts
    if len(parts) > 3 and parts[-3] == CHECKPOINTS and STEP.fullmatch(parts[-1]):
        named = parts[-4]
    else:
        named = next((part for part in reversed(parts) if STEP.fullmatch(part) is None), path)
    return re.sub(r"[^A-Za-z0-9._-]", "-", named)
