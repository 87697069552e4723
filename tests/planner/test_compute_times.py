"""Times of computation from a profile, against numbers that a hand can follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.decoders import SMALL, with_adapters, with_settings
from tests.planner.profiles import KEY, contents
from weft.planner.compute_times import CallCost, ComputeTimes, PassSize
from weft.planner.cost import CallWorkload, estimate_call
from weft.planner.devices import GIB, DeviceRates, estimate_cpu_rates
from weft.planner.profile import DeviceProfile, parse_links, parse_times
from weft.topology import Layout, Mesh

TRAINED = with_settings(SMALL, trained=True)
ADAPTED = with_adapters(TRAINED, 10_000)
PROFILE = DeviceProfile(
    {(KEY, "float32", 1, 1): parse_times(contents())},
    parse_links(contents()["links"]),
    created="2026-01-02",
)
RATES = estimate_cpu_rates(2, 4.0, 2, threads=1).with_profile(PROFILE)
ALONE = RATES.share_cores(1, 1)
# The last layer is shorter where not all rows are read.
LATE = (150_000 - 100 * (100 + 2 * 50)) / 150_000


def mesh(layout: str) -> Mesh:
    made = Layout.parse(layout)
    return Mesh(made, tuple(range(made.num_devices)))


def test_a_profile_is_used_where_it_fits() -> None:
    assert RATES.basis == "a profile of 2026-01-02"
    assert ComputeTimes(SMALL, ALONE, Layout()).is_measured
    assert not ComputeTimes(
        SMALL, ALONE, Layout(tensor=2)
    ).is_measured  # not measured with two tensor ranks
    other = replace(SMALL, shape=replace(SMALL.shape, inner=300))
    assert not ComputeTimes(other, ALONE, Layout()).is_measured
    two_threads = replace(RATES, threads=2).share_cores(1, 1)
    assert not ComputeTimes(SMALL, two_threads, Layout()).is_measured


@pytest.mark.parametrize(
    ("network", "trains", "block", "backward"),
    [
        (SMALL, False, 1.0, 0.0),
        (TRAINED, True, 1.5, 3.0),
        (ADAPTED, True, 1.2, 2.4),
    ],
    ids=["score", "full", "adapters"],
)
def test_a_pass_is_that_of_its_kind(
    network: object, trains: bool, block: float, backward: float
) -> None:
    times = ComputeTimes(network, ALONE, Layout())  # type: ignore[arg-type]
    found = times.compute_pass(PassSize(250, 100, 100, trains))
    assert found.block.seconds == pytest.approx(block * 2.5e-4)
    assert found.block_backward.seconds == pytest.approx(backward * 2.5e-4)
    embedding = 3e-3 if trains else 0.0
    assert found.ends.seconds == pytest.approx(1e-3 + 2e-3 + embedding)


def test_a_repeated_head_is_a_scoring_one_more() -> None:
    size = PassSize(250, 100, 100, True, repeats_head=True)
    found = ComputeTimes(TRAINED, ALONE, Layout()).compute_pass(size)
    assert found.ends.seconds == pytest.approx(1e-3 + 2 * 2e-3 + 3e-3)


def test_a_value_head_costs_nothing() -> None:
    value = replace(SMALL, shape=replace(SMALL.shape, vocab=1))
    found = ComputeTimes(value, ALONE, Layout()).compute_pass(PassSize(250, 100, 250, False))
    assert found.ends.seconds == pytest.approx(1e-3)


def test_a_training_call_adds_up() -> None:
    """Two optimizer steps on 200 tokens each, of which 80 are read."""
    load = CallWorkload("train_step", 4, 60, 40, num_updates=2)
    found = estimate_call(TRAINED, load, mesh("d1"), ALONE)
    layer = 1.5 * 3 * 2e-4
    layers = layer * (4 - LATE * (1 - 80 / 200))
    update = 1e-3 + 1e-8 * TRAINED.shape.parameters
    once = layers + 1e-3 + 80 / 100 * 2e-3 + 3e-3 + update
    assert found.seconds == pytest.approx(2 * once, rel=1e-9)
    assert found.parts["memory"] == pytest.approx(2 * (update + 3e-3), rel=1e-9)
    assert found.parts["overhead"] == pytest.approx(2e-3)


def test_other_optimizers_read_fewer_values() -> None:
    sgd = with_settings(TRAINED, optimizer="sgd")
    updates = [ComputeTimes(each, ALONE, Layout()).compute_update(1e6) for each in (TRAINED, sgd)]
    assert updates[0].seconds == pytest.approx(1e-3 + 1e-2)
    assert updates[1].seconds == pytest.approx(3 / 4 * updates[0].seconds)


def test_a_pass_of_one_number_of_threads_is_not_that_of_another() -> None:
    """Interpolated times are kept, for each number of threads."""
    slow = parse_times(contents(passes=contents()["passes"]))
    times = {(KEY, "float32", 1, 1): parse_times(contents()), (KEY, "float32", 1, 2): slow}
    both = estimate_cpu_rates(4, 4.0, 2).with_profile(DeviceProfile(times))
    for threads in (1, 2):
        rates = replace(both, threads=threads).share_cores(1, 1)
        found = ComputeTimes(SMALL, rates, Layout())
        found.compute_pass(PassSize(250, 100, 100, False))
    assert both.profile is not None and len(both.profile.memo) == 2


def test_a_generation_adds_up() -> None:
    load = CallWorkload("generate", 4, 100, 20)
    found = estimate_call(SMALL, load, mesh("d1"), ALONE)
    prefill = 4 * 400e-6 + 1e-3
    step = 4 * (1e-3 + 4 * (1e-4 + 1e-6 * 110)) + 2e-3
    assert found.seconds == pytest.approx(prefill + 20 * step, rel=1e-9)
    # Adapters make the products of a layer take twice as long in this profile.
    adapted = estimate_call(ADAPTED, load, mesh("d1"), ALONE)
    assert adapted.seconds == pytest.approx(prefill + 20 * (2 * step - 2e-3), rel=1e-9)
    # The stages of a pipeline have modules that no kernel computes as a whole.
    staged = ComputeTimes(SMALL, ALONE, Layout(pipeline=2)).compute_decode(4, 110)
    assert staged[0].seconds == pytest.approx(1.5 * (1e-3 + 4 * (1e-4 + 1e-6 * 110)))
    # Four samples of one prompt compute it once.
    grouped = estimate_call(SMALL, replace(load, samples=4), mesh("d1"), ALONE)
    assert grouped.seconds == pytest.approx(4 * 100e-6 + 1e-3 + 20 * step, rel=1e-9)


def test_processes_that_compute_together_are_slower() -> None:
    both = RATES.share_cores(2, 2)
    assert both.slowdown == 1.25 and ALONE.slowdown == 1.0
    assert RATES.share_cores(4, 4).slowdown == 2 * 1.25  # two threads on each core
    load = CallWorkload("inference", 4, 60, 40)
    alone = estimate_call(SMALL, load, mesh("d1"), ALONE)
    assert estimate_call(SMALL, load, mesh("d1"), both).seconds == pytest.approx(
        1.25 * alone.seconds
    )


def test_messages_are_those_of_the_profile() -> None:
    assert RATES.time_send(501_000, (0, 1)) == pytest.approx(1e-4 + 501e-6)
    assert RATES.time_sum(501_000, (0, 1), 2) == pytest.approx(1e-4 + 501e-6)
    # Four ranks send half as much again as two.
    node = replace(RATES, per_node=4)
    assert node.time_sum(400_000, range(4), 4) == pytest.approx(1e-4 + 600e-6)
    assert node.time_gather(400_000, range(4), 4) == pytest.approx(1e-4 + 600e-6)
    # Between machines nothing was measured.
    assert RATES.time_send(1e9, (0, 2)) == pytest.approx(1.0 + RATES.latency)


def test_half_of_the_sums_of_shards_are_their_own() -> None:
    plain = DeviceRates("hand", 1e9, 1e9, 1e9, 1e8, 0.5, 0.0, GIB, 128, per_node=4)
    assert plain.time_gather(4e9, range(4), 4) == 3.5
    assert plain.time_scatter(4e9, range(2), 2) == 2.5
    assert plain.time_sum(4e9, range(4), 4) == 7.0


def test_a_cost_is_split_in_proportion() -> None:
    assert CallCost(1.0, 3.0).split(8.0) == CallCost(2.0, 6.0)
    assert CallCost().split(2.0) == CallCost(products=2.0)
