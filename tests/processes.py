"""Processes for tests that start in milliseconds: forked from one that has imported torch and weft,
and nothing else.

Python's fork server is started once per test process. A test gets fresh processes from it, so
nothing that one test leaves in a process is there for the next.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path

# Imported by the fork server. None of them starts a thread or opens a device; a name that is
# missing is imported on first use.
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.profiler",
    "torch._dynamo",
    "transformers.modeling_utils",
    "hydra.core.override_parser.overrides_parser",
    "weft.cli.main",
    "weft.cli.named_run",
    "weft.cli.quickstart",
    "weft.launch.assemble",
    "weft.checkpoints.weight_files",
    "weft.runtime.commands",
    "weft.engine.mesh_collectives",
    "weft.engine.backends.torch",
    "weft.engine.generation.generate",
    "weft.host.reward",
    "weft.observe.report",
    "tests.engine.layouts",
    "tests.frozen",
]
STARTING = threading.Lock()


@cache
def fork_server() -> ForkServerContext:
    """Return the multiprocessing context whose processes are forked from the one that has imported
    `PRELOADED`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def inherit_fork_server() -> None:
    """Let this process, which is forked itself, fork from the same server; Python would start
    another one for it.
    """
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[attr-defined, method-assign]


def run_weft(
    words: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    prepare: Callable[[], None] | None = None,
    seconds: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Run the command `weft WORDS` in a forked process, after `prepare`, as `subprocess.run` would.

    Raises `subprocess.TimeoutExpired` if it takes longer than `seconds`.
    """
    folder = Path(tempfile.mkdtemp(prefix="weft-command-"))
    process = fork_server().Process(
        target=_command, args=(tuple(words), cwd, dict(environment), prepare, folder)
    )
    try:
        with STARTING:
            process.start()
            # A start polls all processes of this list, and an exit code can be read only once: that
            # of another thread's process would be lost to it.
            multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(["weft", *words], seconds, (folder / "1").read_text())
        assert process.exitcode is not None
        out, err = ((folder / name).read_text() for name in ("1", "2"))
        return subprocess.CompletedProcess(["weft", *words], process.exitcode, out, err)
    finally:
        shutil.rmtree(folder)


def _command(
    words: tuple[str, ...],
    cwd: Path,
    environment: dict[str, str],
    prepare: Callable[[], None] | None,
    folder: Path,
) -> None:
    import huggingface_hub.constants
    import torch

    from weft.cli.main import main

    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for descriptor in (1, 2):
        with (folder / str(descriptor)).open("w") as file:
            os.dup2(file.fileno(), descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - Python's own is closed in processes of multiprocessing
    sys.argv = ["weft", *words]
    # which a supervisor starts again
    sys.orig_argv = [sys.executable, "-m", "weft.cli.main", *words]
    os.environ.clear()
    os.environ.update(environment)
    # was read when it was imported
    huggingface_hub.constants.HF_HUB_OFFLINE = environment.get("HF_HUB_OFFLINE") == "1"
    os.chdir(cwd)
    inherit_fork_server()
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    if prepare is not None:
        prepare()
    code = main(list(words))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
