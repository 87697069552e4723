"""Folders of processes that were killed are removed, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

import pytest

from weft.runtime.machines import ScratchFolder, remove_leftovers

MAKE = "from weft.runtime.machines import ScratchFolder; s = ScratchFolder(); print(s.path, flush=True); input()"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_stays(folder):
    (folder / "weft-1-other").mkdir()  # nobody knows whose it is
    mine = ScratchFolder()
    assert mine.path.name.startswith(f"weft-{os.getpid()}-")
    line = [sys.executable, "-c", MAKE]
    other = subprocess.Popen(
        line, env={**os.environ, "TMPDIR": str(folder)}, stdin=-1, stdout=-1, text=True
    )
    assert other.stdout is not None
    theirs = other.stdout.readline().strip()
    assert remove_leftovers() == []
    other.send_signal(signal.SIGKILL)
    other.communicate()
    assert [str(path) for path in remove_leftovers()] == [theirs]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["weft-1-other", mine.path.name]
    )
    mine.remove()
    assert not mine.path.exists()
