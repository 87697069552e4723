"""Parameters of an engine as they were at one moment, in host memory, to be moved later than the
engine has others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.realloc.execute import Giver
from weft.topology import Slice


@dataclass
class Kept:
    """Implements `Giver`."""

    version: int
    parts: dict[str, tuple[Slice, Tensor]]

    @classmethod
    def of(cls, giver: Giver, names: Iterable[str], others: Iterable[Kept] = ()) -> Kept:
        """One parameter is copied after the other, so the device needs no memory for it.

        What `others` keep of the same giver at the same moment is not copied again; it is freed
        with the last that keeps it.
        """
        there = {name: part for other in others for name, part in other.parts.items()}
        wanted = list(names)
        parts = {name: there[name] for name in wanted if name in there}
        for name, where, values in giver.read([name for name in wanted if name not in there]):
            parts[name] = where, _on_host(values.detach())
        return cls(giver.version, parts)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Slice, Tensor]]:
        yield from ((name, *self.parts[name]) for name in names)


def _on_host(values: Tensor) -> Tensor:
    """A copy, in pinned memory of what a GPU has."""
    return torch.empty(
        values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda"
    ).copy_(values)
