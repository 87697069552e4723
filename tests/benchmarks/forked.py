"""Run a module as a program in a process that is forked from one which has imported torch."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from pathlib import Path

from tests.processes import fork_server

DEADLINE = 300.0  # seconds


def run_module(name: str, *words: str, cwd: Path) -> tuple[int, str, str]:
    """`python -m NAME WORDS` in the folder `cwd`: (exit code, standard output, standard error)."""
    folder = Path(tempfile.mkdtemp(prefix="program-"))
    process = fork_server().Process(target=_run, args=(name, words, cwd, folder))
    process.start()
    process.join(DEADLINE)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode, (folder / "out").read_text(), (folder / "err").read_text()


def _run(name: str, words: tuple[str, ...], cwd: Path, folder: Path) -> None:
    for number, stream in ((1, "out"), (2, "err")):
        with (folder / stream).open("w") as file:
            os.dup2(file.fileno(), number)
    os.chdir(cwd)
    sys.path.insert(0, str(cwd))
    sys.argv = [name, *words]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
