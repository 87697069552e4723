"""Two processes with four devices each compute what one device of torch does."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engine import layouts
from tests.engine.common import EXACT
from tests.engine.jax.processes import COUNT, measure
from tests.engine.layouts import Case
from weft.engine.checkpoint import SavedTensors
from weft.engine.torch.engine import OPTIMIZER, PARAMETERS
from weft.topology import build_whole_slice


@pytest.mark.slow
def test_two_processes_are_as_one(tmp_path: Path) -> None:
    layouts.write_model(Case(), tmp_path / "hf")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    words = [sys.executable, "-m", "tests.engine.jax.processes", coordinator]
    processes = [
        subprocess.Popen([*words, str(process), str(tmp_path)]) for process in range(COUNT)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0] * COUNT
    wanted = measure(tmp_path, "torch")
    for process in range(COUNT):
        found = torch.load(tmp_path / f"found-{process}.pt", weights_only=True)
        assert found["tokens"] == wanted["tokens"]
        torch.testing.assert_close(
            torch.tensor(found["steps"]), torch.tensor(wanted["steps"]), rtol=1e-10, atol=0
        )
        for key in ("scores", "parameters"):
            torch.testing.assert_close(found[key], wanted[key], **EXACT)
        assert all(torch.equal(found["parameters"][k], v) for k, v in found["loaded"].items())
    check_shards(tmp_path)


def check_shards(folder: Path) -> None:
    """Compare the files of all devices with those that the first process wrote alone."""
    for stem in (PARAMETERS, OPTIMIZER):
        whole = SavedTensors(folder / "state-whole", stem)
        shards = SavedTensors(folder / "state-jax", stem)
        assert sorted(shards.names) == sorted(whole.names)
        for name in whole.names:
            values = whole.read(name, None)
            everything = build_whole_slice(values.shape)
            assert torch.equal(shards.read(name, everything), values), name
        files = sorted((folder / "state-jax").glob(f"{stem}-*.safetensors"))
        devices = {int(file.stem.rpartition("-")[2]) for file in files}
        assert min(devices) < 4 <= max(devices), "both processes write"
        elements = sum(
            tensor.numel() for file in files for tensor in load_file(file).values() if tensor.ndim
        )
        (alone,) = (folder / "state-whole").glob(f"{stem}*.safetensors")
        assert elements == sum(each.numel() for each in load_file(alone).values() if each.ndim)
    assert not list((folder / "state-jax").glob(".*")), "the mark is removed"
