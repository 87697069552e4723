"""Two processes with four devices each compute what one device of torch does."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine import layouts
from tests.engine.common import EXACT
from tests.engine.jax.processes import COUNT, measure
from tests.engine.layouts import Case


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
