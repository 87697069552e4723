"""File layout of the workers' state in a recovery point.

If there is only one device, it writes into the directory of the recovery point. If there are
several, each writes into its own folder there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from weft.data.sample import SequenceSample
from weft.runtime.state import read_state
from weft.runtime.store import TensorStore

ENGINES_FOLDER = "engines"
INTERFACES_FILE = "interfaces.bin"
STORE_FOLDER = "store"
NUMERICS_FILE = "numerics.bin"
DRIVER_FOLDER = "driver"  # with several devices: the driver's rows and outputs of host functions


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
        held = (folder / STORE_FOLDER).iterdir() if (folder / STORE_FOLDER).is_dir() else ()
        for path in sorted(held, key=lambda p: int(p.stem)):
            yield SequenceSample.from_bytes(path.read_bytes())


def read_interfaces(point: Path) -> dict[str, Any]:
    """Return the saved state of each call's interface.

    All ranks of a role have saved the same state, so the state from one of them is used.
    """
    states: dict[str, Any] = {}
    for folder in list_rank_folders(point):
        states = {**read_state(folder / INTERFACES_FILE), **states}
    return states
