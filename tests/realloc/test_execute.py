"""Plans carried out on four processes: targets hold what they should bit for bit, and whatever goes
wrong is said.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import Ranks
from tests.realloc.common import Sizes, on, shapes
from weft.errors import RunError
from weft.realloc import messages
from weft.realloc.execute import Reallocation, ReallocationStatistics, move
from weft.realloc.plan import Holdings, ParameterTransfer, count_least_bytes, count_traffic, plan
from weft.topology import Layout, Slice

SIZES = Sizes(head_dim=16)
ALL = tuple(range(4))


@dataclass(frozen=True)
class Case:
    source: str
    target: str
    start: int = 0  # the target's first rank
    form: str = "plain"
    tied: bool = False
    eta: float = 1.0
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float64, torch.float64)
    bucket_bytes: int = 4096
    shelves: bool = True  # messages lie in memory that both see; else they are sent

    @property
    def ends(self) -> tuple[Holdings, Holdings]:
        layouts = Layout.parse(self.source), Layout.parse(self.target)
        return tuple(  # type: ignore[return-value]
            on(layout, SIZES, start=start, tied=self.tied, form=self.form)
            for layout, start in zip(layouts, (0, self.start), strict=True)
        )

    @property
    def transfers(self) -> list[ParameterTransfer]:
        return plan(*self.ends, node_of=lambda rank: 0)

    def wholes(self, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        every = shapes(SIZES, tied=self.tied, form=self.form)
        return {
            n: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            for n, shape in every.items()
        }


class Engine:
    """Parameters of one rank: the part of an engine that reallocation speaks to."""

    def __init__(
        self, parts: Mapping[str, Slice], wholes: Mapping[str, Tensor], version: int
    ) -> None:
        self.parts, self.version = parts, version
        self.values = {name: wholes[name][part].clone() for name, part in parts.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Slice, Tensor]]:
        for name in names:
            yield name, self.parts[name], self.values[name]

    def write(
        self, parts: Iterable[tuple[str, Slice, Tensor]], *, version: int, eta: float = 1.0
    ) -> None:
        for name, piece, values in parts:
            at = tuple(
                slice(a.start - p.start, a.stop - p.start)
                for a, p in zip(piece, self.parts[name], strict=True)
            )
            target = self.values[name][at]
            target.copy_(values if eta == 1.0 else target.lerp(values.to(target.dtype), eta))
        self.version = version


def engines(case: Case, rank: int) -> tuple[Engine | None, Engine | None]:
    source, target = case.ends
    given, taken = case.wholes(1, case.dtypes[0]), case.wholes(2, case.dtypes[1])
    return (
        Engine(source[rank], given, 7) if rank in source else None,
        Engine(target[rank], taken, 3) if rank in target else None,
    )


def expected(case: Case, name: str, part: Slice) -> Tensor:
    """The target's values after it, from whole tensors."""
    given, taken = (
        case.wholes(seed, dtype)[name] for seed, dtype in zip((1, 2), case.dtypes, strict=True)
    )
    cast = given.to(taken.dtype)
    return (cast if case.eta == 1.0 else taken.lerp(cast, case.eta))[part]


@contextmanager
def ways(case: Case) -> Iterator[None]:
    """Ranks of one host always see each other's memory: without shelves they are kept from it."""
    laid_out = messages.create_buffer
    if not case.shelves:
        messages.create_buffer = lambda size: None
    try:
        yield
    finally:
        messages.create_buffer = laid_out


def run(case: Case) -> ReallocationStatistics:
    """On one rank: move, and look at what is there then."""
    with ways(case):
        return run_so(case)


def run_so(case: Case) -> ReallocationStatistics:
    rank = dist.get_rank()
    source, target = engines(case, rank)
    before = {name: values.clone() for name, values in source.values.items()} if source else {}
    moved = move(
        source,
        target,
        case.transfers,
        rank=rank,
        group=dist.group.WORLD,
        eta=case.eta,
        bucket_bytes=case.bucket_bytes,
    )
    for name, values in before.items():
        assert source is not None and torch.equal(values, source.values[name]), (
            f"the source's {name} changed"
        )
    if target is not None:
        assert target.version == 7
        for name, part in target.parts.items():
            assert torch.equal(target.values[name], expected(case, name, part)), name
    return moved


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(4, tmp_path_factory.mktemp("ranks")) as started:
        yield started


CASES = [
    Case("d4f4", "t4"),
    Case("d2f2t2", "t2p2", tied=True),
    Case("t2p2", "d4"),
    Case("p2", "t2", start=2),
    Case("d2", "t2", start=1, form="experts"),
    Case("t4", "d1", start=3, form="adapters"),
    Case("d1", "d2f2t2"),
    Case("d2f2", "d2f2", form="plain", bucket_bytes=2**20),
]


