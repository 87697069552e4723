"""Waiting of pipeline stages, against the orders in which they compute."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from tests.planner.decoders import SMALL, with_settings
from weft.parallel.schedule import SPLIT_BACKWARD_KINDS, Kind, build_order, build_placement
from weft.planner.cost import CallWorkload, estimate_call
from weft.planner.decoder_sizes import DecoderSizes
from weft.planner.devices import GIB, DeviceRates, estimate_cpu_rates
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


LAYER, ENDS = 150_000, 100_000  # elements of SMALL: of a layer, and of a matrix at either end
# A pass takes no time here, but the output matrix weighs as much as two thirds of a layer.
TRAIN = CallWorkload("train_step", 8, 0, 100)
SLOW_LINKS = replace(RATES, flops=1e18, link_bandwidth=1e9, network_bandwidth=1e9)


@pytest.mark.parametrize(
    ("layout", "tied", "stored"),
    [
        # Four layers: the last of two stages has fewer, or as many with its matrix.
        ("p2", False, 2 * LAYER + ENDS),
        ("p2", True, 2 * LAYER + ENDS),
        ("p4", True, LAYER + ENDS),
        ("t2p2", True, (2 * LAYER + ENDS) / 2),
        ("d2f2p2", True, (2 * LAYER + ENDS) / 2),
        ("d1", False, 4 * LAYER + 2 * ENDS),
        ("d1", True, 4 * LAYER + ENDS),
    ],
)
def test_the_first_and_the_last_stage_have_the_ends(layout: str, tied: bool, stored: float) -> None:
    network = tie(SMALL) if tied else SMALL
    assert network.count_stored_parameters(Layout.parse(layout)) == stored


def test_frozen_layers_are_not_trained_where_they_are() -> None:
    """Two of four layers are frozen, so that the second of two stages trains the others and a head."""
    shape = replace(SMALL.shape, trainable=2 * LAYER + ENDS)
    network = replace(SMALL, shape=shape, frozen_layers=2)
    for layout, trained in (
        ("d1", 2 * LAYER + ENDS),
        ("p2", 2 * LAYER + ENDS),
        ("p4", LAYER + ENDS),
    ):
        found = network.count_stored_parameters(Layout.parse(layout), trainable=True)
        assert found == trained, layout
    # With all layers frozen, only the output matrix is trained.
    head = replace(SMALL, shape=replace(SMALL.shape, trainable=ENDS), frozen_layers=4)
    for layout in ("d1", "p2"):
        assert head.count_stored_parameters(Layout.parse(layout), trainable=True) == ENDS


def tie(network: DecoderSizes) -> DecoderSizes:
    """The decoder whose embedding is its output matrix, too."""
    parameters = 4 * LAYER + ENDS
    shape = replace(network.shape, tied=True, parameters=parameters, trainable=parameters)
    return replace(network, shape=shape)


def test_copies_of_a_tied_matrix_are_summed_between_the_ends() -> None:
    mesh = Mesh(Layout.parse("p2"), (0, 1))
    apart = estimate_call(with_settings(SMALL, trained=True), TRAIN, mesh, SLOW_LINKS)
    tied = estimate_call(with_settings(tie(SMALL), trained=True), TRAIN, mesh, SLOW_LINKS)
    # Of a sum, each of two ranks sends half a tensor twice.
    assert tied.parts["messages"] - apart.parts["messages"] == pytest.approx(ENDS * 4 / 1e9)
    # Only adapters are trained: nothing to sum.
    adapters = replace(SMALL.shape, tied=True, trainable=1000)
    adapted = with_settings(replace(SMALL, shape=adapters), trained=True)
    assert estimate_call(adapted, TRAIN, mesh, SLOW_LINKS).parts["messages"] == pytest.approx(
        apart.parts["messages"]
    )


def test_each_end_gathers_its_matrix_and_waits_for_the_other_one() -> None:
    network = with_settings(tie(SMALL), trained=True)
    found = {
        name: estimate_call(network, TRAIN, Mesh(Layout.parse(name), (0, 1, 2, 3)), SLOW_LINKS)
        for name in ("d2f2p2", "d2f1p2")
    }
    # Gathered: two layers twice, the matrix once; scattered: all of them. Half of it is sent.
    shards = (2 * 2 * LAYER + ENDS + 2 * LAYER + ENDS) * 4 / 2 / 1e9
    # In place of that, copies sum their gradients, twice the half; and a tied matrix is summed whole.
    sums = (2 * LAYER + ENDS) * 4 / 1e9
    difference = found["d2f2p2"].parts["messages"] - found["d2f1p2"].parts["messages"]
    assert difference == pytest.approx(shards - sums - ENDS * 4 / 2 / 1e9)
    waited = found["d2f2p2"].parts["bubble"] - found["d2f1p2"].parts["bubble"]
    assert waited == pytest.approx(shards)


def test_all_stages_update_at_the_same_time() -> None:
    """Passes keep one of two processes busy at a time, on one core; the optimizer step both."""
    cpu = estimate_cpu_rates(1, 4.0, 2, 1)
    mesh = Mesh(Layout.parse("p2"), (0, 1))
    adamw, sgd = (
        estimate_call(
            with_settings(SMALL, trained=True, optimizer=name), TRAIN, mesh, cpu.share_cores(1, 2)
        )
        for name in ("adamw", "sgd")
    )
    together = cpu.share_cores(2, 2).memory_bandwidth
    assert together == cpu.share_cores(1, 2).memory_bandwidth / 2
    # One state of SGD in place of two
    assert adamw.parts["memory"] - sgd.parts["memory"] == pytest.approx(
        (2 * LAYER + ENDS) * 4 * 3 / together
    )
