"""Processes for tests that start in milliseconds: forked from one that has imported torch and weft, and nothing else.

Python's fork server is started once per test process. A test gets fresh processes from it, so nothing that one test leaves in
a process is there for the next.
"""

from __future__ import annotations

import multiprocessing
from functools import cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

# Imported by the fork server. None of them starts a thread or opens a device; a name that is missing is imported on first use.
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch._dynamo",
    "transformers.modeling_utils",
    "weft.runtime.device_process",
    "weft.runtime.commands",
    "weft.engine.many_devices",
    "weft.engine.backends.torch",
    "weft.engine.generation.generate",
    "tests.engine.layouts",
]


@cache
def fork_server() -> ForkServerContext:
    """Return the multiprocessing context whose processes are forked from the one that has imported `PRELOADED`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def inherit_fork_server() -> None:
    """Let this process, which is forked itself, fork from the same server; Python would start another one for it."""
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[attr-defined, method-assign]
