"""Completion in bash, zsh and fish."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.runs import write_run
from weft.cli import completion
from weft.cli.completion import SHELLS, main

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x07\x08\r]")  # control sequences of terminals
SECONDS = 60.0  # time limit for completions on a busy machine


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """Return a folder with a run, with this source's `weft` on the PATH."""
    write_run(tmp_path / "runs", "first/sft")
    program = tmp_path / "bin" / "weft"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m weft.cli.main "$@"\n')
    program.chmod(0o755)
    source = str(Path(completion.__file__).resolve().parents[2])
    monkeypatch.setenv("PYTHONPATH", source)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def needs(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_says_first_how_to_install_it(shell, capsys):
    assert main([shell]) == 0
    script = capsys.readouterr().out
    assert f"weft completion {shell}" in script.split("\n\n")[0] and script.endswith("\n")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("weft quickstart sft model.dtype=b", ["bfloat16"]),
        slow("weft quick", ["quickstart"]),
        slow("weft quickstart sft model.dty", ["model.dtype="]),
        slow("weft quickstart sft model.path=runs/f", ["runs/first/sft"]),
        slow("weft show ", ["latest", "runs/first/sft", "bin/", "weft.bash"]),
    ],
)
def test_bash(line, offered, home):
    needs("bash")
    main_script = (completion.SCRIPTS / "weft.bash").read_text()
    (home / "weft.bash").write_text(main_script)
    code = f"source weft.bash; COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; _weft; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(
        ["bash", "--norc", "-c", code], capture_output=True, text=True, check=True, timeout=SECONDS
    )
    assert done.stdout.split() == offered


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("weft quickstart sft model.dtype=b", ["model.dtype=bfloat16"]),
        slow("weft quick", ["quickstart"]),
        slow("weft show run", ["runs/first/sft"]),
    ],
)
def test_fish(line, offered, home):
    needs("fish")
    (home / "weft.fish").write_text((completion.SCRIPTS / "weft.fish").read_text())
    code = f"source weft.fish; complete -C '{line}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=SECONDS,
    )
    assert sorted(row.split("\t")[0] for row in done.stdout.splitlines()) == sorted(offered)


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("weft quickstart sft model.dtype=b\t", "model.dtype=bfloat16 "),
        slow("weft quick\t", "weft quickstart "),
        slow("weft quickstart sft model.dty\t", "model.dtype="),
    ],
)
def test_zsh(typed, line, home):
    """Keys are typed into a terminal, because zsh completes only there."""
    needs("zsh")
    (home / "_weft").write_text((completion.SCRIPTS / "weft.zsh").read_text())
    child, terminal = pty.fork()
    if child == 0:
        os.execvp("zsh", ["zsh", "-f", "-i"])
    try:
        setup = "PS1='> '; unsetopt zle_bracketed_paste; autoload -Uz compinit; compinit -u -D; source ./_weft; echo re''ady\n"
        os.write(terminal, setup.encode())
        read_until(terminal, "ready")
        os.write(terminal, typed.encode())
        assert line in read_until(terminal, line)
    finally:
        os.write(terminal, b"\x03\x04exit\n")
        os.close(terminal)
        os.waitpid(child, 0)


def read_until(terminal: int, text: str) -> str:
    """Return the output of the terminal until it has `text` or ends."""
    shown, end = "", time.monotonic() + SECONDS
    while text not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 1.0)[0]:
            shown = CONTROL.sub("", shown + os.read(terminal, 65536).decode(errors="replace"))
    return shown
