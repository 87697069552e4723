"""Process groups of layouts: one for every set of ranks that talk to each other, made once, by
those ranks alone.

    groups = ProcessGroups()                           # one a process; torch.distributed is set up
    mesh = RankMesh(mesh, rank, groups)                # this rank's place in a layout
    dist.all_reduce(x, group=mesh.group("data"))

gloo joins ranks on CPUs, NCCL ranks on GPUs; which of them is chosen once, where
`torch.distributed` is set up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from weft.topology import Coordinates, Layout, Mesh

AXES = (
    ("tensor",),
    ("data",),
    ("context",),
    ("pipeline",),
    ("tensor", "context", "pipeline"),
    ("data", "pipeline"),
    ("data", "context"),
)


def backend_of(device: torch.device) -> str:
    """What ranks on such devices talk by."""
    return "nccl" if device.type == "cuda" else "gloo"


class ProcessGroups:
    """The process groups that this process belongs to, by their ranks.

    Ranks of a group ask for it in the same order as for others that they share.
    """

    def __init__(self, seconds: float | None = None) -> None:
        """`seconds` that a rank waits for the others of a collective; torch's own where none are
        given.
        """
        self._timeout = None if seconds is None else timedelta(seconds=seconds)
        self._groups: dict[tuple[tuple[int, ...], bool], ProcessGroup] = {}

    def of(self, ranks: tuple[int, ...], *, host: bool = False) -> ProcessGroup:
        """Made at the first call, which returns once all of `ranks` have made it.

        A group of its own for tensors of the `host` moves them by gloo, in an order of their own.
        """
        if (ranks, host) not in self._groups:
            backend = "gloo" if host else None
            with _named_by_ranks(ranks, host=host):
                group = dist.new_group(
                    list(ranks), self._timeout, backend, use_local_synchronization=True
                )
            assert isinstance(group, ProcessGroup), f"this process is none of the ranks {ranks}"
            self._groups[ranks, host] = group
        return self._groups[ranks, host]


@contextmanager
def _named_by_ranks(ranks: tuple[int, ...], *, host: bool) -> Iterator[None]:
    """Within it a group that its own ranks make is called after them, and by how many of these
    ranks there were before.

    torch hashes the ranks together with the number of all groups of the process. Ranks that belong
    to different numbers of groups would wait for each other under different names.
    """
    taken = set(distributed_c10d._world.pg_names.values())
    name = next(
        each
        for n in count()
        if (each := f"weft/{'-'.join(map(str, ranks))}/{'host' if host else 'device'}/{n}")
        not in taken
    )
    before = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = before


class RankMesh:
    """One rank of a layout on its devices.

    All ranks of the mesh make it, and then its groups are there.
    """

    def __init__(self, mesh: Mesh, rank: int, groups: ProcessGroups) -> None:
        self.mesh = mesh
        self.rank = rank
        self._groups = groups
        self.at: Coordinates = mesh.coordinates(rank)
        for axes in AXES:
            self._make(mesh.along(rank, *axes))
        self._make(mesh.ranks)
        line = mesh.along(rank, "pipeline")
        self._ends = (line[0], line[-1])
        for other in (line, mesh.along(rank, "context")):
            if len(other) > 1:
                groups.of(other, host=True)
        if rank in self._ends:
            self._make(tuple(dict.fromkeys(self._ends)))
        if self.layout.expert > 1:
            self._make(self._expert_ranks())
            self._make(self._expert_copies())
        if self.layout.fsdp > 1:
            for shares in (self._shared(1), self._shared(self.layout.expert)):
                for ranks in shares:
                    self._make(ranks)

    @property
    def layout(self) -> Layout:
        return self.mesh.layout

    @property
    def first(self) -> bool:
        """Whether this is the mesh's first rank: the one that writes what all have in common."""
        return self.rank == self.mesh.ranks[0]

    def size(self, *axes: str) -> int:
        return len(self.mesh.along(self.rank, *axes))

    def group(self, *axes: str) -> ProcessGroup:
        """The ranks that differ from this one in these coordinates alone: of `AXES`, with more than
        one rank.
        """
        return self._groups.of(self.mesh.along(self.rank, *axes))

    @property
    def ends(self) -> ProcessGroup | None:
        """The first and the last stage of this rank's pipeline, where it is one of them."""
        if self.rank in self._ends and len(set(self._ends)) == 2:
            return self._groups.of(self._ends)
        return None

    def host_group(self, axis: str) -> ProcessGroup:
        """The ranks along `pipeline` or `context`, for tensors of the host."""
        return self._groups.of(self.mesh.along(self.rank, axis), host=True)

    @property
    def experts(self) -> ProcessGroup:
        """The ranks that share the experts with this one; of a layout with e."""
        return self._groups.of(self._expert_ranks())

    @property
    def expert_copies(self) -> ProcessGroup | None:
        """Those that hold the same experts, and see other tokens; None where there are no others."""
        ranks = self._expert_copies()
        return self._groups.of(ranks) if len(ranks) > 1 else None

    @property
    def everyone(self) -> ProcessGroup:
        return self._groups.of(self.mesh.ranks)

    def shards(self, device: torch.device, *, experts: bool = False) -> DeviceMesh:
        """Dims `r` (copies) and `f` (shards of one copy), as FSDP2 takes them; of a layout with
        shards. Those of `experts` are of the ranks that have the same ones.
        """
        e = self.layout.expert if experts else 1
        inner, outer = self._shared(e)
        ranks = torch.tensor(self._line(e)).view(len(outer), len(inner))
        if len(outer) == 1:
            return DeviceMesh.from_group(
                self._groups.of(inner), device.type, mesh=ranks[0], mesh_dim_names=("f",)
            )
        both = [self._groups.of(outer), self._groups.of(inner)]
        return DeviceMesh.from_group(both, device.type, mesh=ranks, mesh_dim_names=("r", "f"))

    def _expert_ranks(self) -> tuple[int, ...]:
        line = self.mesh.along(self.rank, "data")
        e = self.layout.expert
        start = self.at.data // e * e
        return line[start : start + e]

    def _expert_copies(self) -> tuple[int, ...]:
        e = self.layout.expert
        ranks = self.mesh.along(self.rank, "data", "context")
        return tuple(
            rank for rank in ranks if self.mesh.coordinates(rank).data % e == self.at.data % e
        )

    def _line(self, e: int) -> tuple[int, ...]:
        """Every e-th data-parallel rank, this one among them: those that have the same of what e
        ranks share.
        """
        return self.mesh.along(self.rank, "data")[self.at.data % e :: e]

    def _shared(self, e: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of these, those that share one sharded copy with this rank, and those that hold the same
        shard.
        """
        line = self._line(e)
        parts = max(self.layout.fsdp // e, 1)
        copy, part = divmod(line.index(self.rank), parts)
        return line[copy * parts : (copy + 1) * parts], line[part::parts]

    def _make(self, ranks: tuple[int, ...]) -> None:
        if len(ranks) > 1:
            self._groups.of(ranks)
