"""Run a benchmark as a program in a forked process, which has imported torch, and so are its sides,
runs and devices.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks import pairs
from tests.processes import fork_server, inherit_fork_server
from tests.runtime.forked_devices import ForkedLaunch, fork_devices
from weft.observe.memory import keep_freed_memory

DEADLINE = 600.0  # seconds


def run_module(name: str, *words: str, cwd: Path) -> tuple[int, str, str]:
    """`python -m NAME WORDS` in the folder `cwd`: (exit code, standard output, standard error)."""
    folder = Path(tempfile.mkdtemp(prefix="program-"))
    process = fork_server().Process(target=_run, args=(name, words, cwd, dict(os.environ), folder))
    process.start()
    process.join(DEADLINE)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode, (folder / "out").read_text(), (folder / "err").read_text()


def _run(
    name: str, words: tuple[str, ...], cwd: Path, environment: dict[str, str], folder: Path
) -> None:
    for number, stream in ((1, "out"), (2, "err")):
        with (folder / stream).open("w") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path.insert(0, str(cwd))
    sys.argv = [name, *words]
    inherit_fork_server()
    pairs.CONTEXT = fork_server()
    patch = pytest.MonkeyPatch()
    fork_devices(patch.setattr)
    # which benchmarks.runtime calls itself
    patch.setattr("weft.launch.cluster.launch_devices", ForkedLaunch)
    # which benchmarks.plan calls first in the process of a run
    patch.setattr("weft.observe.memory.keep_freed_memory", _prepare_run)
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _prepare_run() -> None:
    """Let a run in a process of its own fork its devices, too."""
    inherit_fork_server()
    fork_devices(pytest.MonkeyPatch().setattr)
    keep_freed_memory()
