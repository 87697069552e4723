"""Model checkpoints of a run, in `checkpoints/{role}/step{N}/`.

A checkpoint gets its final name only when it is complete. Old checkpoints are removed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from weft.runtime import disk
from weft.runtime.directory import RunDirectory
from weft.runtime.group import WorkerGroup

MILESTONES = "milestones.json"


class CheckpointStore:
    """Store of the model checkpoints of `roles`.

    It keeps all checkpoints that were saved as milestones, and the newest `limit` other checkpoints
    of each role. If `limit` is None, it keeps all checkpoints.
    """

    def __init__(
        self, directory: RunDirectory, roles: Sequence[str], group: WorkerGroup, limit: int | None
    ) -> None:
        self._directory = directory
        self._roles = roles
        self._group = group
        self._limit = limit

    def save(self, step: int, *, milestone: bool) -> list[Path]:
        """Save the models of all roles, and return the new directories.

        `step` is the number of completed steps. A `milestone` is never removed by `prune`. Raises
        `RunError` if the disk is full or fails; earlier checkpoints remain intact.
        """
        directories = []
        for role in self._roles:
            target = self._directory.checkpoints_folder / role / f"step{step}"
            target.parent.mkdir(parents=True, exist_ok=True)
            directories.append(
                disk.write_directory(
                    target,
                    lambda d, role=role: self._group.save(role, d).result(),  # type: ignore[misc]
                )
            )
        if milestone and self._roles:
            steps = sorted({*self._read_milestones(), step})
            disk.write_text(
                self._directory.checkpoints_folder / MILESTONES, json.dumps(steps) + "\n"
            )
        return directories

    def prune(self) -> None:
        """Remove each role's oldest checkpoints if there are more than the limit.

        Checkpoints that were saved as milestones are never removed, and do not count towards the
        limit. Restarts do not need the removed checkpoints, because they read recovery points.
        """
        if self._limit is None:
            return
        milestones = self._read_milestones()
        for role in self._roles:
            passing = []
            for step in self._directory.list_saved_steps(role):
                if step not in milestones:
                    passing.append(step)
            for step in passing[: -self._limit]:
                disk.remove(self._directory.checkpoints_folder / role / f"step{step}")

    def remove_partial(self) -> None:
        """Remove incomplete checkpoints that a killed process left behind."""
        for role in self._roles:
            disk.clean_up(self._directory.checkpoints_folder / role)

    def _read_milestones(self) -> list[int]:
        path = self._directory.checkpoints_folder / MILESTONES
        return list(json.loads(path.read_text())) if path.is_file() else []
