"""Decode steps as captured graphs: one launch in place of hundreds, at a few fixed numbers of rows.

A step arrives as a matrix of numbers (`weft.models.kv.pages.PagedCache.step`), is filled up with
rows of zeros to the size of a graph, copied into its fixed buffer, and replayed. What is captured
holds addresses of weights and pages, so it is dropped where these have moved, and only then.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.engine.device import using

# rows: none is over 2 times the one before
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# where each size is also compiled, which takes longer than what it saves
COARSE = tuple(1 << n for n in range(10))
BEYOND = 128  # past the last size, multiples of this
# steps in a graph that is too large before a size has its own, which takes about as long as it
# saves
AFTER = 16
# runs before a capture, in which kernels are chosen, compiled and given their workspaces
WARM_UPS = 2

Steps = npt.NDArray[np.int32]
Run = Callable[[Tensor], Tensor]
# -> (replay, the output it writes)
Capture = Callable[[Run, Tensor], tuple[Callable[[], object], Tensor]]


def filled_up(rows: int, sizes: tuple[int, ...]) -> int:
    """Rows of the graph that is made for a step of `rows`."""
    return next((size for size in sizes if size >= rows), -(-rows // BEYOND) * BEYOND)


@dataclass(frozen=True)
class Captured:
    """A graph with the buffer it reads, the host memory that is copied there, and what it writes."""

    inputs: Tensor
    host: Tensor
    replay: Callable[[], object]
    output: Tensor

    def __call__(self, step: Steps) -> Tensor:
        """Run the graph for a step of at most its number of rows; return its output."""
        self.host.zero_()
        self.host[: len(step)] = torch.from_numpy(step)
        self.inputs.copy_(self.host, non_blocking=True)
        self.replay()
        return self.output[: len(step)]


class DecodeGraphs:
    """`runs[kind]` maps a step int32 [B, C] on the device to [B, ...]; it has no other inputs that
    change.

    A step runs in the smallest graph of its kind that is there and has room for it. Where none has
    room one is captured at once, with room for all rows that are expected; a size that ran in a
    larger graph for `after` steps gets its own. `capture` is None where nothing is captured. A
    capture that fails is told once (`RuntimeWarning`, and `note`), and steps then run one kernel
    after the other. `counts` says how many steps were "eager" or "replayed", and how many sizes
    "captured".
    """

    def __init__(
        self,
        runs: Mapping[str, Run],
        device: torch.device,
        capture: Capture | None,
        *,
        sizes: tuple[int, ...] = SIZES,
        after: int = AFTER,
    ) -> None:
        self._runs = runs
        self._device = device
        self._capture = capture
        self._sizes = sizes
        self._after = after
        self._seen: Counter[tuple[str, int]] = Counter()
        self._captured: dict[tuple[str, int], Captured] = {}
        self._form: Hashable = None
        self.counts: Counter[str] = Counter()
        self.note: str | None = None

    def __len__(self) -> int:
        return len(self._captured)

    def drop(self) -> None:
        """Forget all graphs: addresses may have changed."""
        self._captured.clear()

    def __call__(self, kind: str, step: Steps, *, form: Hashable, expected: int = 0) -> Tensor:
        """Return the output of a step [R, C] of this kind; it is valid until the next call.

        `form` is any value that differs after the memory of the step has moved; `expected` is the
        largest number of rows still to come.
        """
        if form != self._form:
            self.drop()
            self._form = form
        graph = self._graph(kind, step, max(expected, len(step)))
        self.counts["eager" if graph is None else "replayed"] += 1
        if graph is not None:
            return graph(step)
        _, inputs = self._put(step, filled_up(len(step), self._sizes))
        return self._runs[kind](inputs)[: len(step)]

    def _graph(self, kind: str, step: Steps, most: int) -> Captured | None:
        """The one to run a step in; None where there are no graphs."""
        size = filled_up(len(step), self._sizes)
        found = min((own for of, own in self._captured if of == kind and own >= size), default=None)
        if found == size:
            return self._captured[kind, size]
        self._seen[kind, size] += 1
        if self._capture is not None and (found is None or self._seen[kind, size] > self._after):
            made = filled_up(most, self._sizes) if found is None else size
            if self._add(kind, step, made):
                return self._captured[kind, made]
        return self._captured.get((kind, found)) if found is not None else None

    def _add(self, kind: str, step: Steps, size: int) -> bool:
        """Capture a size; whether that worked."""
        assert self._capture is not None
        host, inputs = self._put(step, size)
        try:
            replay, output = self._capture(self._runs[kind], inputs)
        except RuntimeError as error:
            self._give_up(error)
            return False
        self._captured[kind, size] = Captured(inputs, host, replay, output)
        self.counts["captured"] += 1
        return True

    def _put(self, step: Steps, size: int) -> tuple[Tensor, Tensor]:
        """(host memory, a copy on the device) of a step that is filled up."""
        host = torch.zeros(
            size, step.shape[1], dtype=torch.int32, pin_memory=self._device.type == "cuda"
        )
        host[: len(step)] = torch.from_numpy(step)
        return host, host.to(self._device, non_blocking=True, copy=True)

    def _give_up(self, error: RuntimeError) -> None:
        self._capture = None
        self.drop()
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        self.note = (
            f"decode steps run without CUDA graphs, which makes small batches slower: {reason}"
        )
        warnings.warn(self.note, RuntimeWarning, stacklevel=4)


def cuda_capture(device: torch.device) -> Capture:
    """Captures on a CUDA device; graphs that are alive share a memory pool, as no two of their
    outputs are read at once.

    torch 2.11 asserts that a pool has a graph when another joins it, and a pool may outlive its
    graphs: a cuBLAS workspace keeps it. So the first capture after all graphs are gone takes a new
    handle.
    """
    pool: Any = None
    alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def capture(run: Run, inputs: Tensor) -> tuple[Callable[[], object], Tensor]:
        nonlocal pool
        with using(device):  # streams and the capture are of the thread's device
            current = torch.cuda.current_stream()
            side = torch.cuda.Stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    run(inputs)
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            if not alive:
                pool = torch.cuda.graph_pool_handle()
            # Other threads (data, host memory) may call CUDA meanwhile; only this one's calls are
            # captured.
            try:
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    output = run(inputs)
            finally:  # torch stays on the capture's stream where the capture fails
                torch.cuda.set_stream(current)
        alive.add(graph)
        return graph.replay, output

    return capture
