"""Weights of one moment, moved after the engine has got others."""

from __future__ import annotations

import torch

from weft.realloc.execute import Reallocation
from weft.realloc.kept import Kept
from weft.realloc.plan import plan
from weft.topology import whole


class Engine:
    def __init__(self, value: float, version: int) -> None:
        self.values, self.version = torch.full((2, 3), value), version

    def read(self, names):
        yield from ((name, whole((2, 3)), self.values) for name in names)

    def write(self, parts, *, version, eta=1.0):
        for _, _, values in parts:
            self.values.copy_(values)
        self.version = version


def test_what_is_kept_does_not_change_with_the_engine() -> None:
    where = {0: {"w": whole((2, 3))}}
    way = Reallocation(plan(where, where, node_of=lambda rank: 0), rank=0, group=None)
    source, target = Engine(1.0, 4), Engine(0.0, 0)
    kept = Kept.of(source, way.gives)
    source.values.fill_(2.0)
    source.version = 5
    assert way.move(kept, target).version == 4
    assert target.version == 4 and bool((target.values == 1.0).all())
    assert way.move(source, target).version == 5 and bool((target.values == 2.0).all())
