"""Estimates of seconds and bytes, against what they are made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.decoders import decoder, with_adapters, with_settings
from weft.planner.cost import (
    CallWorkload,
    estimate_call_seconds,
    estimate_role_memory,
    estimate_transfer_seconds,
)
from weft.planner.devices import GIB, DeviceRates
from weft.topology import Layout, Mesh

# Numbers that a hand can follow: 1 GFLOP/s, 1 GB/s of memory and of links, nothing that a layer or
# an exchange takes by itself.
RATES = DeviceRates("hand", 1e9, 1e9, 1e9, 1e8, 0.0, 0.0, 64 * GIB, 128, per_node=4)
NETWORK = decoder(
    layers=4,
    hidden=100,
    query=100,
    key=50,
    inner=400,
    vocab=1000,
    active=150_000,
    embedding=100_000,
    outputs=100_000,
)
TRAINED = with_settings(NETWORK, trained=True)
SCORE = CallWorkload("inference", 8, 60, 40)
TRAIN = replace(SCORE, method="train_step", num_updates=2)
SAMPLE = replace(SCORE, method="generate")
PARAMETERS = 4 * 150_000 + 200_000


def mesh(layout: str, first: int = 0) -> Mesh:
    made = Layout.parse(layout)
    return Mesh(made, tuple(range(first, first + made.num_devices)))


def test_a_forward_pass_is_its_products() -> None:
    layers = (
        800 * 4 * 2 * (150_000 + 100 * 100)
    )  # tokens, layers, 2 operations an element, and attention over 100 positions
    head = 8 * 40 * 2 * 100_000  # of the answers alone
    assert estimate_call_seconds(NETWORK, SCORE, mesh("d1"), RATES) == pytest.approx(
        (layers + head) / 1e9, rel=1e-12
    )
    assert estimate_call_seconds(NETWORK, SCORE, mesh("d4"), RATES) == pytest.approx(
        (layers + head) / 4e9, rel=1e-12
    )


def test_a_backward_pass_is_two_more_and_recomputation_one() -> None:
    forward = estimate_call_seconds(NETWORK, SCORE, mesh("d1"), RATES)
    # weights, gradients and two moments, read or written three times
    update = PARAMETERS * 4 * 4 * 3 / 1e9
    assert estimate_call_seconds(TRAINED, TRAIN, mesh("d1"), RATES) == pytest.approx(
        3 * forward + 2 * update, rel=1e-12
    )
    again = with_settings(TRAINED, recompute=1)
    assert estimate_call_seconds(again, TRAIN, mesh("d1"), RATES) == pytest.approx(
        4 * forward + 2 * update, rel=1e-12
    )
    twice = replace(TRAIN, num_epochs=2)
    assert estimate_call_seconds(TRAINED, twice, mesh("d1"), RATES) == pytest.approx(
        2 * (3 * forward + 2 * update), rel=1e-12
    )


def test_adapters_save_the_gradients_of_the_weights_that_are_frozen() -> None:
    forward = estimate_call_seconds(NETWORK, SCORE, mesh("d1"), RATES)
    adapted = with_adapters(TRAINED, PARAMETERS // 100)
    update = 2 * PARAMETERS / 100 * 4 * 4 * 3 / 1e9
    assert estimate_call_seconds(adapted, TRAIN, mesh("d1"), RATES) == pytest.approx(
        2.01 * forward + update, rel=1e-12
    )
    slow = replace(
        RATES, flops=1e15, memory_bandwidth=1e15
    )  # what remains is what tensor ranks send: as much as in full training
    sent = [
        estimate_call_seconds(network, replace(TRAIN, num_updates=0), mesh("t2"), slow)
        for network in (adapted, TRAINED)
    ]
    assert sent[0] == pytest.approx(sent[1], rel=1e-3)


def test_copies_sum_their_gradients_and_shards_gather_their_weights() -> None:
    alone = estimate_call_seconds(TRAINED, TRAIN, mesh("d1"), RATES)
    update = 2 * PARAMETERS * 4 * 4 * 3 / 1e9
    copies = (alone - update) / 2 + update + 2 * 2 * PARAMETERS * 4 / 2 / 1e9
    assert estimate_call_seconds(TRAINED, TRAIN, mesh("d2f1"), RATES) == pytest.approx(
        copies, rel=1e-12
    )
    shards = (
        (alone - update) / 2
        + update / 2
        + 2 * PARAMETERS * 4 / 2 / 1e9
        + 2 * PARAMETERS * 4 / 2 / 1e9
    )
    assert estimate_call_seconds(TRAINED, TRAIN, mesh("d2f2"), RATES) == pytest.approx(
        shards, rel=1e-12
    )


def test_pipelines_wait_and_tensor_ranks_send() -> None:
    alone = estimate_call_seconds(NETWORK, SCORE, mesh("d1"), RATES)
    states = 800 * 100 * 4
    assert estimate_call_seconds(NETWORK, SCORE, mesh("p2"), RATES) == pytest.approx(
        2 * alone / 2 + states / 1e9, rel=1e-12
    )
    many = replace(SCORE, microbatch=100)  # 8 of them
    assert estimate_call_seconds(NETWORK, many, mesh("p2"), RATES) == pytest.approx(
        alone / 2 * 9 / 8 + states / 1e9, rel=1e-12
    )
    sums = 2 * 4 * 2 * states / 2 / 1e9
    assert estimate_call_seconds(NETWORK, SCORE, mesh("t2"), RATES) == pytest.approx(
        alone / 2 + sums, rel=1e-12
    )


def test_another_node_is_further_away() -> None:
    near = estimate_call_seconds(TRAINED, TRAIN, mesh("d2f1", 0), RATES)
    far = estimate_call_seconds(TRAINED, TRAIN, Mesh(Layout.parse("d2f1"), (3, 4)), RATES)
    assert far - near == pytest.approx(2 * 2 * PARAMETERS * 4 / 2 * (1 / 1e8 - 1 / 1e9), rel=1e-9)


def test_a_decode_step_reads_the_weights_and_stages_do_not_share_it() -> None:
    slow = replace(RATES, flops=1e15)  # reads of memory are all that counts
    weights = 40 * (4 * 150_000 + 100_000) * 4 / 1e9
    cache = 40 * 8 * 80 * 2 * 4 * 50 * 4 / 1e9
    assert estimate_call_seconds(NETWORK, SAMPLE, mesh("d1"), slow) == pytest.approx(
        weights + cache, rel=1e-3
    )
    assert estimate_call_seconds(NETWORK, SAMPLE, mesh("d2"), slow) == pytest.approx(
        weights + cache / 2, rel=1e-3
    )
    assert estimate_call_seconds(NETWORK, SAMPLE, mesh("p2"), slow) >= estimate_call_seconds(
        NETWORK, SAMPLE, mesh("d1"), slow
    )
    fast = replace(slow, link_bandwidth=1e15)
    assert estimate_call_seconds(NETWORK, SAMPLE, mesh("t2"), fast) == pytest.approx(
        (weights + cache) / 2, rel=1e-3
    )
    two_rounds = replace(slow, most_sequences=4)
    assert estimate_call_seconds(NETWORK, SAMPLE, mesh("d1"), two_rounds) == pytest.approx(
        2 * weights + cache, rel=1e-3
    )


def test_weights_that_are_there_are_not_moved() -> None:
    whole = PARAMETERS * 4 / 1e9
    assert estimate_transfer_seconds(TRAINED, mesh("d2"), mesh("d2"), RATES) == 0.0
    assert estimate_transfer_seconds(TRAINED, mesh("t2"), mesh("d2"), RATES) == pytest.approx(
        whole / 2, rel=1e-12
    )
    assert estimate_transfer_seconds(TRAINED, mesh("d2"), mesh("t2"), RATES) == 0.0
    assert estimate_transfer_seconds(TRAINED, mesh("d1"), mesh("d1", 1), RATES) == pytest.approx(
        whole, rel=1e-12
    )
    assert estimate_transfer_seconds(TRAINED, mesh("d1"), mesh("d2", 2), RATES) == pytest.approx(
        2 * whole, rel=1e-12
    )  # both from one
    adapters = with_adapters(TRAINED, 1000)
    assert estimate_transfer_seconds(adapters, mesh("d1"), mesh("d1", 1), RATES) == pytest.approx(
        4e-6, rel=1e-12
    )


def test_memory_is_shared_by_shards_tensor_ranks_and_stages() -> None:
    held = {
        layout: estimate_role_memory(TRAINED, [TRAIN], Layout.parse(layout), RATES)
        for layout in ("d2f1", "d2f2", "t2", "p2")
    }
    assert (
        held["d2f1"].parameters == PARAMETERS * 4 and held["d2f1"].optimizer == 2 * PARAMETERS * 4
    )
    for layout in ("d2f2", "t2", "p2"):
        assert held[layout].permanent == held["d2f1"].permanent // 2
    gathered = 200_000 + 2 * 150_000  # embedding and output matrix, a layer and the next
    # and a layer's gradient
    assert held["d2f2"].call == held["d2f1"].call + gathered * 4 + 150_000 * 4
    copy = estimate_role_memory(TRAINED, [SAMPLE], Layout(), RATES, own=False)
    assert copy.optimizer == copy.gradients == 0 and copy.cache == 2 * 4 * 50 * 8 * 100 * 4
