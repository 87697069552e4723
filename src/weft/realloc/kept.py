"""Parameters of an engine as they were at one moment, in host memory, to be moved later than the engine has others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from weft.realloc.execute import Giver
from weft.topology import Slice


@dataclass
class Kept:
    """Implements `Giver`."""

    version: int
    parts: dict[str, tuple[Slice, Tensor]]

    @classmethod
    def of(cls, giver: Giver, names: Iterable[str]) -> Kept:
        parts = {name: (where, values.detach().to("cpu", copy=True)) for name, where, values in giver.read(names)}
        return cls(giver.version, parts)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Slice, Tensor]]:
        yield from ((name, *self.parts[name]) for name in names)
