"""Where in a recovery point its workers' state lies: one device's beside its engines, of many
devices in a folder each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from weft.data.sample import SequenceSample
from weft.runtime.state import read_state
from weft.runtime.store import TensorStore

ENGINES = "engines"
INTERFACES = "interfaces.bin"
STORE = "store"
NUMERICS = "numerics.bin"
DRIVER = "driver"  # rows and what host functions made, of many devices


def rank_folder(point: Path, rank: int) -> Path:
    return point / f"rank{rank}"


def rank_folders(point: Path) -> list[Path]:
    """The folder of every device, by rank: `point` itself where one device wrote it."""
    if (point / INTERFACES).is_file():
        return [point]
    return sorted(point.glob("rank*"), key=lambda path: int(path.name.removeprefix("rank")))


def write_samples(folder: Path, store: TensorStore) -> None:
    """Every tensor that an id still needs."""
    (folder / STORE).mkdir(parents=True)
    for number, sample in enumerate(store.batches()):
        (folder / STORE / f"{number}.bin").write_bytes(sample.to_bytes())


def read_samples(folders: Iterable[Path]) -> Iterator[SequenceSample]:
    """What `write_samples` wrote, in its order."""
    for folder in folders:
        held = (folder / STORE).iterdir() if (folder / STORE).is_dir() else ()
        for path in sorted(held, key=lambda p: int(p.stem)):
            yield SequenceSample.from_bytes(path.read_bytes())


def read_interfaces(point: Path) -> dict[str, Any]:
    """The state of every call's interface; all ranks of a role have the same."""
    states: dict[str, Any] = {}
    for folder in rank_folders(point):
        states = {**read_state(folder / INTERFACES), **states}
    return states
