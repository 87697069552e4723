"""What the ranks of one layout settle among themselves during a call: the one reduction point of a training step.

An engine, its step and its optimizer are written for one rank. Whatever needs the other ranks is asked of a `Spread`; on one
device every answer is the rank's own. A layout of many devices is another implementation of this protocol, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from weft.data.sample import SequenceSample

T = TypeVar("T")


class Spread(Protocol):
    """Every rank of the layout calls each method, in the same order."""

    def reduce_denominators(self, own: Mapping[str, float]) -> dict[str, float]:
        """Sums over the data-parallel ranks, in float64; asked before the first forward pass of a minibatch."""
        ...

    def num_microbatches(self, own: int) -> int:
        """How many micro-batches every rank runs, where this one has `own`: the most that any data-parallel rank has."""
        ...

    def run(self, parts: Sequence[SequenceSample], count: int, accumulate: Callable[[SequenceSample], None]) -> None:
        """Forward and backward of every micro-batch: `accumulate` adds one's gradient. A rank with fewer than `count` fills up
        with passes of weight 0."""
        ...

    def reduce_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Sum, in place, what each rank has only a part of, once all micro-batches are through."""
        ...

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Float32 scalar: the L2 norm over the gradients of all ranks, each element counted once."""
        ...

    def gather_values(self, own: T) -> list[T]:
        """Small plain values (statistics, ids) of every data-parallel rank, in the order of ranks."""
        ...

    def gather_parameters(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Whole tensors by name, for what is saved."""
        ...


class OneDevice:
    """Implements `Spread` for a layout of one device: nothing is spread."""

    def reduce_denominators(self, own: Mapping[str, float]) -> dict[str, float]:
        return dict(own)

    def num_microbatches(self, own: int) -> int:
        return own

    def run(self, parts: Sequence[SequenceSample], count: int, accumulate: Callable[[SequenceSample], None]) -> None:
        for part in parts:
            accumulate(part)

    def reduce_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Nothing: the gradients are whole."""

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(gradients)

    def gather_values(self, own: T) -> list[T]:
        return [own]

    def gather_parameters(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return own
