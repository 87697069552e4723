"""Snapshot of an engine's parameters in host memory, to be sent after the engine has changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.realloc.execute import ParameterSource
from weft.topology import Slice


@dataclass
class ParameterSnapshot:
    """Copy of parameters in host memory, which implements `ParameterSource`.

    Attributes:
        version: Version of the weights that were copied.
        parts: For each parameter name, the slices of the whole parameter that were copied (one
            slice per dimension), and the copied values.
    """

    version: int
    parts: dict[str, tuple[Slice, Tensor]]

    @classmethod
    def from_source(
        cls, giver: ParameterSource, names: Iterable[str], others: Iterable[ParameterSnapshot] = ()
    ) -> ParameterSnapshot:
        """Copy the parameters `names` of `giver` to host memory.

        The parameters are copied one after another, so that no extra device memory is needed.
        `others` are earlier snapshots of the same weights. Their parameters are not copied again:
        the new snapshot shares their memory, which is freed when the last snapshot that uses it is
        deleted.
        """
        there = {}
        for other in others:
            for name, part in other.parts.items():
                there[name] = part
        wanted = list(names)
        parts = {name: there[name] for name in wanted if name in there}
        for name, where, values in giver.read([name for name in wanted if name not in there]):
            parts[name] = where, _copy_to_host(values.detach())
        return cls(giver.version, parts)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Slice, Tensor]]:
        """Yield (name, slices, values) for each of the given parameter names.

        The slices, one per dimension, say which part of the whole parameter the values are.
        """
        yield from ((name, *self.parts[name]) for name in names)


def _copy_to_host(values: Tensor) -> Tensor:
    """Return a copy of `values` in host memory, which is pinned if `values` are on a GPU."""
    return torch.empty(
        values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda"
    ).copy_(values)
