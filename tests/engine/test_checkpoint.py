"""A saved tensor is read in slices, whoever saved it: one process, or several ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from weft.engine.checkpoint import SavedTensors, write_tensors
from weft.errors import CheckpointError

WHOLE = torch.arange(48.0).reshape(6, 8)
SLICES = [
    (slice(0, 6), slice(0, 8)),
    (slice(1, 4), slice(2, 5)),
    (slice(2, 6), slice(0, 8)),
    (slice(3, 3), slice(0, 8)),
]


def saved_by_ranks(folder: Path) -> None:
    for rank, rows in enumerate((slice(0, 2), slice(2, 6))):
        write_tensors(
            folder / f"state-{rank:05d}.safetensors",
            {"w": WHOLE[rows], f"step{rank}": torch.tensor(3)},
            {"w": (rows, slice(0, 8)), f"step{rank}": ()},
        )


@pytest.mark.parametrize("where", SLICES[:3])
def test_slices_of_what_ranks_saved(tmp_path: Path, where: tuple[slice, slice]) -> None:
    saved_by_ranks(tmp_path)
    saved = SavedTensors(tmp_path, "state")
    assert saved.names == ["step0", "w", "step1"]
    assert torch.equal(saved.read("w", where), WHOLE[where])
    assert saved.read("step1", ()) == saved.read("step0", None) == 3


@pytest.mark.parametrize("where", [*SLICES, None])
def test_slices_of_what_one_process_saved(
    tmp_path: Path, where: tuple[slice, slice] | None
) -> None:
    write_tensors(tmp_path / "state.safetensors", {"w": WHOLE, "step": torch.tensor(3)})
    saved = SavedTensors(tmp_path, "state")
    assert torch.equal(saved.read("w", where), WHOLE if where is None else WHOLE[where])
    assert saved.read("step", ()) == 3


def test_a_slice_of_a_larger_model_has_the_size_of_what_is_there(tmp_path: Path) -> None:
    write_tensors(tmp_path / "state.safetensors", {"w": WHOLE, "x": WHOLE + 1})
    saved = SavedTensors(tmp_path, "state")
    assert torch.equal(saved.read("w", (slice(4, 9), slice(0, 16))), WHOLE[4:])


def test_a_file_of_a_rank_is_missing(tmp_path: Path) -> None:
    saved_by_ranks(tmp_path)
    (tmp_path / "state-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="a rank's file is missing"):
        SavedTensors(tmp_path, "state").read("w", SLICES[0])
    with pytest.raises(CheckpointError, match="it is missing or was cut short"):
        SavedTensors(tmp_path, "other")


def test_a_file_that_becomes_shorter_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    write_tensors(file, {"w": WHOLE})
    saved = SavedTensors(tmp_path, "state")
    os.truncate(file, file.stat().st_size - 4)
    with pytest.raises(CheckpointError, match="ended while w was read"):
        saved.read("w", None)
