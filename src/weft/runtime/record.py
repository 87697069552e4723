"""Record of the processes that worked on a run, kept in the file `run.json`."""

from __future__ import annotations

import json
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from weft import __version__
from weft.observe.run_files import RECORD, RunRecord, RunStart
from weft.redaction import mask_words
from weft.runtime import disk

LIBRARIES = ("torch", "transformers")
GIT_SECONDS = 5.0


def record_process(
    run: Path, *, step: int, total_steps: int | None, hardware: str, chosen: Sequence[str] = ()
) -> None:
    """Add this process to the run's file `run.json`.

    `step` is the number of completed steps, and `chosen` lists the options whose values weft chose.
    Secrets in the command are masked.
    """
    before = RunRecord.read(run)
    command = build_command(sys.argv, sys.orig_argv)
    start = RunStart(
        time=time.time(),
        step=step,
        command=mask_words(command),
        folder=str(Path.cwd()),
        host=socket.gethostname(),
        hardware=hardware,
        commit=read_commit(Path(__file__).resolve().parents[3]),
        versions=read_versions(),
    )
    record = replace(
        before,
        algorithm=parse_quickstart(command) or before.algorithm,
        total_steps=total_steps,
        chosen=list(chosen),
        starts=[*before.starts, start],
    )
    disk.write_text(
        run / RECORD, json.dumps(record.to_plain(), indent=1, ensure_ascii=False) + "\n"
    )


def build_command(words: Sequence[str], original: Sequence[str]) -> list[str]:
    """Return the command that starts this process again, beginning with `weft` or `python`.

    `words` is `sys.argv`, and `original` is `sys.orig_argv`. A program given by `python -c` is
    replaced by "...".
    """
    if words and Path(words[0]).name == "weft":
        return ["weft", *words[1:]]
    given = list(original[1:])
    if "-c" in given:  # leave out a program on the command line: it can be long
        return ["python", *given[: given.index("-c") + 1], "..."]
    return ["python", *given]


def parse_quickstart(command: Sequence[str]) -> str | None:
    """Return NAME if the command is `weft quickstart NAME`, otherwise None."""
    words = list(command)
    if words[:1] == ["weft"] and words[1:2] == ["quickstart"]:
        rest = words[2:]
    elif words[1:3] == ["-m", "weft.apps.quickstart"]:
        rest = words[3:]
    else:
        return None
    names = []
    while rest:
        word = rest.pop(0)
        if word in ("--import", "--config", "--config-dir", "--cfg"):
            rest = rest[1:]
        elif not word.startswith("-") and "=" not in word:
            names.append(word)
    return names[0] if names else None


def read_versions() -> dict[str, str]:
    """Return the versions of Python, weft, torch and transformers."""
    versions = {"weft": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def read_commit(folder: Path) -> str:
    """Return the abbreviated git commit of the checkout at `folder`, or "" if it cannot be read.

    A `+` is appended if tracked files are modified.
    """
    if not (folder / ".git").exists():
        return ""
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(folder), *words],
                capture_output=True,
                text=True,
                timeout=GIT_SECONDS,
                check=True,
            ).stdout.strip()
            for words in (
                ["rev-parse", "--short=12", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no"],
            )
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{commit}+" if changes else commit
