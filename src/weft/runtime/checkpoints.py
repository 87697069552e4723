"""Saved states of a run: checkpoints of its models, and recovery points for restarts.

A checkpoint is the folder `checkpoints/{role}/step{N}/`, with the model and its card. It gets this
name only when it is complete. Old checkpoints are removed.

A recovery point is written between steps, and the last two are kept. It is first written to
`recover/step{N}.tmp`, then flushed to disk and renamed to `recover/step{N}`. It is complete once
its manifest `recover/step{N}.json`, with a checksum per file, has been written. A directory without
a manifest is ignored. If a recovery point is damaged, the one before it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from array_api_compat import is_array_api_obj

from weft.data import groups
from weft.data.sample import SequenceSample
from weft.errors import CheckpointError, RunError
from weft.experiment import Control
from weft.observe.jsonl import SUITE_FOLDER
from weft.observe.model_card import CardFacts, write_card
from weft.runtime import directory
from weft.runtime.calls import WorkerGroup
from weft.runtime.directory import RunDirectory
from weft.runtime.store import TensorStore

MILESTONES = "milestones.json"
MAX_POINTS = 2
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
        facts = CardFacts.read(self._directory.path, step)
        for role in self._roles:
            target = self._directory.checkpoints_folder / role / f"step{step}"
            target.parent.mkdir(parents=True, exist_ok=True)
            directories.append(
                directory.write_directory(
                    target, partial(self._fill, target=target, facts=facts, role=role)
                )
            )
        if milestone and self._roles:
            steps = sorted({*self._read_milestones(), step})
            directory.write_text(
                self._directory.checkpoints_folder / MILESTONES, json.dumps(steps) + "\n"
            )
        return directories

    def _fill(self, folder: Path, target: Path, facts: CardFacts, role: str) -> None:
        """Write the model of a role, and its card, into a folder that becomes `target`."""
        self._group.save(role, folder).result()
        write_card(folder, facts, role)
        if (self._directory.path / SUITE_FOLDER).is_dir():
            from weft.checkpoints.hub_card import write_card_results

            write_card_results(folder, target.absolute())

    def prune(self, protected: Collection[int] = (), superseded: Collection[int] = ()) -> None:
        """Remove each role's oldest checkpoints if there are more than the limit.

        Checkpoints that were saved as milestones are never removed, and do not count towards the
        limit. Those of the steps `protected` are not removed either. Those of the steps
        `superseded` are removed in any case. Restarts do not need the removed checkpoints, because
        they read recovery points.
        """
        milestones = self._read_milestones()
        for role in self._roles:
            prunable = []
            removed = []
            for step in self._directory.list_saved_steps(role):
                if step in superseded:
                    removed.append(step)
                elif step not in milestones:
                    prunable.append(step)
            if self._limit is not None:
                removed += [step for step in prunable[: -self._limit] if step not in protected]
            for step in removed:
                directory.remove(self._directory.checkpoints_folder / role / f"step{step}")

    def remove_partial(self) -> None:
        """Remove incomplete checkpoints that a killed process left behind."""
        for role in self._roles:
            directory.clean_up(self._directory.checkpoints_folder / role)

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
        directory.write_directory(point.directory, fill)
        directory.write_text(
            point.manifest,
            json.dumps(
                {"step": step, "files": directory.compute_checksums(point.directory)}, indent=1
            ),
        )
        for old in self.list_points()[MAX_POINTS:]:
            old.manifest.unlink()
            directory.remove(old.directory)
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
            damage = find_damage(point)
            if damage is None:
                return point
            note(
                f"the recovery point at step {point.step} is damaged ({damage}); using the "
                f"one before"
            )
        return None

    def drop_after(self, step: int) -> None:
        """Remove all recovery points later than `step`, the step from which the run resumes."""
        for point in self.list_points():
            if point.step > step:
                point.manifest.unlink()
                directory.remove(point.directory)

    def remove_partial(self) -> None:
        """Remove incomplete recovery points that a killed process left behind."""
        directory.clean_up(self._folder)
        complete = {point.directory.name for point in self.list_points()}
        for path in self._folder.glob("step*"):
            if path.name.removesuffix(".json") not in complete:
                directory.remove(path)


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
    changed = []
    for name, sum in expected.items():
        if directory.compute_checksum(point.directory / name) != sum:
            changed.append(name)
    return f"{changed[0]} differs from what was written" if changed else None


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
    existing_steps = ", ".join(f"step{point.step}" for point in existing_points) or "none"
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
        f"{existing_steps}); name one of these, "
        "or give the directory as the model's path to start from its weights only"
    )


def describe_differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the numerical settings that have changed since a recovery point was saved.

    `then` are the saved settings, and `now` the current ones. Returns "" if nothing differs.
    """
    return "; ".join(
        f"{name} {then.get(name)} then, {value} now"
        for name, value in now.items()
        if then.get(name) != value
    )


