"""Process groups of layouts: made by their own ranks alone, however many groups each of these
belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ranks
from weft.parallel.mesh import ProcessGroups, RankMesh
from weft.topology import Layout, Mesh


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(3, tmp_path_factory.mktemp("ranks")) as started:
        yield started


def totals(*meshes: Mesh) -> list[float]:
    """Of each mesh that this rank is of: the sum of its ranks' numbers, counted from 1."""
    groups, found = ProcessGroups(30.0), []
    for mesh in meshes:
        if dist.get_rank() in mesh.ranks:
            own = torch.tensor(float(dist.get_rank() + 1))
            dist.all_reduce(own, group=RankMesh(mesh, dist.get_rank(), groups).all_ranks_group)
            found.append(float(own))
    return found


def test_meshes_that_overlap(ranks: Ranks) -> None:
    """Rank 1 is of both, so it has more groups than the ranks that it makes the second mesh with;
    and once more.
    """
    meshes = (
        Mesh(Layout(data=2), (0, 1)),
        Mesh(Layout(tensor=2), (1, 2)),
        Mesh(Layout(pipeline=3), (0, 1, 2)),
    )
    for _ in range(2):
        assert ranks.run(totals, *meshes) == [[3.0, 6.0], [3.0, 5.0, 6.0], [5.0, 6.0]]
