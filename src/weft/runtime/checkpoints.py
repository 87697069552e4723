"""Saved states of a run: checkpoints of its models, and recovery points for restarts.

A checkpoint is the folder `checkpoints/{role}/step{N}/`. It gets this name only when it is complete.
Old checkpoints are removed.

A recovery point is written between steps, and the last two are kept. It is first written to
`recover/step{N}.tmp`, then flushed to disk and renamed to `recover/step{N}`. It is complete once
its manifest `recover/step{N}.json`, with a checksum per file, has been written. A directory without
a manifest is ignored. If a recovery point is damaged, the one before it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.errors import CheckpointError
from weft.runtime import disk
from weft.runtime.calls import WorkerGroup
from weft.runtime.directory import RunDirectory

MILESTONES = "milestones.json"
MOST_POINTS = 2
STEP = re.compile(r"step(\d+)")


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


@dataclass(frozen=True)
class RecoveryPoint:
    """Saved state of a run after `step` completed steps."""

    step: int
    directory: Path

    @property
    def manifest(self) -> Path:
        return self.directory.with_name(self.directory.name + ".json")


class RecoveryPointStore:
    """Store of the recovery points of one run, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, step: int, fill: Callable[[Path], None]) -> RecoveryPoint:
        """Write a recovery point, then remove all but the last two.

        `step` is the number of completed steps. `fill` is called with an empty directory to write
        the files. Raises `RunError` if the disk is full or fails; earlier recovery points then
        remain.
        """
        point = RecoveryPoint(step, self._folder / f"step{step}")
        self._folder.mkdir(parents=True, exist_ok=True)
        point.manifest.unlink(missing_ok=True)
        disk.write_directory(point.directory, fill)
        disk.write_text(
            point.manifest,
            json.dumps({"step": step, "files": disk.compute_checksums(point.directory)}, indent=1),
        )
        for old in self.list_points()[MOST_POINTS:]:
            old.manifest.unlink()
            disk.remove(old.directory)
        return point

    def list_points(self) -> list[RecoveryPoint]:
        """Return all complete recovery points, newest first, without verifying their checksums."""
        steps = [
            match for path in self._folder.glob("step*") if (match := STEP.fullmatch(path.name))
        ]
        points = [RecoveryPoint(int(match[1]), self._folder / match[0]) for match in steps]
        return sorted(
            (point for point in points if point.manifest.is_file()), key=lambda point: -point.step
        )

    def find_newest(self, note: Callable[[str], None]) -> RecoveryPoint | None:
        """Return the newest intact recovery point, or None if no point is intact.

        `note` is called with a message for each damaged one that is skipped.
        """
        for point in self.list_points():
            wrong = find_damage(point)
            if wrong is None:
                return point
            note(
                f"the recovery point at step {point.step} is damaged ({wrong}); using the "
                f"one before"
            )
        return None

    def drop_after(self, step: int) -> None:
        """Remove all recovery points later than `step`, the step from which the run resumes."""
        for point in self.list_points():
            if point.step > step:
                point.manifest.unlink()
                disk.remove(point.directory)

    def remove_partial(self) -> None:
        """Remove incomplete recovery points that a killed process left behind."""
        disk.clean_up(self._folder)
        whole = {point.directory.name for point in self.list_points()}
        for path in self._folder.glob("step*"):
            if path.name.removesuffix(".json") not in whole:
                disk.remove(path)


def find_damage(point: RecoveryPoint) -> str | None:
    """Return a description of a damaged or missing file, or None if the point is intact."""
    try:
        expected = json.loads(point.manifest.read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{point.manifest.name} cannot be read"
    missing = []
    for name in expected:
        if not (point.directory / name).is_file():
            missing.append(name)
    if missing:
        return f"{missing[0]} is missing"
    wrong = []
    for name, sum in expected.items():
        if disk.compute_checksum(point.directory / name) != sum:
            wrong.append(name)
    return f"{wrong[0]} differs from what was written" if wrong else None


def find_named_point(path: Path) -> RecoveryPoint:
    """Return the recovery point that the option `resume_from` selects.

    `path` is the directory of a recovery point, of a checkpoint (which selects the recovery point
    of the same step), or of a run (which selects its newest intact recovery point). Raises
    `CheckpointError` if there is no such recovery point; the message lists those that exist.
    """
    path = path.expanduser()
    if not path.exists():
        raise CheckpointError(f"resume_from={str(path)!r}: there is no such directory")
    run = next((p for p in (path, *path.parents) if (p / "config.yaml").is_file()), None)
    points = RecoveryPointStore(run / "recover") if run else None
    existing_points = points.list_points() if points else []
    there = ", ".join(f"step{point.step}" for point in existing_points) or "none"
    if run is None or not existing_points:
        raise CheckpointError(
            f"resume_from={str(path)!r}: not a run of weft with a recovery point; to "
            f"start from its weights only, "
            "give the directory as the model's path"
        )
    match = STEP.fullmatch(path.name)
    chosen = []
    for point in existing_points:
        if match is None or point.step == int(match[1]):
            chosen.append(point)
    for point in chosen:
        if find_damage(point) is None:
            return point
    raise CheckpointError(
        f"resume_from={str(path)!r}: the run has no intact recovery point of that step (it has: "
        f"{there}); name one of these, "
        "or give the directory as the model's path to start from its weights only"
    )
