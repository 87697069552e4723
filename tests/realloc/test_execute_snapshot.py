"""Weights of one moment, moved after the engine has got others."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch

from weft.realloc.execute import ParameterSnapshot, Reallocation
from weft.realloc.plan import plan
from weft.topology import Slice, build_whole_slice


class Engine:
    def __init__(self, value: float, version: int) -> None:
        self.values, self.version = torch.full((2, 3), value), version

    def read(self, names):
        yield from ((name, build_whole_slice((2, 3)), self.values) for name in names)

    def write(self, parts, *, version, eta=1.0):
        for _, _, values in parts:
            self.values.copy_(values)
        self.version = version


def test_what_is_kept_does_not_change_with_the_engine() -> None:
    where = {0: {"w": build_whole_slice((2, 3))}}
    way = Reallocation(plan(where, where, node_of=lambda rank: 0), rank=0, group=None)
    source, target = Engine(1.0, 4), Engine(0.0, 0)
    kept = ParameterSnapshot.from_source(source, way.sent_names)
    source.values.fill_(2.0)
    source.version = 5
    assert way.move(kept, target).version == 4
    assert target.version == 4 and bool((target.values == 1.0).all())
    assert way.move(source, target).version == 5 and bool((target.values == 2.0).all())


class Counted:
    """Two parameters, made when they are read, so that what holds one holds memory; what is alive
    of them, and was at most.
    """

    version = 4

    def __init__(self) -> None:
        self.read_names: list[str] = []
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.most = 0

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Slice, torch.Tensor]]:
        for name in names:
            self.read_names.append(name)
            values = torch.full((2, 3), float(len(name)))
            self.alive.add(values)
            self.most = max(self.most, len(self.alive))
            yield name, build_whole_slice((2, 3)), values


def num_bytes(*every: ParameterSnapshot) -> int:
    storages = {
        part.untyped_storage().data_ptr(): part.untyped_storage()
        for kept in every
        for _, part in kept.parts.values()
    }
    return sum(storage.nbytes() for storage in storages.values())


def test_parts_of_several_ways_are_kept_once_and_freed_with_the_last() -> None:
    giver = Counted()
    first = ParameterSnapshot.from_source(giver, ["a", "bb"])
    second = ParameterSnapshot.from_source(giver, ["bb", "ccc"], [first])
    assert giver.read_names == ["a", "bb", "ccc"]
    assert (num_bytes(first), num_bytes(second), num_bytes(first, second)) == (48, 48, 72)
    assert [(name, float(values[0, 0])) for name, _, values in second.read(["ccc", "bb"])] == [
        ("ccc", 3.0),
        ("bb", 2.0),
    ]
    assert first.version == second.version == 4
    shared, own = weakref.ref(second.parts["bb"][1]), weakref.ref(first.parts["a"][1])
    del first
    assert own() is None and shared() is not None
    del second
    assert shared() is None


def test_parameters_are_copied_one_after_the_other() -> None:
    """Of what a source makes to be read, such as whole values of rounded ones, no more than one and
    the next is there.
    """
    giver = Counted()
    ParameterSnapshot.from_source(giver, [f"name {number}" for number in range(5)])
    assert giver.most <= 2 and len(giver.alive) <= 1
