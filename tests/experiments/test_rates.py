"""Figures of devices by name."""

from __future__ import annotations

import pytest

from weft.errors import ConfigError
from weft.experiments._rates import GIB, cpu_rates, gpu_rates


def test_a_gpu_is_known_by_the_name_that_its_driver_gives() -> None:
    found = gpu_rates("NVIDIA H100 80GB HBM3", "bfloat16")
    assert (
        found.name == "H100"
        and found.products == pytest.approx(0.45 * 989e12)
        and found.capacity == 72 * GIB
    )
    assert (
        gpu_rates("NVIDIA L40S", "float32").name == "L40S"
        and gpu_rates("NVIDIA L4", "float32").name == "L4"
    )
    assert gpu_rates("h100", "float32", memory_gb=10).capacity == 10 * GIB
    assert gpu_rates("h100", "float32").products < found.products / 10
    with pytest.raises(ConfigError, match=r"search.gpu='H101': .*did you mean H100"):
        gpu_rates("H101", "bfloat16")


def test_processes_that_share_a_core_are_slower() -> None:
    rates = cpu_rates(2.0, 4.0, 4)
    alone, all_four, a_process = rates.at_work(1, 4), rates.at_work(4, 4), rates.at_work(1, 1)
    assert all_four.products == alone.products / 2 and all_four.launch == 2 * alone.launch
    assert (
        a_process.products == 2 * alone.products == 4 * all_four.products
        and a_process.launch == alone.launch
    )
    assert rates.capacity == 4 * GIB
    assert cpu_rates(2.0, 4.0, 4, threads=1).at_work(1, 1).products == alone.products
    gpu = gpu_rates("H100", "bfloat16")
    assert gpu.at_work(1, 1) == gpu.at_work(8, 8) == gpu


def test_devices_of_one_node_are_joined_better() -> None:
    rates = gpu_rates("H100", "bfloat16", per_node=4)
    assert rates.bandwidth((0, 3)) == rates.link > rates.bandwidth((3, 4)) == rates.net
