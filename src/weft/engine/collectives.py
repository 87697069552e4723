"""Communication between the ranks of one layout during an engine call.

The code of the engine, its training step and its optimizer describes a single rank. All
communication with other ranks goes through the protocol `Collectives`. `LocalCollectives`
implements the protocol for one device, and `weft.engine.mesh_collectives` for several devices.
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
from weft.models.network.packed import Microbatch
from weft.parallel.collectives import connect_outputs

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
Outputs = dict[Output, Tensor]


@dataclass(frozen=True)
class PreparedPass:
    """Micro-batch that is packed and ready for the network.

    Attributes:
        part: The micro-batch; None for a filler pass. A rank runs filler passes when other ranks
            have more micro-batches, and their outputs have weight 0.
        layout: Layout of the micro-batch's sequences in the pack.
        given: Arguments of the network.
        scatter_outputs: Function that returns outputs for all completion tokens of the micro-batch,
            given the network's outputs. Tokens for which the network computes no output get 0.
        rows: Input of the loss, or None if there is no loss.
    """

    part: SequenceSample | None
    layout: PackLayout
    given: Microbatch
    scatter_outputs: Callable[[Outputs], Outputs]
    rows: SampleRows | None = None


class MicrobatchProcessor(Protocol[T_co]):
    """Interface of an object that prepares one rank's micro-batches and handles their outputs."""

    def prepare(self, part: SequenceSample) -> PreparedPass: ...
    def build_filler(self) -> PreparedPass:
        """Return a pass of one token, for a rank that has fewer micro-batches than others."""
        ...

    def finish(self, prepared: PreparedPass, out: Outputs) -> T_co:
        """Return the result of a micro-batch, computed from the network's outputs `out`.

        In training, the result is the loss.
        """
        ...

    def compute_stage_loss(self, prepared: PreparedPass) -> Tensor | None:
        """Return the auxiliary loss of a pipeline stage before the last one.

        Returns None if the stage's blocks have no auxiliary loss.
        """
        ...


class Collectives(Protocol):
    """Interface of the communication between ranks.

    Every rank must call the same methods in the same order.
    """

    def reduce_denominators(self, own: Mapping[str, float]) -> dict[str, float]:
        """Return each denominator of the loss, summed in float64 over the data-parallel ranks.

        Must be called before the first forward pass of a minibatch.
        """
        ...

    def run(
        self,
        network: nn.Module,
        parts: Sequence[SequenceSample],
        work: MicrobatchProcessor[T],
        *,
        trains: bool,
    ) -> list[T]:
        """Run every micro-batch through the network, with a backward pass if `trains`.

        `work` prepares the micro-batches and handles their outputs. Returns the results of
        `work.finish`, or an empty list on ranks that do not get the network's outputs.
        """
        ...

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum partial gradients over ranks in place, after all micro-batches.

        If a parameter has a gradient on some ranks only, the other ranks get the gradient too.
        """
        ...

    def compute_gradient_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the L2 norm of the gradients of all ranks, as a scalar tensor.

        `gradients` maps canonical names to this rank's gradients. An element that is on several
        ranks is counted once.
        """
        ...

    def gather_values(self, own: T, *, stages: bool = False) -> list[T]:
        """Return the values `own` of all data-parallel ranks, in rank order.

        The values must be small and plain (no tensors). With `stages`, the values of all pipeline
        stages are included.
        """
        ...

    def gather_parameters(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Return whole tensors by name on the rank that writes them to disk, and None on other
        ranks.

        `own` contains this rank's slice of each tensor.
        """
        ...

    def select_saved_names(self, names: Iterable[str]) -> list[str]:
        """Return the names of those tensors that this rank writes to a recovery point.

        Each tensor is written by exactly one rank.
        """
        ...

    def name_file(self, stem: str) -> str:
        """Return the name of this rank's file for a group of tensors.

        `stem` is the name of the group, such as "optimizer"; the file's name begins with it.
        """
        ...


def run_microbatch(
    network: nn.Module,
    prepared: PreparedPass,
    work: MicrobatchProcessor[T],
    *,
    trains: bool,
    always: bool = False,
) -> T:
    """Run one micro-batch through a network, and return the result of `work.finish`.

    The network must not be split into pipeline stages. With `trains`, the result is the loss, and a
    backward pass follows. A loss without a gradient needs no backward pass. With `always`, one is
    run even then, because other ranks may wait for this rank's gradients.
    """
    given = prepared.given
    out: Outputs = network(given.x, given.want, given.temperature, given.support)
    value = work.finish(prepared, prepared.scatter_outputs(out))
    if trains and isinstance(value, Tensor):
        if value.requires_grad or not always:
            loss: Tensor = value
        else:
            loss = connect_outputs(value, out.values())
        if loss.requires_grad:
            loss.backward()
    return value


class LocalCollectives:
    """Implementation of `Collectives` for a layout of one device, without communication."""

    def reduce_denominators(self, own: Mapping[str, float]) -> dict[str, float]:
        return dict(own)

    def run(
        self,
        network: nn.Module,
        parts: Sequence[SequenceSample],
        work: MicrobatchProcessor[T],
        *,
        trains: bool,
    ) -> list[T]:
        return [run_microbatch(network, work.prepare(part), work, trains=trains) for part in parts]

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Do nothing: the gradients are complete."""

    def compute_gradient_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(list(gradients.values()))

    def gather_values(self, own: T, *, stages: bool = False) -> list[T]:
        return [own]

    def gather_parameters(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        return own

    def select_saved_names(self, names: Iterable[str]) -> list[str]:
        return list(names)

    def name_file(self, stem: str) -> str:
        return f"{stem}.safetensors"
