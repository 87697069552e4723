"""Copies to host memory and back, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.decoders import SMALL, with_adapters, with_settings
from weft.planner.cost import CallWorkload, estimate_call
from weft.planner.devices import GIB, DeviceRates
from weft.planner.offload import HOST_MEMORY
from weft.topology import Layout, Mesh

# 1 GFLOP/s, and 1 MB/s to the host: nothing hides the copies but the time of one layer in four.
RATES = DeviceRates(
    "hand", 1e9, 1e9, 1e9, 1e8, 0.0, 0.0, 64 * GIB, 128, per_node=4, host_bandwidth=1e6
)
SCORE = CallWorkload("inference", 8, 60, 40)
TRAIN = replace(SCORE, method="train_step", num_updates=2)
PARAMETERS = 4 * 150_000 + 200_000
FROZEN = with_settings(SMALL, weights_leave=True)
TRAINED = with_settings(SMALL, trained=True)
ONE, TWO = Mesh(Layout(), (0,)), Mesh(Layout(data=2, fsdp=2), (0, 1))


def compute(
    network: object, load: CallWorkload, mesh: Mesh, rates: DeviceRates
) -> tuple[float, float]:
    """Return the seconds of offloading, and all others."""
    found = estimate_call(network, load, mesh, rates)  # type: ignore[arg-type]
    return found.parts["offload"], found.seconds - found.parts["offload"]


def test_weights_arrive_while_layers_compute() -> None:
    load = replace(SCORE, offloads=frozenset({"weights"}))
    copies = PARAMETERS * 4 / 1e6
    offload, computed = compute(FROZEN, load, ONE, RATES)
    assert computed < copies and offload == pytest.approx(copies - computed)
    # The first layer's arrive before anything is computed.
    offload, _ = compute(FROZEN, load, ONE, replace(RATES, host_bandwidth=1e8))
    assert offload == pytest.approx(copies / 100 / 4)
    # Ranks copy their shards, and devices that compute in host memory nothing.
    offload, computed = compute(FROZEN, load, TWO, RATES)
    assert offload == pytest.approx(copies / 2 - computed, rel=0.01)
    cpu = replace(RATES, host_bandwidth=float("inf"))
    assert compute(FROZEN, load, ONE, cpu)[0] == 0.0
    assert compute(FROZEN, SCORE, ONE, RATES)[0] == 0.0


def test_trained_weights_are_copied_back() -> None:
    load = replace(TRAIN, offloads=frozenset({"weights"}))
    network = with_settings(TRAINED, weights_leave=True)
    fast = replace(RATES, host_bandwidth=1e8)
    copies = PARAMETERS * 4 / 1e8
    assert compute(network, load, ONE, fast)[0] == pytest.approx(copies / 4 + copies)
    half = with_settings(network, dtype="bfloat16")  # and masters of 4 bytes
    assert compute(half, load, ONE, fast)[0] == pytest.approx(1.5 * copies / 4 + 1.5 * copies)


def test_offloaded_state_arrives_and_leaves() -> None:
    load = replace(TRAIN, offloads=frozenset({"optimizer"}))
    copies = 2 * PARAMETERS * 4 / 1e6
    updating = PARAMETERS * 4 * 4 * 3 / 1e9
    assert compute(TRAINED, load, ONE, RATES)[0] == pytest.approx(2 * copies - updating)
    assert compute(with_settings(TRAINED, optimizer="sgd"), load, ONE, RATES)[0] < copies


def test_updates_in_host_memory_take_its_bandwidth() -> None:
    """Two steps; copies of gradients and weights are hidden where the link is fast."""
    network = with_settings(TRAINED, offload_optimizer=True)
    fast = replace(RATES, host_bandwidth=1e15)
    update = PARAMETERS * 4 * 4 * 3 / HOST_MEMORY
    offload, computed = compute(network, TRAIN, ONE, fast)
    assert offload == pytest.approx(2 * update)
    on_device = 2 * PARAMETERS * 4 * 4 * 3 / 1e9
    assert computed == pytest.approx(compute(TRAINED, TRAIN, ONE, fast)[1] - on_device)
    copies = PARAMETERS * 4 / 1e6
    offload, computed = compute(network, TRAIN, ONE, RATES)
    assert offload == pytest.approx(2 * (copies + copies) - computed)
    adapted = with_adapters(network, PARAMETERS // 100)
    assert compute(adapted, TRAIN, ONE, fast)[0] == pytest.approx(2 * update / 100)
