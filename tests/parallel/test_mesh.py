"""Process groups of meshes that overlap: each is made by its own ranks, whatever groups these are in already."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ranks
from weft.parallel.mesh import ProcessGroups


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory):
    with Ranks(3, tmp_path_factory.mktemp("mesh")) as ranks:
        yield ranks


def sums(wanted: list[tuple[int, ...]]) -> list[int]:
    """Of the ranks of each group that this one is in."""
    groups, found = ProcessGroups(), []
    for ranks in wanted:
        if dist.get_rank() in ranks:
            own = torch.tensor(dist.get_rank() + 1)
            dist.all_reduce(own, group=groups.of(ranks))
            found.append(int(own))
    return found


def test_groups_that_overlap_are_made_by_their_ranks_alone(three: Ranks) -> None:
    assert three.run(sums, [(0, 1), (1, 2), (0, 1, 2)]) == [[3, 6], [3, 5, 6], [5, 6]]


def test_and_so_are_more_of_the_same_ranks(three: Ranks) -> None:
    assert three.run(sums, [(0, 1), (0, 1, 2), (0, 2)]) == [[3, 6, 4], [3, 6], [6, 4]]