@pytest.mark.parametrize("shelves", [True, False], ids=["shelves", "sent"])
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.source}-{case.target}+{case.start}-{case.form}"
)
def test_targets_hold_what_they_should(case: Case, shelves: bool, ranks: Ranks) -> None:
    case = replace(case, shelves=shelves)
    moved = ranks.run(run, case)
    source, target = case.ends
    itemsize = dict.fromkeys(shapes(SIZES, tied=case.tied, form=case.form), 8)
    cost = count_traffic(case.transfers, source, target, itemsize=itemsize, node_of=lambda rank: 0)
    assert [each.sent for each in moved] == [cost.sent[rank] for rank in ALL]
    assert [each.received for each in moved] == [cost.received[rank] for rank in ALL]
    assert sum(each.sent for each in moved) == count_least_bytes(source, target, itemsize=itemsize)
    assert [each.copied for each in moved] == [
        cost.in_place[rank] + cost.copied[rank] for rank in ALL
    ]


@pytest.mark.parametrize("eta", [0.25, 0.0])
def test_a_moving_average(eta: float, ranks: Ranks) -> None:
    ranks.run(run, Case("d2f2t2", "t2p2", eta=eta))


@pytest.mark.parametrize("shelves", [True, False])
def test_two_buckets_each_way_and_no_more(shelves: bool, ranks: Ranks) -> None:
    small, large = (
        Case("d4f4", "t4", bucket_bytes=size, shelves=shelves) for size in (2048, 2**20)
    )
    for case in (small, large):
        moved = ranks.run(run, case)
        assert all(0 < each.buffer_bytes <= 4 * case.bucket_bytes for each in moved)
        assert sum(each.received for each in moved) > 12 * small.bucket_bytes


def again(case: Case, count: int) -> list[bool]:
    """On one rank: what is worked out once serves for every move; the source changes from one to
    the next.
    """
    rank = dist.get_rank()
    source, target = engines(case, rank)
    reallocation = Reallocation(
        case.transfers, rank=rank, group=dist.group.WORLD, bucket_bytes=case.bucket_bytes
    )
    good = []
    for step in range(count):
        wholes = case.wholes(10 + step, case.dtypes[0])
        if source is not None:
            source.version = step
            for name, part in source.parts.items():
                source.values[name].copy_(wholes[name][part])
        reallocation.move(source, target)
        if target is not None:
            good += [
                torch.equal(target.values[name], wholes[name][part])
                for name, part in target.parts.items()
            ]
            good.append(target.version == step)
    return good


def test_one_reallocation_moves_many_times(ranks: Ranks) -> None:
    results = ranks.run(again, Case("d4f4", "t2p2", bucket_bytes=2048), 5)
    assert all(all(each) and len(each) > 50 for each in results)


HALF = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("dtypes", "eta", "itemsize"),
    [
        (HALF, 1.0, 2),
        (HALF, 0.5, 4),
        (HALF[::-1], 1.0, 2),
        (HALF[::-1], 0.5, 2),
        ((torch.float16, torch.bfloat16), 1.0, 2),
    ],
)
def test_the_smaller_dtype_travels_where_it_loses_nothing(
    dtypes: tuple[torch.dtype, torch.dtype], eta: float, itemsize: int, ranks: Ranks
) -> None:
    case = Case("d4f4", "t4", dtypes=dtypes, eta=eta)
    elements = sum(each.num_elements for each in case.transfers if not each.is_local)
    assert sum(each.sent for each in ranks.run(run, case)) == itemsize * elements


# -- what goes wrong


def told(
    change: Callable[[int, Engine | None, Case], Case | None], case: Case, timeout: float = 3.0
) -> str:
    """On one rank: what it says after `change` has spoilt something; a group of its own, since
    messages may be left in it.
    """
    rank, group = dist.get_rank(), dist.new_group(timeout=timedelta(seconds=timeout))
    source, target = engines(case, rank)
    batch, laid_out = dist.batch_isend_irecv, messages.create_buffer
    changed = change(rank, source, case)
    try:
        if changed is not None:
            move(
                source,
                target,
                changed.transfers,
                rank=rank,
                group=group,
                eta=changed.eta,
                bucket_bytes=4096,
            )
    except RunError as error:
        return str(error)
    finally:
        dist.batch_isend_irecv, messages.create_buffer = batch, laid_out
        dist.barrier()  # nobody leaves while another still waits for it
    return ""


def same(rank: int, source: Engine | None, case: Case) -> Case:
    return case


def damage(rank: int, source: Engine | None, case: Case) -> Case:
    """Rank 0 gives one bit that is not the one it packed."""
    post, lay = dist.batch_isend_irecv, messages.create_buffer
    laid = []

    def kept(size: int) -> Any:
        laid.append(lay(size) if case.shelves else None)
        return laid[0]

    def flip(ops: list[Any]) -> Any:
        for op in ops:
            if op.op is dist.isend and op.tensor.dtype is torch.uint8:
                op.tensor[5] ^= 16
            elif op.op is dist.isend and op.tensor.numel() == 1 and op.tag == 0:
                laid[0].memory[int(op.tensor) + 5] ^= 16
        return post(ops)

    messages.create_buffer = kept
    if rank == 0:
        dist.batch_isend_irecv = flip
    return case


