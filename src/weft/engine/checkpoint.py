"""Tensors and plain values on disk, exactly: safetensors and JSON, never pickle. Used for an engine's recoverable state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.errors import CheckpointError, RunError


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors as they are, from whatever device. Raises `RunError` where the disk does not take them."""
    whole = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    try:
        save_file(whole, path)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} could not be written ({error}); what was saved before is untouched") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """What `write_tensors` wrote, on the CPU. Raises `CheckpointError` for a missing or truncated file."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); it is missing or was cut short") from error


def write_values(path: Path, values: Mapping[str, Any]) -> None:
    """Write JSON values. Floats survive exactly: Python writes the shortest text that reads back as the same number."""
    try:
        path.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise RunError(f"{path} could not be written ({error}); what was saved before is untouched") from error


def read_values(path: Path) -> dict[str, Any]:
    """What `write_values` wrote. Raises `CheckpointError` for a missing or broken file."""
    try:
        values = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); it is missing or was cut short") from error
    assert isinstance(values, dict)
    return values
