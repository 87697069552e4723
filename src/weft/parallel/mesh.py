"""Process groups of layouts: one for every set of ranks that talk to each other, made once, by those ranks alone.

    groups = ProcessGroups()                           # one a process; torch.distributed is set up
    mesh = RankMesh(mesh, rank, groups)                # this rank's place in a layout
    dist.all_reduce(x, group=mesh.group("data"))

gloo joins ranks on CPUs, NCCL ranks on GPUs; which of them is chosen once, where `torch.distributed` is set up.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from weft.topology import Coordinates, Layout, Mesh

AXES = (
    ("tensor",), ("data",), ("context",), ("pipeline",), ("tensor", "pipeline"), ("data", "pipeline"), ("data", "context"),
)  # fmt: skip


def backend_of(device: torch.device) -> str:
    """What ranks on such devices talk by."""
    return "nccl" if device.type == "cuda" else "gloo"


class ProcessGroups:
    """The process groups that this process belongs to, by their ranks. Ranks of a group ask for it in the same order as for
    others that they share."""

    def __init__(self, seconds: float | None = None) -> None:
        """`seconds` that a rank waits for the others of a collective; torch's own where none are given."""
        self._timeout = None if seconds is None else timedelta(seconds=seconds)
        self._groups: dict[tuple[tuple[int, ...], bool], ProcessGroup] = {}

    def of(self, ranks: tuple[int, ...], *, host: bool = False) -> ProcessGroup:
        """Made at the first call, which returns once all of `ranks` have made it. A group of its own for tensors of the `host`
        moves them by gloo, in an order of their own."""
        if (ranks, host) not in self._groups:
            backend = "gloo" if host else None
            _level(ranks)
            group = dist.new_group(list(ranks), self._timeout, backend, use_local_synchronization=True)
            assert isinstance(group, ProcessGroup), f"this process is none of the ranks {ranks}"
            self._groups[ranks, host] = group
        return self._groups[ranks, host]


def _level(ranks: tuple[int, ...]) -> None:
    """Have all of `ranks` be in equally many groups: torch names one that its ranks make alone by these ranks and by that
    number, and where the names differ each would wait for the others for ever. Who is in fewer makes some of itself alone."""
    store, key, own = c10d._get_default_store(), f"weft/{ranks}", len(c10d._world.pg_names)
    before = (store.add(key, 1) - 1) // len(ranks)  # how often these ranks have met here
    store.set(f"{key}/{before}/{dist.get_rank()}", str(own))
    most = max(int(store.get(f"{key}/{before}/{rank}")) for rank in ranks)
    for _ in range(most - own):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


class RankMesh:
    """One rank of a layout on its devices. All ranks of the mesh make it, and then its groups are there."""

    def __init__(self, mesh: Mesh, rank: int, groups: ProcessGroups) -> None:
        self.mesh, self.rank, self._groups = mesh, rank, groups
        self.at: Coordinates = mesh.coordinates(rank)
        for axes in AXES:
            self._make(mesh.along(rank, *axes))
        self._make(mesh.ranks)
        line = mesh.along(rank, "pipeline")
        self._ends = (line[0], line[-1])
        if len(line) > 1:
            groups.of(line, host=True)
            if rank in self._ends:
                self._make(self._ends)
        if self.layout.fsdp > 1:
            self._make(self._shard_ranks())
            self._make(self._replica_ranks())

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
        """The ranks that differ from this one in these coordinates alone: of `AXES`, with more than one rank."""
        return self._groups.of(self.mesh.along(self.rank, *axes))

    @property
    def ends(self) -> ProcessGroup | None:
        """The first and the last stage of this rank's pipeline, where it is one of them."""
        return self._groups.of(self._ends) if self.rank in self._ends and len(set(self._ends)) == 2 else None

    @property
    def host_line(self) -> ProcessGroup:
        """The stages of this rank's pipeline, for tensors of the host."""
        return self._groups.of(self.mesh.along(self.rank, "pipeline"), host=True)

    @property
    def everyone(self) -> ProcessGroup:
        return self._groups.of(self.mesh.ranks)

    def shards(self, device: torch.device) -> DeviceMesh:
        """Dims `r` (copies) and `f` (shards of one copy), as FSDP2 takes them; of a layout with shards."""
        inner, outer = self._shard_ranks(), self._replica_ranks()
        ranks = torch.tensor(self.mesh.along(self.rank, "data")).view(len(outer), len(inner))
        if len(outer) == 1:
            return DeviceMesh.from_group(self._groups.of(inner), device.type, mesh=ranks[0], mesh_dim_names=("f",))
        both = [self._groups.of(outer), self._groups.of(inner)]
        return DeviceMesh.from_group(both, device.type, mesh=ranks, mesh_dim_names=("r", "f"))

    def _shard_ranks(self) -> tuple[int, ...]:
        """Those that share one sharded copy with this rank."""
        line, f = self.mesh.along(self.rank, "data"), self.layout.fsdp
        start = self.at.data // f * f
        return line[start : start + f]

    def _replica_ranks(self) -> tuple[int, ...]:
        """Those that hold the same shard."""
        line, f = self.mesh.along(self.rank, "data"), self.layout.fsdp
        return line[self.at.data % f :: f]

    def _make(self, ranks: tuple[int, ...]) -> None:
        if len(ranks) > 1:
            self._groups.of(ranks)
