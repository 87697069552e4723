"""Processes that run functions together as the ranks of a gloo process group, started once for many
tests.

    with Ranks(2, folder) as ranks:
        results = ranks.run(function, *arguments)      # one result a rank

`function` is importable by its name, and what goes in and out can be pickled.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.processes import fork_server

GRACE = 10.0  # seconds that the others have once a rank has failed
DEADLINE = 120.0  # seconds that a function may take, and a rank to start


class Ranks:
    """`spawned`: each process imports for itself and hashes texts in its own way, as those of a run
    do.
    """

    def __init__(self, size: int, folder: Path, *, spawned: bool = False) -> None:
        context = multiprocessing.get_context("spawn") if spawned else fork_server()
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, str(folder / f"store{size}"), theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            with patch.dict(os.environ, {"PYTHONHASHSEED": str(rank + 1)}):
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returns on each rank.

        Raises `AssertionError` with a rank's traceback.
        """
        for pipe in self._pipes:
            pipe.send((function, arguments))
        ranks = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        results: dict[int, Any] = {}
        failures: list[str] = []
        end = time.monotonic() + DEADLINE
        while len(results) < len(ranks):
            left = [pipe for pipe, rank in ranks.items() if rank not in results]
            ready = wait(left, max(0.0, end - time.monotonic()))
            if not ready:  # the others may wait for one that has failed
                silent = ", ".join(str(ranks[pipe]) for pipe in left)
                raise AssertionError("\n".join([*failures, f"no answer from ranks {silent}"]))
            for pipe in ready:
                good, results[ranks[pipe]] = pipe.recv()  # type: ignore[union-attr]
                if not good:
                    failures.append(f"rank {ranks[pipe]}:\n{results[ranks[pipe]]}")
                    end = min(end, time.monotonic() + GRACE)
        assert not failures, "\n".join(failures)
        return [results[rank] for rank in range(len(ranks))]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    """Each function begins with a process group of its own: every group has threads that look for
    messages, and those of a hundred functions would leave no time for the next.
    """
    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays: to look through it each time would take half a second
    for number in itertools.count():
        function, arguments = pipe.recv()
        if dist.is_initialized():
            dist.destroy_process_group()
            gc.collect()
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}-{number}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=DEADLINE),
        )
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
