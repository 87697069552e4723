"""Reading and writing of files with the results of `state_dict`.

The results consist of nested plain values and arrays. Pickle is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from array_api_compat import is_array_api_obj

from weft.data import codec
from weft.errors import RunError

# {ARRAY: [name of the tensor, "numpy" or "torch"]} represents an array
ARRAY = "$array"


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write nested mappings, lists, strings, numbers, NumPy arrays and tensors to a file.

    Floats are stored exactly. Raises `RunError` for any other value; the message says where in
    `state` it is.
    """
    tensors: dict[str, torch.Tensor] = {}
    values = _pack(state, "state", tensors)
    path.write_bytes(codec.encode(tensors, values))


def read_state(path: Path) -> Any:
    """Read a file that `write_state` wrote. Tuples are returned as lists."""
    tensors, values = codec.decode(path.read_bytes())
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
