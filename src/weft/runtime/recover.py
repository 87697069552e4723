"""Cuts: what a restart needs, written between steps with nothing in flight. The last two are kept.

`recover/step{N}.tmp` is filled, flushed and renamed to `recover/step{N}`; then `recover/step{N}.json`, the manifest with the
checksum of every file, makes it count. A cut without a manifest never was one; a damaged one gives way to the one before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weft.errors import CheckpointError
from weft.runtime import disk

KEPT = 2
STEP = re.compile(r"step(\d+)")


@dataclass(frozen=True)
class Cut:
    """One restart point: everything after `step` completed steps."""

    step: int
    directory: Path

    @property
    def manifest(self) -> Path:
        return self.directory.with_name(self.directory.name + ".json")


class Cuts:
    """The cuts of one run, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, step: int, fill: Callable[[Path], None]) -> Cut:
        """Make the cut after `step` steps; `fill` writes into an empty directory. Older cuts than the last two go.

        Raises `RunError` where the disk does not take it; the cuts before it stay.
        """
        cut = Cut(step, self._folder / f"step{step}")
        self._folder.mkdir(parents=True, exist_ok=True)
        cut.manifest.unlink(missing_ok=True)
        disk.write_directory(cut.directory, fill)
        disk.write_text(cut.manifest, json.dumps({"step": step, "files": disk.checksums(cut.directory)}, indent=1))
        for old in self.found()[KEPT:]:
            old.manifest.unlink()
            disk.remove(old.directory)
        return cut

    def found(self) -> list[Cut]:
        """Every cut that has its manifest, newest first; unchecked."""
        steps = [match for path in self._folder.glob("step*") if (match := STEP.fullmatch(path.name))]
        cuts = [Cut(int(match[1]), self._folder / match[0]) for match in steps]
        return sorted((cut for cut in cuts if cut.manifest.is_file()), key=lambda cut: -cut.step)

    def newest(self, note: Callable[[str], None]) -> Cut | None:
        """The newest cut whose files are what its manifest says; `note` hears of each that is passed over."""
        for cut in self.found():
            wrong = damage(cut)
            if wrong is None:
                return cut
            note(f"the cut at step {cut.step} is damaged ({wrong}); going back to the one before")
        return None

    def drop_after(self, step: int) -> None:
        """Remove cuts beyond `step`: the run goes on from there and makes its own."""
        for cut in self.found():
            if cut.step > step:
                cut.manifest.unlink()
                disk.remove(cut.directory)

    def mend(self) -> None:
        """Remove what a killed process left half-done."""
        disk.mend(self._folder)
        whole = {cut.directory.name for cut in self.found()}
        for path in self._folder.glob("step*"):
            if path.name.removesuffix(".json") not in whole:
                disk.remove(path)


def damage(cut: Cut) -> str | None:
    """What is wrong with a cut's files, or None."""
    try:
        expected = json.loads(cut.manifest.read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{cut.manifest.name} cannot be read"
    missing = [name for name in expected if not (cut.directory / name).is_file()]
    if missing:
        return f"{missing[0]} is missing"
    wrong = [name for name, sum in expected.items() if disk.checksum(cut.directory / name) != sum]
    return f"{wrong[0]} has other bytes than were written" if wrong else None


def named_cut(path: Path) -> Cut:
    """The cut that `resume_from` names: a cut, a checkpoint of the same step, or a run (its newest whole one).

    Raises `CheckpointError` where there is none, saying which there are.
    """
    path = path.expanduser()
    if not path.exists():
        raise CheckpointError(f"resume_from={str(path)!r}: there is no such directory")
    run = next((p for p in (path, *path.parents) if (p / "config.yaml").is_file()), None)
    cuts = Cuts(run / "recover") if run else None
    found = cuts.found() if cuts else []
    there = ", ".join(f"step{cut.step}" for cut in found) or "none"
    if run is None or not found:
        raise CheckpointError(
            f"resume_from={str(path)!r}: no run of weft with a cut to go on from; to start from its weights alone, give the "
            "directory as the model's path"
        )
    match = STEP.fullmatch(path.name)
    chosen = [cut for cut in found if match is None or cut.step == int(match[1])]
    for cut in chosen:
        if damage(cut) is None:
            return cut
    raise CheckpointError(
        f"resume_from={str(path)!r}: the run has no whole cut of that step (cuts: {there}); name one of these, or give the "
        "directory as the model's path to start from its weights alone"
    )
