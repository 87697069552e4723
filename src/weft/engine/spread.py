"""What the ranks of one layout settle among themselves during a call: the one reduction point of a
training step.

An engine, its step and its optimizer are written for one rank. Whatever needs the other ranks is
asked of a `Spread`; on one device every answer is the rank's own. A layout of many devices is
another implementation of this protocol, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from weft.algorithms.base import Output
from weft.data.sample import SequenceSample
from weft.engine.rows import PackLayout, SampleRows
from weft.parallel.microbatch import Microbatch, connected

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
Outputs = dict[Output, Tensor]


@dataclass(frozen=True)
class Prepared:
    """A micro-batch as the network is called with it.

    `part` is None of a filler, whose outputs have weight 0; `spread` puts the outputs of the rows
    that were computed among zeros. `rows` are what a loss reads of it, where one does.
    """

    part: SequenceSample | None
    layout: PackLayout
    given: Microbatch
    spread: Callable[[Outputs], Outputs]
    rows: SampleRows | None = None


class Work(Protocol[T_co]):
    """What is done with every micro-batch of a call, on one rank."""

    def prepare(self, part: SequenceSample) -> Prepared: ...
    def filler(self) -> Prepared:
        """One token, for a rank that must pass the network as often as another that has more
        micro-batches.
        """
        ...

    def finish(self, prepared: Prepared, out: Outputs) -> T_co:
        """What becomes of a micro-batch's outputs; in training the scalar that the backward pass
        begins with.
        """
        ...

    def stage_loss(self, prepared: Prepared) -> Tensor | None:
        """Of a stage of a pipeline that is not the last: what its own layers add to the loss."""
        ...


class Spread(Protocol):
    """Every rank of the layout calls each method, in the same order."""

    def reduce_denominators(self, own: Mapping[str, float]) -> dict[str, float]:
        """Sums over the data-parallel ranks, in float64; asked before the first forward pass of a
        minibatch.
        """
        ...

    def run(
        self, network: nn.Module, parts: Sequence[SequenceSample], work: Work[T], *, trains: bool
    ) -> list[T]:
        """`work` on every micro-batch, with its backward pass where it trains; what it made of
        each, on a rank that has the outputs.
        """
        ...

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum, in place, what each rank has only a part of, once all micro-batches are through.

        A parameter that has no gradient here and one elsewhere gets one.
        """
        ...

    def gradient_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Scalar: the L2 norm over the gradients of all ranks, each element counted once;
        `gradients` by canonical name.
        """
        ...

    def gather_values(self, own: T, *, stages: bool = False) -> list[T]:
        """Small plain values (statistics, ids) of every data-parallel rank, in the order of ranks;
        with `stages` those of every stage of each, where a pipeline's have different ones.
        """
        ...

    def gather_parameters(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Whole tensors by name on the rank that writes them; None on the others."""
        ...

    def kept(self, names: Iterable[str]) -> list[str]:
        """Those of the tensors held here that this rank writes to a recovery point: each is written
        once.
        """
        ...

    def file(self, stem: str) -> str:
        """The name of this rank's file."""
        ...


def passed(
    network: nn.Module, prepared: Prepared, work: Work[T], *, trains: bool, always: bool = False
) -> T:
    """One micro-batch through a network that is all here.

    With `always` a backward pass follows whatever the loss is made of: other ranks may wait for its
    gradients.
    """
    given = prepared.given
    out: Outputs = network(given.x, given.want, given.temperature, given.support)
    value = work.finish(prepared, prepared.spread(out))
    if trains and isinstance(value, Tensor):
        if value.requires_grad or not always:
            loss: Tensor = value
        else:
            loss = connected(value, out.values())
        if loss.requires_grad:
            loss.backward()
    return value


class OneDevice:
    """Implements `Spread` for a layout of one device: nothing is spread."""

    def reduce_denominators(self, own: Mapping[str, float]) -> dict[str, float]:
        return dict(own)

    def run(
        self, network: nn.Module, parts: Sequence[SequenceSample], work: Work[T], *, trains: bool
    ) -> list[T]:
        return [passed(network, work.prepare(part), work, trains=trains) for part in parts]

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Nothing: the gradients are whole."""

    def gradient_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(list(gradients.values()))

    def gather_values(self, own: T, *, stages: bool = False) -> list[T]:
        return [own]

    def gather_parameters(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        return own

    def kept(self, names: Iterable[str]) -> list[str]:
        return list(names)

    def file(self, stem: str) -> str:
        return f"{stem}.safetensors"
