"""Decode steps as CUDA graphs: one launch instead of hundreds, for a few fixed numbers of rows.

The input of a step is a matrix of integers (`weft.models.kv.pages.PagedCache.step`). It is padded
with rows of zeros to the size of a graph and copied into the graph's fixed buffer; then the graph
is replayed. Graphs contain the addresses of weights and pages, so they are discarded when weights
or pages have moved.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.engine.device import use_device, wait

# numbers of rows, each at most twice the one before
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# for attention that is compiled per size, where more sizes would cost more than they save
COARSE_GRAPH_SIZES = tuple(1 << n for n in range(10))
LARGE_SIZE_STEP = 128  # larger sizes are multiples of this
# steps in a larger graph before a size gets its own; a capture takes about the time that they lose
MIN_USES = 16
# runs before a capture, which choose and compile kernels and allocate workspaces
WARM_UPS = 2

StepArray = npt.NDArray[np.int32]
StepFunction = Callable[[Tensor], Tensor]
# returns (function that replays the graph, its output buffer)
CaptureFunction = Callable[[StepFunction, Tensor], tuple[Callable[[], object], Tensor]]


def find_graph_size(rows: int, sizes: tuple[int, ...]) -> int:
    """Return the number of rows that a CUDA graph for decode steps of `rows` rows should have.

    This is the first of the ascending `sizes` that is large enough. If none is, it is `rows`
    rounded up to a multiple of `LARGE_SIZE_STEP`.
    """
    return next(
        (size for size in sizes if size >= rows), -(-rows // LARGE_SIZE_STEP) * LARGE_SIZE_STEP
    )


@dataclass(frozen=True)
class CapturedGraph:
    """CUDA graph with its input and output buffers.

    `host_inputs` alternates between two buffers in host memory, because the device may still have
    to copy the input of the step before.
    """

    inputs: Tensor
    host_inputs: Iterator[Tensor]
    replay: Callable[[], object]
    output: Tensor

    def __call__(self, step: StepArray) -> Tensor:
        """Replay the graph for a step, and return the step's output.

        The step must not have more rows than the graph. Before a third step, the first must be
        done.
        """
        host = next(self.host_inputs)
        host.zero_()
        host[: len(step)] = torch.from_numpy(step)
        self.inputs.copy_(host, non_blocking=True)
        self.replay()
        return self.output[: len(step)]


class DecodeGraphs:
    """CUDA graphs of decode steps, one for each kind of step (such as "greedy") and number of rows.

    A step runs in the smallest captured graph of its kind that has enough rows. If there is none, a
    graph is captured immediately. This graph is large enough for the steps that are expected later
    (see `expected` in `__call__`). If a capture fails, one `RuntimeWarning` is issued, and later
    steps run without graphs.

    Args:
        runs: For each kind of step, the function that runs it. It maps the step's input, int32 [B,
            C] on the device, to an output [B, ...]. It can also read other memory, such as
            weights. After such memory has moved, `drop` must be called.
        capture: Function that captures a graph, or None to run all steps without graphs.
        sizes: Numbers of rows that a graph can have. Larger graphs have a multiple of
            `LARGE_SIZE_STEP` rows.
        after: Number of times that steps of one kind and size run in a graph with more rows than
            necessary. After that, a graph of the right size is captured.
        state: Tensor that steps change and later steps read, or None. The steps that are run to
            prepare a capture do not change it.

    Attributes:
        counts: Numbers of "eager" and "replayed" steps, and of "captured" graphs.
        note: Message about the failed capture, or None.
    """

    def __init__(
        self,
        runs: Mapping[str, StepFunction],
        device: torch.device,
        capture: CaptureFunction | None,
        *,
        sizes: tuple[int, ...] = GRAPH_SIZES,
        after: int = MIN_USES,
        state: Tensor | None = None,
    ) -> None:
        self._runs = runs
        self._device = device
        self._capture = capture
        self._sizes = sizes
        self._after = after
        self._state = state
        self._num_uses: Counter[tuple[str, int]] = Counter()
        self._graphs: dict[tuple[str, int], CapturedGraph] = {}
        self._form: Hashable = None
        self.counts: Counter[str] = Counter()
        self.note: str | None = None

    def __len__(self) -> int:
        return len(self._graphs)

    def drop(self) -> None:
        """Discard all graphs.

        Must be called when memory that the graphs read may have moved.
        """
        if self._graphs:
            wait(self._device)  # for a step that still runs
        self._graphs.clear()

    def __call__(self, kind: str, step: StepArray, *, form: Hashable, expected: int = 0) -> Tensor:
        """Run a decode step with R rows, and return the output, which is valid until the next call.

        `kind` selects the function to run, and `step` [R, C] is its input. A CUDA graph is replayed
        if possible. `form` identifies the memory that the step reads; if it changes, all graphs are
        discarded. `expected` is the largest number of rows that later steps are expected to have.
        """
        if form != self._form:
            self.drop()
            self._form = form
        graph = self._find_graph(kind, step, max(expected, len(step)))
        self.counts["eager" if graph is None else "replayed"] += 1
        if graph is not None:
            return graph(step)
        _, inputs = self._copy_to_device(step, find_graph_size(len(step), self._sizes))
        return self._runs[kind](inputs)[: len(step)]

    def _find_graph(self, kind: str, step: StepArray, most: int) -> CapturedGraph | None:
        """Return the graph in which to run a step, or None to run the step without a graph.

        If graphs can be captured and no graph of this kind is large enough, one for `most` rows is
        captured. If larger graphs than necessary have often been used for steps of this size, a
        graph of the right size is captured.
        """
        size = find_graph_size(len(step), self._sizes)
        captured_size = min(
            (own for of, own in self._graphs if of == kind and own >= size), default=None
        )
        if captured_size == size:
            return self._graphs[kind, size]
        self._num_uses[kind, size] += 1
        if self._capture is not None and (
            captured_size is None or self._num_uses[kind, size] > self._after
        ):
            new_size = find_graph_size(most, self._sizes) if captured_size is None else size
            if self._add(kind, step, new_size):
                return self._graphs[kind, new_size]
        return self._graphs.get((kind, captured_size)) if captured_size is not None else None

    def _add(self, kind: str, step: StepArray, size: int) -> bool:
        """Capture a graph for `size` rows, and return whether that succeeded."""
        assert self._capture is not None
        host, inputs = self._copy_to_device(step, size)
        state = None if self._state is None else self._state.clone()
        try:
            replay, output = self._capture(self._runs[kind], inputs)
        except RuntimeError as error:
            self._disable_capture(error)
            return False
        finally:
            if self._state is not None and state is not None:
                self._state.copy_(state)
        other = torch.zeros_like(host, pin_memory=host.is_pinned())
        hosts = itertools.cycle([other, host])
        self._graphs[kind, size] = CapturedGraph(inputs, hosts, replay, output)
        self.counts["captured"] += 1
        return True

    def _copy_to_device(self, step: StepArray, size: int) -> tuple[Tensor, Tensor]:
        """Return two copies of a step's input, one in host memory and one on the device.

        Both are padded with zeros to `size` rows.
        """
        host = torch.zeros(
            size, step.shape[1], dtype=torch.int32, pin_memory=self._device.type == "cuda"
        )
        host[: len(step)] = torch.from_numpy(step)
        return host, host.to(self._device, non_blocking=True, copy=True)

    def _disable_capture(self, error: RuntimeError) -> None:
        self._capture = None
        self.drop()
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        self.note = (
            f"decode steps run without CUDA graphs, which makes small batches slower: {reason}"
        )
        warnings.warn(self.note, RuntimeWarning, stacklevel=4)


def build_cuda_capture(device: torch.device) -> CaptureFunction:
    """Return a function that captures graphs on a CUDA device.

    All graphs share a memory pool, since no two outputs are needed at the same time. If all earlier
    graphs have been deleted, the next graph gets a new pool, because torch 2.11 does not let it use
    the old one.
    """
    pool: Any = None
    alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def capture(run: StepFunction, inputs: Tensor) -> tuple[Callable[[], object], Tensor]:
        nonlocal pool
        with use_device(device):  # streams and captures use the current device of the thread
            current = torch.cuda.current_stream()
            side = torch.cuda.Stream()
            side.wait_stream(current)
            try:
                with torch.cuda.stream(side):
                    for _ in range(WARM_UPS):
                        run(inputs)
            finally:  # steps that a failed run began may still write to the state
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
