"""Figures of devices by name."""

from __future__ import annotations

import pytest

from weft.errors import ConfigError
from weft.experiments._rates import GIB, cpu_rates, gpu_rates


def test_a_gpu_is_known_by_the_name_that_its_driver_gives() -> None:
    found = gpu_rates("NVIDIA H100 80GB HBM3", "bfloat16")
    assert found.name == "H100" and found.products == pytest.approx(0.45 * 989e12) and found.capacity == 72 * GIB
    assert gpu_rates("NVIDIA L40S", "float32").name == "L40S" and gpu_rates("NVIDIA L4", "float32").name == "L4"
    assert gpu_rates("h100", "float32", memory_gb=10).capacity == 10 * GIB
    assert gpu_rates("h100", "float32").products < found.products / 10
    with pytest.raises(ConfigError, match=r"search.gpu='H101': .*did you mean H100"):
        gpu_rates("H101", "bfloat16")


def test_processes_that_share_a_core_are_slower() -> None:
    one, half = cpu_rates(1.0, 4.0, 2), cpu_rates(0.5, 4.0, 2)
    assert half.products == one.products / 2 and half.launch == 2 * one.launch and half.capacity == 4 * GIB


def test_devices_of_one_node_are_joined_better() -> None:
    rates = gpu_rates("H100", "bfloat16", per_node=4)
    assert rates.bandwidth((0, 3)) == rates.link > rates.bandwidth((3, 4)) == rates.net
