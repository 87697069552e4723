"""Plans between all layouts: every element of every target once, from a rank that has it, and
nothing that is there already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial

import numpy as np
import pytest

from tests.realloc.common import Shapes, Sizes, layouts, on, shapes
from tests.work import calls_of
from weft.errors import ConfigError
from weft.realloc.plan import Holdings, ParameterTransfer, plan
from weft.topology import Layout, Slice, build_whole_slice

TINY, DEEP = Sizes(), Sizes(num_layers=8)
KINDS = [("plain", False), ("plain", True), ("adapters", False), ("experts", False)]


def one_node(rank: int) -> int:
    return 0


def nodes_of(size: int) -> Callable[[int], int]:
    return lambda rank: rank // size


@cache
def held(shape: tuple[int, ...], *ranges: tuple[int, int]) -> np.ndarray:
    """1 for each element of the rectangle, 0 elsewhere."""
    found = np.zeros(shape, np.int64)
    found[tuple(slice(*each) for each in ranges)] = 1
    return found


def mask(shape: tuple[int, ...], piece: Slice) -> np.ndarray:
    return held(shape, *((each.start, each.stop) for each in piece))


def check(
    every: Shapes, source: Holdings, target: Holdings, transfers: list[ParameterTransfer]
) -> None:
    """Carry the plan out on arrays of different numbers above 0, adding what arrives, so that twice
    is wrong; count what is sent.
    """
    wholes = {
        name: 1 + np.arange(np.prod(shape, dtype=int)).reshape(shape)
        for name, shape in every.items()
    }
    arrived = {
        rank: {name: np.zeros(every[name], np.int64) for name in parts}
        for rank, parts in target.items()
    }
    for name, piece, giver, taker in transfers:
        assert inside(piece, source[giver][name]), f"{name}: rank {giver} has no {piece}"
        arrived[taker][name][piece] += wholes[name][piece]
    least = 0
    for rank, parts in target.items():
        for name, part in parts.items():
            asked = mask(every[name], part)
            assert (arrived[rank][name] == asked * wholes[name]).all(), (
                f"{name} on rank {rank}: not all of it once"
            )
            own = source.get(rank, {}).get(name)
            least += int(asked.sum() if own is None else (asked > mask(every[name], own)).sum())
    assert sum(each.num_elements for each in transfers if not each.is_local) == least


def inside(piece: Slice, part: Slice) -> bool:
    return all(p.start <= a.start < a.stop <= p.stop for a, p in zip(piece, part, strict=True))


def pairs(sizes: Sizes, most: int, part: int = 0, parts: int = 1) -> list[tuple[Layout, Layout]]:
    """Return all pairs of layouts, or one of so many parts of them; each layout is in every part,
    as source and as target.
    """
    found = list(enumerate(layouts(most, sizes)))
    return [(a, b) for i, a in found for k, b in found if (i + k) % parts == part]


def go_through(
    sizes: Sizes,
    most: int,
    kinds: list[tuple[str, bool]],
    starts: Callable[[Layout], list[int]],
    part: int = 0,
    parts: int = 1,
) -> int:
    """Check the plan of every pair of layouts, or of a part of them; the number of plans."""
    count = 0
    for form, tied in kinds:
        every = shapes(sizes, tied=tied, form=form)
        holdings = cache(
            partial(on, sizes=sizes, tied=tied, form=form)
        )  # of a layout from a rank on: many pairs' target
        for a, b in pairs(sizes, most, part, parts):
            source = holdings(a, start=0)
            for start in starts(a):
                target = holdings(b, start=start)
                check(every, source, target, plan(source, target, node_of=nodes_of(4)))
                count += 1
    return count


def test_layouts_are_those_meant() -> None:
    found = {str(layout) for layout in layouts(8, DEEP)}
    assert {
        "d8f8t1p1c1e1",
        "d1f1t8p1c1e1",
        "d1f1t1p8c1e1",
        "d2f2t2p2c1e1",
        "d6f3t1p1c1e1",
        "d1f1t1p5c1e1",
    } <= found
    assert len(found) == 56 and not any("t3" in name for name in found)


def test_every_pair_of_layouts_on_the_same_ranks() -> None:
    """Two layers, up to 8 ranks."""
    assert go_through(TINY, 8, [("lean", False)], lambda a: [0]) == len(pairs(TINY, 8)) >= 900


@pytest.mark.default_cases("adapters", "experts")
@pytest.mark.parametrize(("form", "tied"), KINDS)
def test_every_pair_of_four_ranks_in_all_forms(form: str, tied: bool) -> None:
    """Plain ones on the same ranks, on overlapping ones, and apart."""
    go_through(
        TINY,
        4,
        [(form, tied)],
        lambda a: sorted({0, a.num_devices // 2, a.num_devices} if form == "plain" else {1}),
    )


def test_layouts_with_experts_on_ranks_of_their_own() -> None:
    """In stages and shards, to each other and to those without."""
    named = (
        "d2e2",
        "d2f2e2",
        "d4f4e2",
        "d4f2e2",
        "d2p2e2",
        "d4f4p2e2",
        "d2c2e2",
        "d2t2e2",
        "d1",
        "t2",
        "d4f4",
        "p2c2",
    )
    every = shapes(TINY, form="experts")
    held = [on(Layout.parse(name), TINY, form="experts") for name in named]
    for source in held:
        for target in held:
            check(every, source, target, plan(source, target, node_of=nodes_of(4)))


@pytest.mark.slow_cases("0")
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(KINDS)))
def test_every_pair_of_layouts_with_all_pipelines(number: int) -> None:
    """Eight layers, so that a pipeline has up to 8 stages; the target begins at the source's middle
    rank.

    Each pair is in one of the forms, and each layout in all of them; all pairs of four ranks are in
    all forms above.
    """
    assert (
        go_through(DEEP, 8, [KINDS[number]], lambda a: [a.num_devices // 2], number, len(KINDS))
        > 500
    )


PLACED = [
    Layout(pipeline=2, stages_per_rank=2),
    Layout(pipeline=2, stages_per_rank=2, turns=True),
    Layout(pipeline=2, stages_per_rank=3),
    Layout(tensor=2, pipeline=2, stages_per_rank=2, turns=True),
    Layout(data=2, fsdp=2, pipeline=2, stages_per_rank=2),
    Layout(pipeline=4, stages_per_rank=2, turns=True),
]


@pytest.mark.parametrize(("form", "tied"), KINDS)
def test_pairs_with_several_stages_on_a_rank(form: str, tied: bool) -> None:
    """Both ways between these and layouts of one stage a rank, and among themselves."""
    every = shapes(DEEP, tied=tied, form=form)
    others = [
        Layout(),
        Layout(tensor=2),
        Layout(pipeline=2),
        Layout(pipeline=4),
        Layout(data=2, fsdp=2, tensor=2),
    ]
    sources = {layout: on(layout, DEEP, tied=tied, form=form) for layout in PLACED + others}
    assert len({str(source) for source in sources.values()}) == len(sources), "no two hold the same"
    for a, source in sources.items():
        for b, target in sources.items():
            if a in PLACED or b in PLACED:
                check(every, source, target, plan(source, target, node_of=nodes_of(2)))


def test_the_check_can_fail() -> None:
    a, b = Layout(tensor=2), Layout(data=2)
    every, source, target = shapes(TINY), on(a, TINY), on(b, TINY)
    good = plan(source, target, node_of=one_node)
    for bad in (
        good[1:],
        [*good, good[0]],
        [good[0]._replace(source=1 - good[0].source), *good[1:]],
    ):
        with pytest.raises(AssertionError):
            check(every, source, target, bad)


def test_a_plan_written_by_hand() -> None:
    """Rows on ranks 0 and 1 become columns on ranks 1 and 2: rank 1 keeps a quarter, the rest is
    sent.
    """
    rows = {r: {"w": (slice(2 * r, 2 * r + 2), slice(0, 4))} for r in (0, 1)}
    columns = {r: {"w": (slice(0, 4), slice(2 * r - 2, 2 * r))} for r in (1, 2)}
    assert set(map(str, plan(rows, columns, node_of=one_node))) == {
        str(ParameterTransfer("w", (slice(0, 2), slice(0, 2)), 0, 1)),
        str(ParameterTransfer("w", (slice(2, 4), slice(0, 2)), 1, 1)),
        str(ParameterTransfer("w", (slice(0, 2), slice(2, 4)), 0, 2)),
        str(ParameterTransfer("w", (slice(2, 4), slice(2, 4)), 1, 2)),
    }


def test_a_rank_of_the_same_node_gives_first() -> None:
    """Four whole copies on ranks 0 to 3, two nodes; ranks 4 and 5 are of the second one's node."""
    every = {"w": (4, 4), "v": (4, 4), "u": (4,)}
    source = {
        rank: {name: build_whole_slice(shape) for name, shape in every.items()} for rank in range(4)
    }
    target = dict.fromkeys((4, 5), source[0])
    node = {0: 0, 1: 0, 2: 1, 3: 1, 4: 1, 5: 1}
    transfers = plan(source, target, node_of=node.__getitem__)
    assert {each.source for each in transfers} == {2, 3}
    assert {
        each.source for each in plan(source, {6: source[0]}, node_of=lambda rank: rank // 2)
    } == {0, 1, 2}


def test_the_least_loaded_gives() -> None:
    """16 equal parameters on 4 ranks go to 4 others that lie elsewhere: each rank sends as much."""
    every = {f"w{n}": (4, 4) for n in range(16)}
    source = {
        rank: {name: build_whole_slice(shape) for name, shape in every.items()} for rank in range(4)
    }
    target = dict.fromkeys(range(4, 8), source[0])
    loads = Counter(each.source for each in plan(source, target, node_of=nodes_of(4)))
    assert loads == {0: 16, 1: 16, 2: 16, 3: 16}


def test_neighbouring_pieces_of_one_rank_are_one_transfer() -> None:
    """Rank 1 lies between cuts that others make; what it gives is one piece, not one a cut."""
    source = {
        0: {"w": (slice(0, 8), slice(0, 4))},
        1: {"w": (slice(0, 8), slice(4, 8))},
        2: {"w": (slice(2, 3), slice(0, 8))},
        3: {"w": (slice(5, 6), slice(0, 8))},
    }
    transfers = plan(source, {1: {"w": (slice(0, 8), slice(0, 8))}}, node_of=one_node)
    own = [each for each in transfers if each.source == 1]
    assert own == [ParameterTransfer("w", (slice(0, 8), slice(4, 8)), 1, 1)]
    check({"w": (8, 8)}, source, {1: {"w": (slice(0, 8), slice(0, 8))}}, transfers)


def test_a_scalar_and_an_empty_part() -> None:
    source: Mapping[int, Mapping[str, Slice]] = {0: {"s": (), "w": (slice(0, 2),)}}
    target: Mapping[int, Mapping[str, Slice]] = {1: {"s": (), "w": (slice(2, 2),)}}
    assert plan(source, target, node_of=one_node) == [ParameterTransfer("s", (), 0, 1)]


@pytest.mark.parametrize("have", [{}, {0: {"w": (slice(0, 3), slice(0, 4))}}])
def test_an_element_that_nobody_has(have: Holdings) -> None:
    with pytest.raises(
        ConfigError,
        match=r"parameter 'w': rank 5 needs \[0:4, 0:4\], and no rank of the source",
    ):
        plan(have, {5: {"w": (slice(0, 4), slice(0, 4))}}, node_of=one_node)


def test_a_plan_costs_a_few_thousand_calls_a_layer_however_many_there_are() -> None:
    def cost(layers: int) -> int:
        sizes = Sizes(num_layers=layers)
        source, target = on(Layout.parse("d4f4t2"), sizes), on(Layout.parse("t4p2"), sizes)
        return calls_of(lambda: plan(source, target, node_of=nodes_of(8)))

    small, large = cost(8), cost(80)
    assert small < 40_000
    assert large < 10 * small
