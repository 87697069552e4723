"""Orders of a pipeline: every action once, everything made before it is needed, and no two ranks
ever wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

import pytest

from weft.errors import ConfigError
from weft.parallel.schedule import (
    SPLIT_BACKWARD_KINDS,
    Action,
    ComputeAction,
    Kind,
    TransferAction,
    add_transfers,
    build_order,
    build_placement,
    plan_actions,
)
from weft.placement import Placement

KINDS: tuple[Kind, ...] = get_args(Kind)
PLACED = [(kind, None) for kind in KINDS] + [
    ("interleaved_1f1b", 3),
    ("interleaved_zero_bubble", 3),
]
RANKS, MICROBATCHES = range(1, 9), range(1, 17)


def rendezvous(
    lists: Sequence[Sequence[Action]], placement: Placement
) -> list[list[ComputeAction]]:
    """Run the lists where a send ends only when its receiver stands at the receive.

    Returns what each rank computed; a list that cannot go on is an error, and so is an action whose
    inputs are not there.
    """
    at, held = (
        [0] * len(lists),
        [set[tuple[int, int, bool]]() for _ in lists],
    )  # (made by stage, micro-batch, is gradient)
    computed: list[list[ComputeAction]] = [[] for _ in lists]
    left = sum(map(len, lists))
    while left:
        moved = 0
        for rank, own in enumerate(lists):
            while at[rank] < len(own) and isinstance(action := own[at[rank]], ComputeAction):
                compute(action, placement, held[rank])
                computed[rank].append(action)
                at[rank] += 1
                moved += 1
        for rank, own in enumerate(lists):
            if (
                at[rank] < len(own)
                and isinstance(send := own[at[rank]], TransferAction)
                and send.direction == "SEND"
            ):
                peer = placement.get_rank(send.target)
                if at[peer] < len(lists[peer]) and lists[peer][at[peer]] == TransferAction(
                    "RECV", send.source, send.target, send.microbatch
                ):
                    made = (send.source, send.microbatch, send.target < send.source)
                    assert made in held[rank], f"{send} before it is made"
                    held[peer].add(made)
                    at[rank] += 1
                    at[peer] += 1
                    moved += 2
        assert moved, (
            f"nobody can go on: {[own[i] for i, own in zip(at, lists, strict=True) if i < len(own)]}"
        )
        left -= moved
    return computed


def compute(action: ComputeAction, placement: Placement, held: set[tuple[int, int, bool]]) -> None:
    stage, m, last = action.stage, action.microbatch, placement.num_stages - 1
    if action.half == "F":
        assert stage == 0 or (stage - 1, m, False) in held, f"{action} without its states"
        held.add((stage, m, False))
    elif action.half == "W":
        assert (stage, m, True) in held, f"{action} before the input's half"
    else:
        assert (stage, m, False) in held, f"{action} before the forward pass"
        assert stage == last or (stage + 1, m, True) in held, f"{action} without its gradient"
        held.add((stage, m, True))


@pytest.mark.parametrize(("kind", "stages_per_rank"), PLACED)
def test_every_plan_ends_under_rendezvous(kind: Kind, stages_per_rank: int | None) -> None:
    for ranks in RANKS:
        placement = build_placement(kind, ranks, stages_per_rank)
        for count in MICROBATCHES:
            found = rendezvous(plan_actions.__wrapped__(kind, placement, count), placement)
            halves = "FIW" if kind in SPLIT_BACKWARD_KINDS else "FB"
            for rank, own in enumerate(found):
                wanted = Counter(
                    ComputeAction(half, s, m)  # type: ignore[arg-type]
                    for half in halves
                    for s in placement.list_stages(rank)
                    for m in range(count)
                )
                assert Counter(own) == wanted


@pytest.mark.parametrize(("kind", "stages_per_rank"), PLACED)
def test_inference_is_the_forward_half(kind: Kind, stages_per_rank: int | None) -> None:
    for ranks in RANKS:
        placement = build_placement(kind, ranks, stages_per_rank)
        for count in MICROBATCHES:
            lists = plan_actions.__wrapped__(kind, placement, count, forward_only=True)
            found = rendezvous(lists, placement)
            assert Counter(action for own in found for action in own) == Counter(
                ComputeAction("F", stage, m)
                for stage in range(placement.num_stages)
                for m in range(count)
            )


@pytest.mark.parametrize("kind", KINDS)
def test_each_message_follows_what_makes_it(kind: Kind) -> None:
    placement = build_placement(kind, 3)
    for own in plan_actions(kind, placement, 5):
        for number, action in enumerate(own):
            if isinstance(action, TransferAction) and action.direction == "SEND":
                before = [each for each in own[:number] if isinstance(each, ComputeAction)][-1]
                assert (before.stage, before.microbatch) == (action.source, action.microbatch)


def test_1f1b_by_hand() -> None:
    """Two ranks, three micro-batches."""
    first, last = build_order("1f1b", Placement(2), 3)
    assert [f"{a.half}{a.microbatch}" for a in first] == ["F0", "F1", "B0", "F2", "B1", "B2"]
    assert [f"{a.half}{a.microbatch}" for a in last] == ["F0", "B0", "F1", "B1", "F2", "B2"]


def test_1f1b_keeps_few_states() -> None:
    """No rank holds more micro-batches between forward and backward than there are ranks from it
    on.
    """
    for ranks in RANKS:
        for rank, own in enumerate(build_order("1f1b", Placement(ranks), 16)):
            held = peak = 0
            for action in own:
                held += 1 if action.half == "F" else -1
                peak = max(peak, held)
            assert peak == min(16, ranks - rank)


@pytest.mark.parametrize("turns", [False, True])
def test_every_stage_has_one_rank(turns: bool) -> None:
    placement = Placement(4, 2, turns)
    assert sorted(stage for rank in range(4) for stage in placement.list_stages(rank)) == list(
        range(8)
    )
    assert placement.list_stages(0) == ((0, 7) if turns else (0, 4))
    assert placement.last_rank == (0 if turns else 3)


def test_the_simulator_finds_two_ranks_that_wait_for_each_other() -> None:
    placement = Placement(2)
    first: list[Action] = [
        ComputeAction("F", 0, 0),
        ComputeAction("F", 0, 1),
        TransferAction("SEND", 0, 1, 1),
        TransferAction("SEND", 0, 1, 0),
    ]
    last: list[Action] = [
        TransferAction("RECV", 0, 1, 0),
        TransferAction("RECV", 0, 1, 1),
        ComputeAction("F", 1, 0),
        ComputeAction("F", 1, 1),
    ]
    with pytest.raises(AssertionError, match="nobody can go on"):
        rendezvous([first, last], placement)


def test_an_order_that_cannot_be_run_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be run"):
        add_transfers([[ComputeAction("B", 0, 0), ComputeAction("F", 0, 0)]], Placement(1))


def test_what_a_kind_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match="1f1b has one stage per rank, and 2 were"):
        build_placement("1f1b", 2, 2)
    with pytest.raises(ConfigError, match="zbv has 2 stages per rank, and 3 were"):
        build_placement("zbv", 2, 3)
    with pytest.raises(
        ConfigError,
        match="at least 2 stages per rank, and 1 was asked for; with 1 it is zero_bubble",
    ):
        build_placement("interleaved_zero_bubble", 2, 1)
    with pytest.raises(ConfigError, match="'dualpipe' is unknown; known: gpipe, 1f1b"):
        build_placement("dualpipe", 2)  # type: ignore[arg-type]
