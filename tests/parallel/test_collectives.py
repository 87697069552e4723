"""Sums, maxima and gathers over ranks are those of the stacked tensors, bitwise the same on all
ranks, whichever way they are sent.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bounds import assert_within, gamma
from tests.ranks import Ranks
from weft.parallel import collectives

SHAPES = ((), (1,), (0, 3), (7, 5), (2, 3, 4))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)


def values(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 100
    return made.to(dtype)


def collect(shape: tuple[int, ...], dtype: torch.dtype, most: int | None) -> list[Tensor]:
    """The sum, the maximum and all tensors, as this rank gets them."""
    group = dist.group.WORLD
    assert group is not None
    with pytest.MonkeyPatch.context() as patch:
        if most is not None:
            patch.setattr(collectives, "MAX_DIRECT_BYTES", most)
        own = values(shape, dtype, group.rank())
        total, largest = own.clone(), own.clone()
        collectives.sum_over_ranks(total, group)
        collectives.find_max_over_ranks(largest, group)
        return [total, largest, collectives.gather_from_ranks(own, group)]


@pytest.mark.parametrize("most", [None, 0], ids=["sent directly", "by the library"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_ranks(
    shape: tuple[int, ...], dtype: torch.dtype, most: int | None, ranks: Ranks
) -> None:
    every = torch.stack([values(shape, dtype, rank) for rank in range(2)])
    total, largest, gathered = ranks.run(collect, shape, dtype, most)[0]
    assert torch.equal(gathered, every)
    if every.numel():
        assert torch.equal(largest, every.amax(0))
    assert torch.equal(total, every[0] + every[1]), "two numbers have one sum in any order"
    other = ranks.run(collect, shape, dtype, most)[1]
    for one, same in zip((total, largest, gathered), other, strict=True):
        assert torch.equal(one, same)


@pytest.mark.slow
@pytest.mark.parametrize("most", [None, 0], ids=["sent directly", "by the library"])
def test_four_ranks_have_bitwise_the_same(most: int | None, four_ranks: Ranks) -> None:
    """A sum of four numbers depends on their order: no rank may choose its own."""
    first, *others = four_ranks.run(collect, (1000,), torch.float32, most)
    every = torch.stack([values((1000,), torch.float32, rank) for rank in range(4)])
    # Three additions, whatever their order.
    assert_within(first[0], every.double().sum(0), gamma(3) * every.double().abs().sum(0))
    for other in others:
        for one, same in zip(first, other, strict=True):
            assert torch.equal(one, same)