def describe_resuming(control: Control, point: int, step: int | None = None) -> str:
    """Return a phrase that tells the user how to resume the run.

    `point` is the step of the last recovery point (0 if there is none). `step` is the number of
    steps that were completed when the run stopped.
    """
    if control.recover_mode == "disabled":
        return "with recover_mode=disabled it cannot be resumed"
    if not point:
        return "there is no recovery point yet: the same command starts again"
    return f"rerun the same command to resume {'from there' if point == step else f'after step {point}'}"


# {ARRAY: [name of the tensor, "numpy" or "torch"]} represents an array
ARRAY = "$array"
ENGINES_FOLDER = "engines"
INTERFACES_FILE = "interfaces.bin"
STORE_FOLDER = "store"
NUMERICS_FILE = "numerics.bin"
DRIVER_FOLDER = "driver"  # with several devices: the driver's rows and outputs of host functions


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write nested mappings, lists, strings, numbers, NumPy arrays and tensors to a file.

    Floats are stored exactly. Raises `RunError` for any other value; the message has its place in
    `state`.
    """
    tensors: dict[str, torch.Tensor] = {}
    values = _pack(state, "state", tensors)
    path.write_bytes(groups.encode(tensors, values))


def read_state(path: Path) -> Any:
    """Read a file that `write_state` wrote. Tuples are returned as lists."""
    tensors, values = groups.decode(path.read_bytes())
    return _unpack(values, tensors)


def _pack(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, Mapping):
        bad_key = next((key for key in value if not isinstance(key, str)), None)
        if bad_key is not None:
            raise RunError(
                f"{place} has the key {bad_key!r}; mappings in state_dict() need text keys"
            )
        return {key: _pack(item, f"{place}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_pack(item, f"{place}[{i}]", tensors) for i, item in enumerate(value)]
    if isinstance(value, np.generic):
        return value.item()
    if is_array_api_obj(value):  # the kind of array is restored
        tensors[place] = torch.as_tensor(value)
        return {ARRAY: [place, "numpy" if isinstance(value, np.ndarray) else "torch"]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise RunError(
        f"{place} is a {type(value).__name__}; state_dict() may contain plain values, numpy arrays "
        f"and tensors"
    )


def _unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {ARRAY}:
            name, kind = value[ARRAY]
            return tensors[name] if kind == "torch" else tensors[name].numpy()
        return {key: _unpack(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    return value


# -- folders of the workers


def get_rank_folder(point: Path, rank: int) -> Path:
    return point / f"rank{rank}"


def list_rank_folders(point: Path) -> list[Path]:
    """Return the folders that the devices wrote in a recovery point, ordered by rank.

    If there was only one device, the result is `[point]`.
    """
    if (point / INTERFACES_FILE).is_file():
        return [point]
    return sorted(point.glob("rank*"), key=lambda path: int(path.name.removeprefix("rank")))


def write_samples(folder: Path, store: TensorStore) -> None:
    """Write all samples in the store to files below `folder`."""
    (folder / STORE_FOLDER).mkdir(parents=True)
    for number, sample in enumerate(store.iterate_batches()):
        (folder / STORE_FOLDER / f"{number}.bin").write_bytes(sample.to_bytes())


def read_samples(folders: Iterable[Path]) -> Iterator[SequenceSample]:
    """Yield the samples that `write_samples` wrote to these folders, in order."""
    for folder in folders:
        paths = (folder / STORE_FOLDER).iterdir() if (folder / STORE_FOLDER).is_dir() else ()
        for path in sorted(paths, key=lambda p: int(p.stem)):
            yield SequenceSample.from_bytes(path.read_bytes())


def read_interfaces(point: Path) -> dict[str, Any]:
    """Return the saved state of each call's interface.

    All ranks of a role have saved the same state, so the state from one of them is used.
    """
    states: dict[str, Any] = {}
    for folder in list_rank_folders(point):
        states = {**read_state(folder / INTERFACES_FILE), **states}
    return states
