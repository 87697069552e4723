"""Waiting of pipeline stages, against the orders in which they compute."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from tests.planner.decoders import SMALL, with_settings
from weft.parallel.schedule import SPLIT_BACKWARD_KINDS, Kind, build_order, build_placement
from weft.planner.cost import CallWorkload, estimate_call
from weft.planner.devices import GIB, DeviceRates
from weft.topology import Layout, Mesh

RATES = DeviceRates("hand", 1e9, 1e18, 1e18, 1e18, 0.0, 0.0, 64 * GIB, 128, per_node=8)


def run_schedule(kind: Kind, ranks: int, count: int) -> float:
    """Return the seconds in which each rank waits, if a rank's part of a pass takes 1 s.

    A backward pass takes 2 s, one for the gradients of activations and one for those of weights.
    """
    placement = build_placement(kind, ranks)
    order = build_order(kind, placement, count)
    seconds = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}
    ends: dict[tuple[str, int, int], float] = {}
    free = [0.0] * ranks
    queues = [[action for action in own if action is not None] for own in order]
    while any(queues):
        before = len(ends)
        for rank, queue in enumerate(queues):
            while queue:
                half, stage, number = queue[0].half, queue[0].stage, queue[0].microbatch
                needs = []
                if half == "F" and stage:
                    needs.append(("F", stage - 1, number))
                elif half in "BI":
                    needs.append(("F", stage, number))
                    if stage < placement.num_stages - 1:
                        needs.append(("B", stage + 1, number))
                if any(need not in ends for need in needs):
                    break
                begin = max([free[rank], *(ends[need] for need in needs)])
                free[rank] = begin + seconds[half] / placement.stages_per_rank
                ends["B" if half == "I" else half, stage, number] = free[rank]
                queue.pop(0)
        assert len(ends) > before
    return max(free) - 3.0 * count


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", get_args(Kind))
def test_ranks_wait_as_in_the_schedule(kind: Kind, ranks: int) -> None:
    """All stages have the same work: no head, and all rows are read in the last layer."""
    placement = build_placement(kind, ranks)
    shape = replace(SMALL.shape, layers=8)
    even = with_settings(replace(SMALL, outputs=0, shape=shape), trained=True)
    even = replace(even, splits_backward=kind in SPLIT_BACKWARD_KINDS)
    count = 2 * ranks
    load = CallWorkload("train_step", 100 * count, 0, 100, microbatch=10_000)
    layout = Layout(
        pipeline=ranks, stages_per_rank=placement.stages_per_rank, turns=placement.turns
    )
    found = estimate_call(even, load, Mesh.on_first_devices(layout), RATES)
    forward = 8 / ranks * 10_000 * 2 * (150_000 + 100 * 100) / 1e9
    assert load.count_microbatches(layout) == count
    assert found.parts["products"] == pytest.approx(3 * count * forward)
    assert found.parts["bubble"] == pytest.approx(run_schedule(kind, ranks, count) * forward)
