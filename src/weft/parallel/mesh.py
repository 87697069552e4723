"""Process groups of the ranks that communicate in a layout.

    groups = ProcessGroups()                           # one per process
    mesh = RankMesh(mesh, rank, groups)                # this rank's place in a layout
    dist.all_reduce(x, group=mesh.get_group("data"))

There is one group for each set of ranks that communicate. It is created once, and only by its own
ranks. `torch.distributed` must be initialized first. The initialization also chooses the backend:
gloo for ranks on CPUs and NCCL for ranks on GPUs.
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

from weft.topology import Layout, Mesh, MeshCoordinates

AXES = (
    ("tensor",),
    ("data",),
    ("context",),
    ("pipeline",),
    ("tensor", "context", "pipeline"),
    ("data", "pipeline"),
    ("data", "context"),
)


def choose_backend(device: torch.device) -> str:
    """Return the name of the communication backend for this type of device: nccl or gloo."""
    return "nccl" if device.type == "cuda" else "gloo"


class ProcessGroups:
    """Cache of the process groups to which this process belongs, keyed by their ranks.

    All ranks of a group create it together. Ranks that are together in several groups must
    therefore request these groups in the same order.
    """

    def __init__(self, seconds: float | None = None) -> None:
        """Create an empty cache.

        `seconds` is the timeout of each collective, or None for torch's default.
        """
        self._timeout = None if seconds is None else timedelta(seconds=seconds)
        self._groups: dict[tuple[tuple[int, ...], bool], ProcessGroup] = {}

    def get_group(self, ranks: tuple[int, ...], *, host: bool = False) -> ProcessGroup:
        """Return the process group of these ranks, creating it at the first call.

        The first call waits until all of the ranks have called it. If `host` is True, a separate
        gloo group for host tensors is returned. Messages in the two groups are independent of each
        other.
        """
        if (ranks, host) not in self._groups:
            backend = "gloo" if host else None
            with _name_by_ranks(ranks, host=host):
                group = dist.new_group(
                    list(ranks), self._timeout, backend, use_local_synchronization=True
                )
            assert isinstance(group, ProcessGroup), f"this process is not one of the ranks {ranks}"
            self._groups[ranks, host] = group
        return self._groups[ranks, host]


@contextmanager
def _name_by_ranks(ranks: tuple[int, ...], *, host: bool) -> Iterator[None]:
    """Make torch name the process groups created in the block by their ranks and a counter.

    The counter is the number of earlier groups of the same ranks, so all of these ranks choose the
    same name. By default, torch names a group by the number of groups that the process has created.
    This number can differ between the ranks of a group, which could then not connect to each other.
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
    """Position of one rank in a mesh, and the process groups that the rank shares with others.

    The constructor creates the process groups, so all ranks of the mesh must call it.
    """

    def __init__(self, mesh: Mesh, rank: int, groups: ProcessGroups) -> None:
        self.mesh = mesh
        self.rank = rank
        self._groups = groups
        self.coordinates: MeshCoordinates = mesh.get_coordinates(rank)
        for axes in AXES:
            self._create_group(mesh.list_ranks_along(rank, *axes))
        self._create_group(mesh.ranks)
        line = mesh.list_ranks_along(rank, "pipeline")
        self._ends = (line[0], line[-1])
        for other in (line, mesh.list_ranks_along(rank, "context")):
            if len(other) > 1:
                groups.get_group(other, host=True)
        if rank in self._ends:
            self._create_group(tuple(dict.fromkeys(self._ends)))
        if self.layout.expert > 1:
            self._create_group(self._find_expert_ranks())
            self._create_group(self._find_expert_copies())
        if self.layout.fsdp > 1:
            for shares in (self._find_shard_ranks(1), self._find_shard_ranks(self.layout.expert)):
                for ranks in shares:
                    self._create_group(ranks)

    @property
    def layout(self) -> Layout:
        return self.mesh.layout

    def count_ranks(self, *axes: str) -> int:
        """Return the number of ranks along the given axes of the layout, including this rank."""
        return len(self.mesh.list_ranks_along(self.rank, *axes))

    def get_group(self, *axes: str) -> ProcessGroup:
        """Return the group of the ranks that differ from this rank only in coordinates on `axes`.

        `axes` must be one of the combinations in `AXES`, and the group must have more than one
        rank.
        """
        return self._groups.get_group(self.mesh.list_ranks_along(self.rank, *axes))

    @property
    def ends_group(self) -> ProcessGroup | None:
        """Group of the two ranks with the first and the last stage of this rank's pipeline.

        Used to sum the gradients of the two copies of a tied embedding matrix. None if this rank
        has neither of these stages, or if a single rank has both.
        """
        if self.rank in self._ends and len(set(self._ends)) == 2:
            return self._groups.get_group(self._ends)
        return None

    def get_host_group(self, axis: str) -> ProcessGroup:
        """Return the group of the ranks along an axis, for sending host tensors.

        The group includes this rank. `axis` is "pipeline" or "context".
        """
        return self._groups.get_group(self.mesh.list_ranks_along(self.rank, axis), host=True)

    @property
    def experts_group(self) -> ProcessGroup:
        """Group of the ranks over which the experts are split.

        Exists only in layouts with expert parallelism.
        """
        return self._groups.get_group(self._find_expert_ranks())

    @property
    def expert_copies_group(self) -> ProcessGroup | None:
        """Group of the ranks that hold the same experts but process different tokens.

        None if no other rank holds the same experts.
        """
        ranks = self._find_expert_copies()
        return self._groups.get_group(ranks) if len(ranks) > 1 else None

    @property
    def all_ranks_group(self) -> ProcessGroup:
        """Group of all ranks of the mesh."""
        return self._groups.get_group(self.mesh.ranks)

    def build_shard_mesh(self, device: torch.device, *, experts: bool = False) -> DeviceMesh:
        """Return the device mesh over which FSDP2 shards parameters; the layout must be sharded.

        Ranks along the dimension `f` hold the shards of one replica of the parameters. If there are
        several replicas, the mesh also has the dimension `r`, along which ranks hold the same
        shard. If `experts` is True, the mesh is for the experts' parameters, and contains only
        ranks that hold the same experts.
        """
        e = self.layout.expert if experts else 1
        inner, outer = self._find_shard_ranks(e)
        ranks = torch.tensor(self._find_strided_ranks(e)).view(len(outer), len(inner))
        if len(outer) == 1:
            return DeviceMesh.from_group(
                self._groups.get_group(inner), device.type, mesh=ranks[0], mesh_dim_names=("f",)
            )
        both = [self._groups.get_group(outer), self._groups.get_group(inner)]
        return DeviceMesh.from_group(both, device.type, mesh=ranks, mesh_dim_names=("r", "f"))

    def _find_expert_ranks(self) -> tuple[int, ...]:
        line = self.mesh.list_ranks_along(self.rank, "data")
        e = self.layout.expert
        start = self.coordinates.data // e * e
        return line[start : start + e]

    def _find_expert_copies(self) -> tuple[int, ...]:
        e = self.layout.expert
        ranks = self.mesh.list_ranks_along(self.rank, "data", "context")
        return tuple(
            rank
            for rank in ranks
            if self.mesh.get_coordinates(rank).data % e == self.coordinates.data % e
        )

    def _find_strided_ranks(self, e: int) -> tuple[int, ...]:
        """Return every `e`-th rank along the data axis, including this rank.

        If a tensor is split over each group of `e` consecutive ranks, the returned ranks all hold
        the same part of the tensor.
        """
        return self.mesh.list_ranks_along(self.rank, "data")[self.coordinates.data % e :: e]

    def _find_shard_ranks(self, e: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ranks of this rank's replica, and the ranks that hold this rank's shard.

        A replica is one sharded copy of the parameters. `e` is the number of ranks over which
        expert parallelism splits the parameters, or 1 for parameters outside of experts.
        """
        line = self._find_strided_ranks(e)
        parts = max(self.layout.fsdp // e, 1)
        copy, part = divmod(line.index(self.rank), parts)
        return line[copy * parts : (copy + 1) * parts], line[part::parts]

    def _create_group(self, ranks: tuple[int, ...]) -> None:
        if len(ranks) > 1:
            self._groups.get_group(ranks)
