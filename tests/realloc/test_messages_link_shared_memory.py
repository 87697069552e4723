"""Memory that another process sees, or does not."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from weft.realloc import messages

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux has files without a name"
)


def test_another_process_sees_it() -> None:
    laid = messages.SharedMemoryBuffer(32)
    laid.memory.copy_(torch.arange(32, dtype=torch.uint8))
    code = (
        f"from weft.realloc import messages; found = messages.map_buffer({laid.address}); "
        "print(found.tolist()); found[3] = 77"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(list(range(32)))
    assert laid.memory[3] == 77
    laid.close_descriptor()


def test_what_cannot_be_seen() -> None:
    laid = messages.SharedMemoryBuffer(32)
    pid, file, size, token = laid.address
    assert messages.map_buffer((pid, file, size, token + 1)) is None
    assert messages.map_buffer((pid, file, size + 8, token)) is None
    assert messages.map_buffer((2**22 + 1, file, size, token)) is None
    laid.close_descriptor()
    assert messages.map_buffer(laid.address) is None
