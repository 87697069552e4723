"""Clusters with several kinds of GPU: how they are written, and what their devices have in common."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.decoders import SMALL, with_settings
from weft.errors import ConfigError
from weft.planner.candidates import PlacementUnit
from weft.planner.cluster import (
    DeviceCluster,
    build_cluster,
    find_cluster,
    find_least_memory,
    parse_gpus,
)
from weft.planner.cost import CallWorkload
from weft.planner.devices import find_gpu_rates, get_usable_memory
from weft.planner.problem import PlacementProblem
from weft.planner.search import search_placement
from weft.topology import Layout, Mesh


def test_groups_are_read_in_the_order_of_the_devices() -> None:
    assert parse_gpus("H100:8, A100:16", 24, 8) == [("H100", 8), ("A100", 16)]
    assert parse_gpus("H100", 24, 8) == [("H100", 24)]
    assert parse_gpus("H100:4,A100:4", 8, 4) == [("H100", 4), ("A100", 4)]


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        ("H100:8,A100:4", "names 12 devices, and the run has 16"),
        ("H100:12,A100:4", "12 x H100 are not whole machines of 8 devices"),
        ("H100:8,A100", "'A100' cannot be read; write GPU:NUMBER"),
        ("H100:8,", "'' cannot be read"),
        ("H100:0,A100:16", "'H100:0' cannot be read"),
        ("H100:8,A101:8", "the speed of A101 is not known"),
    ],
)
def test_lists_that_do_not_fit_the_run_are_refused(gpu: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_cluster(gpu, "bfloat16", None, 16, 8)


def test_the_slowest_and_smallest_count() -> None:
    cluster = find_cluster("H100:8,V100:8", "bfloat16", None, 16, 8)
    fast, slow = (find_gpu_rates(name, "bfloat16", None, 8) for name in ("H100", "V100"))
    assert cluster.find_kinds(range(8)) == (0,)
    assert cluster.find_kinds(range(6, 10)) == (0, 1)
    assert cluster.list_rates([0]) == (fast,)
    for each in cluster.list_rates([0, 1]):
        assert each.capacity == slow.capacity
        assert each.link_bandwidth == slow.link_bandwidth
        assert each.network_bandwidth == min(fast.network_bandwidth, slow.network_bandwidth)
    assert cluster.rates.name == "H100:8,V100:8" and cluster.rates.flops == slow.flops
    assert find_least_memory(cluster) == get_usable_memory("V100")


def build_problem(cluster: DeviceCluster, load: CallWorkload, *meshes: Mesh) -> PlacementProblem:
    unit = PlacementUnit("actor", ("train",), meshes, trains=True)
    return PlacementProblem(
        [unit],
        {"actor": with_settings(SMALL, trained=True)},
        {"train": load},
        ["train"],
        {"train": ()},
        cluster.rates,
        sum(group.count for group in cluster.groups),
        cluster=cluster,
    )


def test_a_call_on_two_kinds_is_as_slow_as_on_the_slow_one() -> None:
    fast = replace(find_gpu_rates("H100", "bfloat16", None, 1), kernels=None)
    slow = replace(fast, name="slow", flops=fast.flops / 4)
    cluster = build_cluster([(fast, 1), (slow, 1)])
    load = CallWorkload("train_step", 4096, 512, 512)
    one, other = (Mesh(Layout(), (rank,)) for rank in (0, 1))
    both = Mesh(Layout(data=2), (0, 1))
    problem = build_problem(cluster, load, one, other, both)
    seconds = [problem.estimate([index]).seconds["train"] for index in range(3)]
    assert seconds[1] > 1.2 * seconds[0]
    of_slow = build_problem(build_cluster([(slow, 1), (slow, 1)]), load, one, other, both)
    assert seconds[2] == pytest.approx(of_slow.estimate([2]).seconds["train"])
    alone = build_problem(cluster, load, one, other)
    assert search_placement(alone, [1]).best.meshes["train"] == one


def test_memory_is_that_of_the_device_on_which_a_call_runs() -> None:
    large = replace(find_gpu_rates("H100", "bfloat16", None, 1), capacity=1e9)
    small = replace(large, name="small", capacity=1e6)
    cluster = build_cluster([(large, 1), (small, 1)])
    load = CallWorkload("train_step", 8, 16, 16)
    one, other = (Mesh(Layout(), (rank,)) for rank in (0, 1))
    problem = build_problem(cluster, load, one, other)
    assert problem.estimate([0]).excess_bytes == 0
    used = problem.estimate([1])
    assert used.excess_bytes == pytest.approx(used.peak_bytes - 1e6)
    assert search_placement(problem, [1]).best.meshes["train"] == one
