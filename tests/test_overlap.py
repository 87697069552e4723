"""Tests that run at the same time: each has its own outcome, and only selected ones are started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CONFTEST = """
from tests import overlap

def pytest_pyfunc_call(pyfuncitem):
    return overlap.run_test(pyfuncitem) or None
"""
TESTS = """
import threading
import pytest

meet = threading.Barrier(2)

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")

@pytest.mark.overlap
@pytest.mark.parametrize("number", [1, 2])
def test_meet(folder, number):
    meet.wait(20)
    assert folder.is_dir() and number == 1, f"number {number} fails"

@pytest.mark.overlap
def test_alone(folder):
    (folder.parent / "alone").touch()

def test_in_turn(folder, tmp_path):
    assert threading.current_thread() is threading.main_thread()
    assert not (folder.parent / "alone").exists()

@pytest.mark.overlap
def test_own_folder(tmp_path):
    pass
"""


def test_overlapping_tests_have_their_own_outcomes(tmp_path: Path, repo: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)

    def run(selected: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", selected, "."],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(repo), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout

    out = run("meet or in_turn")
    assert re.search(r"1 failed, 2 passed", out) and "_ test_meet[2] _" in out, out
    assert "AssertionError: number 2 fails" in out and "threading.py" not in out, out
    assert "test_own_folder: tmp_path is the test's own" in run("own_folder")
