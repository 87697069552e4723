"""Weight files: every readable format, and files with missing, shared or additional bytes."""

from __future__ import annotations

import json
import os
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from weft.checkpoints import weight_files
from weft.checkpoints.weight_files import WeightFiles, write_safetensors, write_text
from weft.errors import CheckpointError, UserError


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = {
        "a.weight": torch.randn(3, 4, generator=generator),
        "b": torch.randn(5, generator=generator).bfloat16(),
    }
    return made | {
        "c.bias": torch.randn(2, 2, generator=generator).half(),
        "d.tied": made["a.weight"].T,
    }


def same(files: WeightFiles, wanted: dict[str, torch.Tensor]) -> None:
    assert sorted(files.names) == sorted(wanted)
    for name, tensor in wanted.items():
        read = files.read(name)
        assert read.dtype == tensor.dtype and torch.equal(read, tensor), name
        assert files.get_shape(name) == tuple(tensor.shape)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_both_forms_of_pickled_weights_are_read(
    tmp_path: Path, zipped: bool, sharded: bool
) -> None:
    wanted = tensors()
    parts = {"pytorch_model.bin": list(wanted)}
    if sharded:
        parts = {"one.bin": ["a.weight", "d.tied"], "two.bin": ["b", "c.bias"]}
        places = {name: file for file, names in parts.items() for name in names}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    for file, names in parts.items():
        torch.save(
            {n: wanted[n] for n in names}, tmp_path / file, _use_new_zipfile_serialization=zipped
        )
    same(WeightFiles(tmp_path), wanted)


class Harmful:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_no_form_runs_code(tmp_path: Path, zipped: bool) -> None:
    values = {"a": torch.ones(2), "b": Harmful(tmp_path / "made")}
    torch.save(values, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="holds more than tensors and is not loaded"):
        WeightFiles(tmp_path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("left", [0, 3, 100, -20])
def test_a_pickled_file_that_is_cut_short_is_refused(
    tmp_path: Path, zipped: bool, left: int
) -> None:
    torch.save(tensors(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    content = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(content[:left])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        WeightFiles(tmp_path)


def rewritten(content: bytes, change: Any) -> bytes:
    """Return the content of a safetensors file with a changed header and the same tensor bytes."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def shift(header: dict[str, Any], name: str, by: int) -> None:
    header[name]["data_offsets"] = [each + by for each in header[name]["data_offsets"]]


WRONG = {
    "trailing bytes": (lambda c: c + b"\0", "1 bytes behind the last tensor belong to none"),
    "another file appended": (lambda c: c + c, "bytes behind the last tensor belong to none"),
    "a tensor that is not listed": (lambda c: rewritten(c, lambda h: h.pop("b")), "belong to no"),
    "no tensor listed": (
        lambda c: rewritten(c, dict.clear),
        "bytes behind the last tensor belong to none",
    ),
    "a hole": (
        lambda c: rewritten(c + b"\0" * 8, lambda h: [shift(h, n, 8) for n in ("a", "b")]),
        "8 bytes between the header and",
    ),
    "an overlap": (
        lambda c: rewritten(
            c, lambda h: h["b"].update(data_offsets=h["a"]["data_offsets"], shape=h["a"]["shape"])
        ),
        "lie in the same bytes",
    ),
    "other sizes": (
        lambda c: rewritten(c, lambda h: h["a"].update(shape=[4, 4])),
        "takes 64 bytes, and the header gives it",
    ),
    "backward offsets": (
        lambda c: rewritten(c, lambda h: h["a"]["data_offsets"].reverse()),
        "the header is damaged",
    ),
    "negative offsets": (
        lambda c: rewritten(c, lambda h: shift(h, "a", -100)),
        "the header is damaged",
    ),
    "a fraction": (
        lambda c: rewritten(c, lambda h: h["a"].update(shape=[3.0, 4])),
        "the header is damaged",
    ),
    "notes that are no texts": (
        lambda c: rewritten(c, lambda h: h.update(__metadata__={"a": 1})),
        "__metadata__ is not a mapping",
    ),
    "cut short": (lambda c: c[:-1], "is truncated"),
}


@pytest.mark.parametrize("what", WRONG)
def test_every_byte_of_a_safetensors_file_belongs_to_one_tensor(tmp_path: Path, what: str) -> None:
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(
        {"a": torch.ones(3, 4), "b": torch.zeros(5)}, file, {"format": "pt"}
    )
    change, told = WRONG[what]
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CheckpointError, match=told):
        WeightFiles(tmp_path)
    with pytest.raises(Exception):  # noqa: B017  the library refuses it too
        safetensors.torch.load_file(file)


def test_a_sound_file_with_empty_tensors_and_scalars_is_read(tmp_path: Path) -> None:
    wanted = {
        "a": torch.zeros(0, 3),
        "b": torch.tensor(2.0),
        "c": torch.ones(2),
        "d": torch.zeros(0),
    }
    write_safetensors(tmp_path / "model.safetensors", wanted)
    same(WeightFiles(tmp_path), wanted)


def test_weights_are_written_through_links_and_over_no_device(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("elsewhere.safetensors")
    write_safetensors(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    assert (tmp_path / "model.safetensors").is_symlink()
    same(WeightFiles(tmp_path), {"a": torch.ones(2)})
    assert stat.S_IMODE((tmp_path / "elsewhere.safetensors").stat().st_mode) == 0o666 & ~_umask()
    (tmp_path / "device").symlink_to("/dev/full")
    for write in (
        lambda path: write_safetensors(path, {"a": torch.ones(2)}),
        lambda path: write_text(path, "{}"),
    ):
        with pytest.raises(UserError, match="is a pipe or a device, and weft writes files"):
            write(tmp_path / "device")
    assert stat.S_ISCHR((tmp_path / "device").stat().st_mode)


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def test_shards_are_written_with_one_tensor_in_memory(tmp_path: Path) -> None:
    """Element sizes, empty tensors and scalars are mixed; the file has another order."""
    wanted = {
        "odd": torch.arange(3, dtype=torch.int8),
        "b": torch.randn(5, 7).bfloat16(),
        "a": torch.randn(4, 3, dtype=torch.float64).T,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
    }
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def give() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name, tensor in wanted.items():
            copy = tensor.clone()
            alive.append(weakref.ref(copy))
            most = max(most, sum(each() is not None for each in alive))
            yield name, copy
            del copy

    layouts = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in wanted.items()}
    for limit, files in ((10**9, 1), (80, 3)):
        folder = tmp_path / str(limit)
        folder.mkdir()
        weight_files.write(folder, give(), layouts, shard_bytes=limit)
        assert len(list(folder.glob("*.safetensors"))) == files
        same(WeightFiles(folder), wanted)
        for file in folder.glob("*.safetensors"):
            for name, tensor in safetensors.torch.load_file(file).items():
                assert torch.equal(tensor, wanted[name]) and tensor.dtype == wanted[name].dtype
    assert most == 1
