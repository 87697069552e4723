"""Files of a recovery point: the results of `state_dict`, and the layout of the workers' state.

The results of `state_dict` consist of nested plain values and arrays. Pickle is not used. If there is
only one device, it writes into the directory of the recovery point. If there are several, each
writes into its own folder there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from array_api_compat import is_array_api_obj

from weft.data import groups
from weft.data.sample import SequenceSample
from weft.errors import RunError
from weft.runtime.store import TensorStore

# {ARRAY: [name of the tensor, "numpy" or "torch"]} represents an array
ARRAY = "$array"
ENGINES_FOLDER = "engines"
INTERFACES_FILE = "interfaces.bin"
STORE_FOLDER = "store"
NUMERICS_FILE = "numerics.bin"
DRIVER_FOLDER = "driver"  # with several devices: the driver's rows and outputs of host functions


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write nested mappings, lists, strings, numbers, NumPy arrays and tensors to a file.

    Floats are stored exactly. Raises `RunError` for any other value; the message says where in
    `state` it is.
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
        wrong = next((key for key in value if not isinstance(key, str)), None)
        if wrong is not None:
            raise RunError(
                f"{place} has the key {wrong!r}; mappings in state_dict() need text keys"
            )
        return {key: _pack(each, f"{place}.{key}", tensors) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_pack(each, f"{place}[{i}]", tensors) for i, each in enumerate(value)]
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
        return {key: _unpack(each, tensors) for key, each in value.items()}
    if isinstance(value, list):
        return [_unpack(each, tensors) for each in value]
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
