"""Bit-exact storage of an engine's tensors (safetensors) and plain values (JSON), without pickle."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from weft.checkpoints.weight_files import StoredTensor, read_header
from weft.errors import CheckpointError, RunError
from weft.topology import Slice
from weft.writing import write

PLACES = "places"  # metadata key: slice of the whole tensor for each tensor, as JSON


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], places: Mapping[str, Slice] | None = None
) -> None:
    """Write tensors from any device to a safetensors file.

    If the tensors are slices of larger tensors, `places` maps each name to its slice; None means
    that all tensors are whole. Raises `RunError` if writing fails.
    """
    held = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    try:
        save_file(held, path, None if places is None else format_places(places))
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{path} could not be written ({error}); what was saved before is untouched"
        ) from error


def format_places(places: Mapping[str, Slice]) -> dict[str, str]:
    """Return the metadata of a file whose tensors are these slices of larger tensors."""
    ends = {name: [[part.start, part.stop] for part in place] for name, place in places.items()}
    return {PLACES: json.dumps(ends)}


class SavedTensors:
    """Reader of tensors that were saved by one process, or in slices by several ranks.

    One process writes the file `{stem}.safetensors`; several ranks, or devices of JAX, write one
    file `{stem}-{rank}.safetensors` each. `names` are the names of all tensors. Raises `CheckpointError`
    for files that are missing or truncated.
    """

    def __init__(self, directory: Path, stem: str) -> None:
        files = sorted(directory.glob(f"{stem}*.safetensors")) or [
            directory / f"{stem}.safetensors"
        ]
        self._directory = directory
        self._pieces: dict[str, list[tuple[StoredTensor, Slice | None]]] = {}
        for file in files:
            try:
                tensors, metadata = read_header(file)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{file} cannot be read ({error}); it is missing or was cut short"
                ) from error
            places = json.loads(metadata.get(PLACES, "{}"))
            for name, stored in sorted(tensors.items()):
                place = tuple(slice(*ends) for ends in places[name]) if name in places else None
                self._pieces.setdefault(name, []).append((stored, place))
        self.names = list(self._pieces)

    def read(self, name: str, where: Slice | None) -> Tensor:
        """Read the slice `where` of the tensor `name` into CPU memory.

        If `where` is None, or if the saved tensor is a scalar, the whole tensor is returned.
        """
        pieces = self._pieces[name]
        first, place = pieces[0]
        if where is None or not first.shape:
            return first.read()
        if place is None:  # a tensor of another model may be smaller
            sizes = zip(where, first.shape, strict=True)
            return first.read(
                tuple(slice(min(part.start, n), min(part.stop, n)) for part, n in sizes)
            )
        tensor: Tensor | None = None
        missing = math.prod(part.stop - part.start for part in where)
        for stored, place in pieces:
            assert place is not None
            common = []
            for a, b in zip(where, place, strict=True):
                common.append(slice(max(a.start, b.start), min(a.stop, b.stop)))
            if any(part.start >= part.stop for part in common):
                continue
            part = stored.read(tuple(_from(c, p) for c, p in zip(common, place, strict=True)))
            if tensor is None:
                tensor = part.new_empty([part.stop - part.start for part in where])
            tensor[tuple(_from(c, w) for c, w in zip(common, where, strict=True))] = part
            missing -= part.numel()
        if tensor is None or missing:
            raise CheckpointError(
                f"{self._directory}: a slice of {name!r} was not saved; a rank's file is missing"
            )
        return tensor


def _from(part: slice, origin: slice) -> slice:
    return slice(part.start - origin.start, part.stop - origin.start)


def write_values(path: Path, values: Mapping[str, Any]) -> None:
    """Write `values` to a JSON file.

    Floats are saved exactly, because Python writes the shortest decimal string that is parsed to
    the same float.
    """
    try:
        write(path, json.dumps(values, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise RunError(
            f"{path} could not be written ({error}); what was saved before is untouched"
        ) from error


def read_values(path: Path, *, trained: bool) -> dict[str, Any]:
    """Return the values of a role's state that `write_values` wrote.

    Raises `CheckpointError` for a missing or damaged file, and if a role that is `trained` reads
    the state of a frozen role, or the reverse.
    """
    try:
        values = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); it is missing or was cut short"
        ) from error
    assert isinstance(values, dict)
    if ("optimizer" in values) != trained:
        raise CheckpointError(
            f"{path.parent}: the state belongs to a role that is {'not ' if trained else ''}trained"
        )
    return values
