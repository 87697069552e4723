"""Runs on several devices, for tests: hooks that sleep or die in a device, and commands whose
processes are counted.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from functools import cache
from pathlib import Path
from typing import Any

from tests.environment import copy as copy_environment
from tests.processes import run_weft

HOOKS = '''
import ctypes
import os
import random
import signal
import threading
import time

from weft import register_function


@register_function("nap")
def nap(model, seconds=0.3):
    time.sleep(seconds)


@register_function("die")
def die(model, step, flag=None):
    """Once: the file `flag` says that it was done; again and again where no flag is given."""
    if model.step == step and not (flag and os.path.exists(flag)):
        if flag:
            open(flag, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


DOOMED = []


@register_function("perish")
def perish(model, seed, folder, times=3):
    """Kill this process up to a second later, in whatever call it is then; in steps drawn at random, and `times` in all."""
    done, draw = os.listdir(folder), random.Random(f"{seed}, {folder[-1]}, {model.step}")
    if not DOOMED and len(done) < times and str(model.step) not in done and draw.random() < 0.4:
        DOOMED.append(model.step)  # one death a process, so that deaths can be counted by restarts
        open(os.path.join(folder, str(model.step)), "w").close()
        threading.Timer(draw.random(), os.kill, (os.getpid(), signal.SIGKILL)).start()


@register_function("hang")
def hang(model, step, flag):
    """Once, as `die`; until the file `flag`.go is there."""
    if model.step == step and not os.path.exists(flag):
        with open(flag, "w") as file:
            file.write("hangs")
        end = time.monotonic() + 3600
        while not os.path.exists(f"{flag}.go") and time.monotonic() < end:
            time.sleep(0.05)


@register_function("count_threads")
def count_threads(model, folder):
    import torch

    with open(os.path.join(folder, str(os.getpid())), "w") as file:
        file.write(str(torch.get_num_threads()))


@register_function("count_arenas")
def count_arenas(model, folder):
    """Write the state of malloc (`malloc_info`) into a file that is named by this process."""
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    file = ctypes.c_void_p(libc.fopen(os.path.join(folder, str(os.getpid())).encode(), b"w"))
    libc.malloc_info(0, file)
    libc.fclose(file)


@register_function("fail")
def fail(model, step):
    if model.step == step:
        raise ValueError("out of luck")
'''
CLOCKS = (
    "step_seconds",
    "peak_memory_gb",
    "tokens_per_second",
    "mfu",
    "cached_fraction",
    "num_bytes_moved",
    "num_weight_bytes",
    "peak_bytes",
)


def write_hooks(folder: Path) -> Path:
    """A link to one file of this process, which imports it once for all test modules."""
    path = folder / "placed_hooks.py"
    path.symlink_to(_hooks())
    return path


def count_arenas(folder: Path) -> dict[int, int]:
    """Return how many arenas malloc had in each process that ran the hook `count_arenas`, by id."""
    texts = {int(path.name): path.read_text() for path in folder.iterdir()}
    return {process: text.count("<heap nr=") for process, text in texts.items()}


@cache
def _hooks() -> Path:
    path = Path(tempfile.mkdtemp(prefix="placed-")) / "placed_hooks.py"
    path.write_text(HOOKS)
    return path


def timeless(path: Path) -> list[dict[str, Any]]:
    """Metrics without times, memory, and what was moved between devices."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            k: v
            for k, v in line.items()
            if not k.startswith(("time/", "predicted/")) and k.rsplit("/", 1)[-1] not in CLOCKS
        }
        for line in lines
    ]


class Command:
    """`weft quickstart WORDS` in a process of its own; everything that it starts carries a mark in
    its environment. Of `environment` it has what is not None beside.
    """

    def __init__(self, *words: str, cwd: Path, **environment: str | None) -> None:
        self.mark = f"weft-{uuid.uuid4().hex}"
        asked = {
            **copy_environment(),
            "OMP_NUM_THREADS": "1",
            "WEFT_TEST_MARK": self.mark,
            **environment,
        }
        environment = {name: value for name, value in asked.items() if value is not None}
        line = [sys.executable, "-m", "weft.cli.main", "quickstart", *words]
        self.process = subprocess.Popen(
            line,
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._printed = ""

    def end(self, seconds: float = 600.0) -> tuple[int, str]:
        """(exit code, all that it printed)."""
        try:
            out, _ = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, self._printed + out

    def says(self, text: str) -> None:
        """Wait until it has printed a line with the text."""
        assert self.process.stdout is not None
        while text not in self._printed:
            line = self.process.stdout.readline()
            assert line, f"it ended without {text!r}:\n{self._printed}"
            self._printed += line

    def after(self, path: Path, seconds: float = 600.0) -> None:
        """Wait until there is something in a file."""
        end = time.monotonic() + seconds
        while not (path.is_file() and path.stat().st_size):
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < end, f"{path} did not come"
            time.sleep(0.05)

    def processes(self) -> dict[int, str]:
        """Command lines of the processes that carry the mark."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (
                        (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    )
            except OSError:
                continue
        return found

    def left(self) -> list[str]:
        return list(self.processes().values())

    def kill(self, sign: str, draw: random.Random | None = None) -> int:
        """One of the processes whose command line has the sign, by SIGKILL; how many there were."""
        found = sorted(pid for pid, line in self.processes().items() if sign in line)
        if found:
            os.kill((draw or random).choice(found), signal.SIGKILL)
        return len(found)

    def none_left(self, seconds: float = 600.0) -> bool:
        """Whether all of them are gone, soon at least: helpers of a Ray that was killed give up
        after a minute or two.
        """
        end = time.monotonic() + seconds
        while self.left() and time.monotonic() < end:
            time.sleep(0.2)
        return not self.left()

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)


def run_forked(*words: str, cwd: Path, **environment: str) -> tuple[int, str]:
    """Run `weft quickstart WORDS` in a forked process whose devices are forked processes too; its
    exit code and output.

    For tests of a run's numbers. Tests of the command itself, of its signals and of what it leaves
    behind take `Command`.
    """
    asked = {**copy_environment(), "OMP_NUM_THREADS": "1", **environment}
    done = run_weft(["quickstart", *words], cwd, asked, _fork_devices)
    return done.returncode, done.stdout + done.stderr


def _fork_devices() -> None:
    import pytest

    from tests.runtime.forked_devices import fork_devices

    patch = pytest.MonkeyPatch()  # for as long as the process lives
    fork_devices(patch.setattr)
    patch.setattr("weft.launch.supervisor.needs_ray", lambda experiment, mode: False)
