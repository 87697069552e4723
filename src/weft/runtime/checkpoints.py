"""Checkpoints of the saved roles: `checkpoints/{role}/step{N}/`, written whole, pruned to what the
user wants to keep.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from weft.runtime import disk
from weft.runtime.directory import RunDirectory
from weft.runtime.group import WorkerGroup

MILESTONES = "milestones.json"


class Checkpoints:
    """`limit`: the newest so many of a role are kept, milestones aside; None keeps all."""

    def __init__(
        self, directory: RunDirectory, roles: Sequence[str], group: WorkerGroup, limit: int | None
    ) -> None:
        self._directory = directory
        self._roles = roles
        self._group = group
        self._limit = limit

    def save(self, step: int, *, milestone: bool) -> list[Path]:
        """Save every role after `step` steps.

        Raises `RunError` where the disk does not take it; what was there stays.
        """
        made = []
        for role in self._roles:
            target = self._directory.checkpoints / role / f"step{step}"
            target.parent.mkdir(parents=True, exist_ok=True)
            made.append(
                disk.write_directory(
                    target,
                    lambda d, role=role: self._group.save(role, d).result(),  # type: ignore[misc]
                )
            )
        if milestone and self._roles:
            steps = sorted({*self._milestones(), step})
            disk.write_text(self._directory.checkpoints / MILESTONES, json.dumps(steps) + "\n")
        return made

    def prune(self) -> None:
        """Remove what goes beyond the limit.

        A restart needs none of them: recovery points hold all that it takes up.
        """
        if self._limit is None:
            return
        kept = self._milestones()
        for role in self._roles:
            passing = [step for step in self._directory.saved_steps(role) if step not in kept]
            for step in passing[: -self._limit]:
                disk.remove(self._directory.checkpoints / role / f"step{step}")

    def mend(self) -> None:
        """Remove what a killed process left half-written."""
        for role in self._roles:
            disk.mend(self._directory.checkpoints / role)

    def _milestones(self) -> list[int]:
        path = self._directory.checkpoints / MILESTONES
        return list(json.loads(path.read_text())) if path.is_file() else []