def stale(rank: int, source: Engine | None, case: Case) -> Case:
    if rank == 1 and source is not None:
        source.version = 6
    return case


class Training(Engine):
    """Its version changes while it is read: as if it were trained in the meantime."""

    @property
    def version(self) -> int:
        self.asked = getattr(self, "asked", 0) + 1
        return 7 if self.asked < 6 else 8

    @version.setter
    def version(self, value: int) -> None:
        pass


def training(rank: int, source: Engine | None, case: Case) -> Case:
    if rank == 0 and source is not None:
        source.__class__ = Training
    return case


def another_plan(rank: int, source: Engine | None, case: Case) -> Case:
    return replace(case, eta=0.5) if rank == 2 else case


def another_dtype(rank: int, source: Engine | None, case: Case) -> Case:
    if rank == 1 and source is not None:
        source.values["norm.weight"] = source.values["norm.weight"].float()
    return case


def absent(rank: int, source: Engine | None, case: Case) -> Case | None:
    return None if rank == 3 else case


APART = Case("d2", "t2", start=2)  # ranks 0 and 1 send, 2 and 3 receive


def test_nothing_is_said_where_nothing_is_wrong(ranks: Ranks) -> None:
    assert ranks.run(told, same, APART) == [""] * 4


@pytest.mark.default_cases("False")
@pytest.mark.parametrize("shelves", [True, False])
def test_damaged_data(shelves: bool, ranks: Ranks) -> None:
    said = ranks.run(told, damage, replace(APART, shelves=shelves))
    text = (
        r"blocks\.0\..* from rank 0 to rank [23]: the checksum of this message is not the sender's"
    )
    assert any(re.search(text, each) for each in said[2:]), said


def test_sources_of_two_versions(ranks: Ranks) -> None:
    said = ranks.run(told, stale, APART)
    assert len(set(said)) == 1 and "one version of the weights (rank 0: 7, rank 1: 6)" in said[0], (
        said
    )


@pytest.mark.slow
def test_a_source_that_changes_meanwhile(ranks: Ranks) -> None:
    said = ranks.run(told, training, APART)
    assert any("from rank 0" in each and "of version 8, expected 7" in each for each in said[2:]), (
        said
    )


def test_another_plan(ranks: Ranks) -> None:
    said = ranks.run(told, another_plan, APART)
    assert all(
        "rank 2 was given another plan, eta or bucket size than" in said[rank] for rank in (0, 1, 3)
    ), said
    assert "was given another plan" in said[2]


def test_sources_of_two_dtypes(ranks: Ranks) -> None:
    said = ranks.run(told, another_dtype, APART)
    text = "the source's ranks must have parameter 'norm.weight' in one dtype (rank 0: torch.float64, rank 1: torch.float32)"
    assert all(text in each for each in said), said


@pytest.mark.slow
def test_a_rank_that_is_late(ranks: Ranks) -> None:
    said = ranks.run(told, absent, APART)
    assert all(
        f"rank {rank} lost a message" in said[rank] and "rank 3" in said[rank] for rank in (0, 1, 2)
    ), said


def dying(rank: int, folder: str, pipe: Any) -> None:
    """Rank 1 ends in the middle: when it has packed its second bucket."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(60)
    )
    case = Case("t2", "d2")
    source, target = engines(case, rank)
    post, count = dist.batch_isend_irecv, 0

    def end(ops: Sequence[Any]) -> Any:
        nonlocal count
        count += 1
        # four times ranks tell each other something; the first bucket, thanks for it, the second
        if count == 7:
            os._exit(1)
        return post(ops)

    if rank == 1:
        dist.batch_isend_irecv = end
    try:
        move(source, target, case.transfers, rank=rank, group=dist.group.WORLD, bucket_bytes=4096)
        pipe.send("no error")
    except RunError as error:
        pipe.send(str(error))


def test_a_rank_that_dies(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    processes = [
        context.Process(target=dying, args=(rank, str(tmp_path), theirs), daemon=True)
        for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    assert ours.poll(60)
    said = ours.recv()
    for process in processes:
        process.join(60)
    assert "rank 0 lost a message" in said and "rank 1" in said
    assert [process.exitcode for process in processes] == [0, 1]


# -- in one process


def test_within_a_process_no_group_is_needed() -> None:
    case = Case("d1", "d1")
    source, target = engines(case, 0)
    assert source is not None and target is not None
    moved = move(source, target, case.transfers, rank=0, group=None)
    assert all(
        torch.equal(target.values[name], expected(case, name, part))
        for name, part in target.parts.items()
    )
    assert (moved.version, moved.sent, moved.buffer_bytes) == (7, 0, 0) and moved.copied > 0


def test_one_engine_that_is_both_copies_nothing() -> None:
    case = Case("d1", "d1")
    source, _ = engines(case, 0)
    assert source is not None
    assert move(source, source, case.transfers, rank=0, group=None).copied == 0
