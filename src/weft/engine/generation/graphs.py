"""Decode steps as captured graphs: one launch in place of hundreds, at a few fixed numbers of rows.

A step arrives as a matrix of numbers (`weft.models.kv.pages.PagedCache.step`), is filled up with rows of zeros to the next
size, copied into a fixed buffer, and replayed. What is captured holds addresses of weights and pages, so it is dropped where
these may have moved: with the generator, when weights change, and when pages or the table grow.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.engine.device import using

SIZES = (1, 2, 4, 8, *range(16, 257, 8))  # rows; steps in between are filled up
COARSE = tuple(1 << n for n in range(10))  # where each size is also compiled, which takes longer than what it saves
BEYOND = 64  # past the last size, multiples of this
AFTER = 16  # steps of a size before it is captured, which takes about as long; a batch that drains passes through many sizes
WARM_UPS = 2  # runs before a capture, in which kernels are chosen, compiled and given their workspaces

Steps = npt.NDArray[np.int32]
Run = Callable[[Tensor], Tensor]
Capture = Callable[[Run, Tensor], tuple[Callable[[], object], Tensor]]  # -> (replay, the output it writes)


def filled_up(rows: int, sizes: tuple[int, ...]) -> int:
    """Rows of the graph that a step of `rows` runs in."""
    return next((size for size in sizes if size >= rows), -(-rows // BEYOND) * BEYOND)


@dataclass(frozen=True)
class Captured:
    """A graph with the buffer it reads, the host memory that is copied there, and what it writes."""

    inputs: Tensor
    host: Tensor
    replay: Callable[[], object]
    output: Tensor


class DecodeGraphs:
    """`run` maps a step int32 [B, C] on the device to hidden states [B, hidden]; it has no other inputs that change.

    `capture` is None where nothing is captured. A size is captured after `after` steps. A capture that fails is told once
    (`RuntimeWarning`, and `note`), and steps then run one kernel after the other.
    """

    def __init__(
        self,
        run: Run,
        device: torch.device,
        capture: Capture | None,
        *,
        sizes: tuple[int, ...] = SIZES,
        after: int = AFTER,
    ) -> None:
        self._run, self._device, self._capture, self._sizes, self._after = run, device, capture, sizes, after
        self._seen: Counter[int] = Counter()
        self._captured: dict[int, Captured] = {}
        self._form: Hashable = None
        self.note: str | None = None

    def __len__(self) -> int:
        return len(self._captured)

    def drop(self) -> None:
        """Forget all graphs: addresses may have changed."""
        self._captured.clear()

    def __call__(self, step: Steps, form: Hashable) -> Tensor:
        """Hidden states [R, hidden] of a step [R, C], to be read before the next call. `form` is anything that differs once
        the memory behind the step has moved."""
        if form != self._form:
            self.drop()
            self._form = form
        rows, size = len(step), filled_up(len(step), self._sizes)
        captured = self._captured.get(size)
        if captured is not None and captured.inputs.shape[1] == step.shape[1]:
            captured.host.zero_()
            captured.host[:rows] = torch.from_numpy(step)
            captured.inputs.copy_(captured.host, non_blocking=True)
            captured.replay()
            return captured.output[:rows]
        host = torch.zeros(size, step.shape[1], dtype=torch.int32, pin_memory=self._device.type == "cuda")
        host[:rows] = torch.from_numpy(step)
        inputs = host.to(self._device, non_blocking=True)
        self._seen[size] += 1
        if self._capture is None or self._seen[size] <= self._after:
            return self._run(inputs)[:rows]
        try:
            replay, output = self._capture(self._run, inputs)
        except RuntimeError as error:
            self._give_up(error)
            return self._run(inputs)[:rows]
        self._captured[size] = Captured(inputs, host, replay, output)
        replay()
        return output[:rows]

    def _give_up(self, error: RuntimeError) -> None:
        self._capture = None
        self.drop()
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        self.note = f"decode steps run without CUDA graphs, which makes small batches slower: {reason}"
        warnings.warn(self.note, RuntimeWarning, stacklevel=3)


def cuda_capture(device: torch.device) -> Capture:
    """Captures on a CUDA device; all graphs share one memory pool, as no two of their outputs are read at once."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Run, inputs: Tensor) -> tuple[Callable[[], object], Tensor]:
        with using(device):  # streams and the capture are of the thread's device
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    run(inputs)
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads (data, host memory) may call CUDA meanwhile; only this one's calls are captured.
            try:
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    output = run(inputs)
            finally:  # torch stays on the capture's stream where the capture fails
                torch.cuda.set_stream(current)
        return graph.replay, output

    return capture
