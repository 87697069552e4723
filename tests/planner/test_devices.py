"""Figures of devices by name."""

from __future__ import annotations

import pytest

from weft.errors import ConfigError
from weft.planner.devices import GIB, RESERVED_GIB, estimate_cpu_rates, find_gpu_rates


def test_a_gpu_is_known_by_the_name_that_its_driver_gives() -> None:
    found = find_gpu_rates("NVIDIA H100 80GB HBM3", "bfloat16")
    assert (
        found.name == "H100"
        and found.flops == pytest.approx(0.81 * 989e12)
        and found.capacity == (79.1 - RESERVED_GIB) * GIB
        and found.host_bandwidth == 0.8 * 64e9
    )
    assert (
        find_gpu_rates("NVIDIA L40S", "float32").name == "L40S"
        and find_gpu_rates("NVIDIA L4", "float32").name == "L4"
    )
    assert find_gpu_rates("h100", "float32", memory_gb=10).capacity == 10 * GIB
    # An A100 of 40 GB: the whole memory, of which a run gives a share to its KV cache
    assert find_gpu_rates("A100", "bfloat16", memory_gb=37.9).memory == pytest.approx(39.4 * GIB)
    assert find_gpu_rates("h100", "float32").flops < found.flops / 10
    with pytest.raises(ConfigError, match=r"search.gpu='H101': .*did you mean H100"):
        find_gpu_rates("H101", "bfloat16")


@pytest.mark.parametrize("name", ["H1000", "XH100Y", "H100Y", "XH100", "GH200", "RTX A4090"])
def test_a_name_within_another_word_is_another_gpu(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"search.gpu='{name}'"):
        find_gpu_rates(name, "bfloat16")


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("H100-SXM", "H100"),
        ("h100_pcie", "H100"),
        ("NVIDIA H100 NVL", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("RTX4090", "4090"),
        ("Tesla V100-SXM2-16GB", "V100"),
    ],
)
def test_a_gpu_is_known_by_a_word_of_its_name(name: str, gpu: str) -> None:
    assert find_gpu_rates(name, "bfloat16").name == gpu


def test_processes_that_share_a_core_are_slower() -> None:
    rates = estimate_cpu_rates(2.0, 4.0, 4)
    alone, all_four, a_process = (
        rates.share_cores(1, 4),
        rates.share_cores(4, 4),
        rates.share_cores(1, 1),
    )
    assert all_four.flops == alone.flops / 2 and all_four.launch == 2 * alone.launch
    assert (
        a_process.flops == 2 * alone.flops == 4 * all_four.flops
        and a_process.launch == alone.launch
    )
    assert rates.capacity == 4 * GIB
    assert estimate_cpu_rates(2.0, 4.0, 4, threads=1).share_cores(1, 1).flops == alone.flops
    gpu = find_gpu_rates("H100", "bfloat16")
    assert gpu.share_cores(1, 1) == gpu.share_cores(8, 8) == gpu


def test_devices_of_one_node_are_joined_better() -> None:
    rates = find_gpu_rates("H100", "bfloat16", per_node=4)
    near, far = rates.time_send(1e9, (0, 3)), rates.time_send(1e9, (3, 4))
    assert far - near == pytest.approx(
        1e9 / 0.77 * (1 / rates.network_bandwidth - 1 / rates.link_bandwidth), rel=0.05
    )
