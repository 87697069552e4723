"""Runs a Python program in a process of its own, within limits of time, memory, file size and processes.

The limits stop mistakes and endless loops. They are no wall against a program that means harm: it can read what this user can
read. For untrusted models run weft in a container without network.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

# Runs first in the new process: the limits, then the program, then a word that says the program came to its end. Leaving
# early (`sys.exit`, `os._exit`) is thereby no success. The word is no global that a program could read; one that searches
# the interpreter's frames for it still finds it, so rewards of code are to be read with an eye on the samples.
LAUNCHER = """
import json, os, resource, sys

def launch():
    limits, word, out = json.loads(sys.stdin.readline()), sys.stdin.readline().strip(), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    os.dup2(0, 2)
    for name, value in limits.items():
        try:
            resource.setrlimit(getattr(resource, name), (value, value))
        except (ValueError, OSError):
            pass
    with open("program.py", encoding="utf-8") as file:
        code = compile(file.read(), "program.py", "exec")
    exec(code, {"__name__": "__main__"})
    os.write(out, word.encode())

launch()
"""


@dataclass(frozen=True)
class Limits:
    """`seconds` of wall and of processor time; `memory_mb` of address space; `file_mb` of the largest file; `processes` of
    this user while the program runs (the system does not hold root to it)."""

    seconds: float = 5.0
    memory_mb: int = 1024
    file_mb: int = 16
    processes: int = 0

    def as_resources(self) -> dict[str, int]:
        return {
            "RLIMIT_AS": self.memory_mb << 20,
            "RLIMIT_CPU": math.ceil(self.seconds) + 1,
            "RLIMIT_FSIZE": self.file_mb << 20,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_CORE": 0,
        }


def runs_to_its_end(program: str, limits: Limits) -> bool:
    """Whether a Python program compiles, raises nothing and comes to its end within the limits.

    It runs isolated (`python -I`), without environment, in an empty folder that is removed, in a session of its own, which
    is killed at the deadline with all that it started.
    """
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="weft-code-", ignore_cleanup_errors=True) as folder:
        Path(folder, "program.py").write_text(program, encoding="utf-8", errors="surrogatepass")
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", LAUNCHER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(f"{json.dumps(limits.as_resources())}\n{word}\n".encode(), limits.seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
    return said.decode(errors="replace") == word
