"""What the ranks of one layout settle among themselves during a call: the one reduction point of a training step.

An engine, its step and its optimizer are written for one rank. Whatever needs the other ranks is asked of a `Spread`; on one
device every answer is the rank's own. A layout of many devices is another implementation of this protocol, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from weft.data.sample import SequenceSample

T = TypeVar("T")


class Spread(Protocol):
    """Every rank of the layout calls each method, in the same order."""

    def reduce_denominators(self, own: Mapping[str, float]) -> dict[str, float]:
        """Sums over the data-parallel ranks, in float64; asked before the first forward pass of a minibatch."""
        ...

    def run(
        self,
        parts: Sequence[SequenceSample],
        one: Callable[[SequenceSample], T],
        fill: Callable[[], None],
        *,
        trains: bool,
    ) -> list[T]:
        """`one` of every micro-batch. Where ranks must pass the network equally often, one with fewer micro-batches than
        another calls `fill`, a pass of weight 0, in place of those that it lacks."""
        ...

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum, in place, what each rank has only a part of, once all micro-batches are through. A parameter that has no
        gradient here and one elsewhere gets one."""
        ...

    def gradient_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Scalar: the L2 norm over the gradients of all ranks, each element counted once; `gradients` by canonical name."""
        ...

    def gather_values(self, own: T) -> list[T]:
        """Small plain values (statistics, ids) of every data-parallel rank, in the order of ranks."""
        ...

    def gather_parameters(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Whole tensors by name on the rank that writes them; None on the others."""
        ...

    def kept(self, names: Iterable[str]) -> list[str]:
        """Those of the tensors held here that this rank writes to a recovery point: each is written once."""
        ...

    def file(self, stem: str) -> str:
        """The name of this rank's file."""
        ...


class OneDevice:
    """Implements `Spread` for a layout of one device: nothing is spread."""

    def reduce_denominators(self, own: Mapping[str, float]) -> dict[str, float]:
        return dict(own)

    def run(
        self,
        parts: Sequence[SequenceSample],
        one: Callable[[SequenceSample], T],
        fill: Callable[[], None],
        *,
        trains: bool,
    ) -> list[T]:
        return [one(part) for part in parts]

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Nothing: the gradients are whole."""

    def gradient_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(list(gradients.values()))

    def gather_values(self, own: T) -> list[T]:
        return [own]

    def gather_parameters(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        return own

    def kept(self, names: Iterable[str]) -> list[str]:
        return list(names)

    def file(self, stem: str) -> str:
        return f"{stem}.safetensors"
