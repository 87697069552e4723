"""What training costs, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.engine.device import BestMatmulRate, TokenCost, find_peak_rates, parse_gpu_model


def test_cost_of_training_by_hand() -> None:
    lengths: Any = np.array([3, 1])
    assert TokenCost(10, 2).count_training_flops(lengths) == 3 * (2 * 10 * 4 + 4 * 2 * (6 + 1))
    assert TokenCost(10, 2, backward=1).flops_per_token == 2 * 2 * 10
    assert TokenCost(10, 2, late=4).count_training_flops(lengths, rows=1, across=5) == 3 * (
        2 * (10 * 4 - 4 * 3) + 4 * 2 * (6 + 1 + 5)
    )


def test_ranks_that_share_tokens_share_the_cost() -> None:
    cost, lengths = TokenCost(products=40, attention=8, late=12), np.array([3, 5])
    assert (
        cost.split_over_ranks(4).count_training_flops(lengths, rows=2.0)
        == cost.count_training_flops(lengths, rows=2.0) / 4
    )


def test_a_step_is_never_faster_than_the_best_rate() -> None:
    rate = BestMatmulRate(lambda: 100.0)
    assert rate.compute_mfu(50.0, 1.0) == 0.5
    assert rate.compute_mfu(400.0, 2.0) == 1.0, "faster than was measured: now this is the best"
    assert rate.compute_mfu(50.0, 1.0) == 0.25


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", (989, 3350)),
        ("NVIDIA H100 PCIe", (756, 2000)),
        ("NVIDIA H200", (989, 4800)),
        ("NVIDIA A100-SXM4-40GB", (312, 1555)),
        ("NVIDIA A100-SXM4-80GB", (312, 2039)),
        ("NVIDIA A100 80GB PCIe", (312, 1935)),
        ("NVIDIA L4", (121, 300)),
        ("NVIDIA A10G", (70, 600)),
        ("NVIDIA GeForce RTX 4090", (165, 1008)),
        ("Tesla T4", (65, 320)),
    ],
)
def test_peaks_by_the_names_that_drivers_give(name: str, peak: tuple[float, float]) -> None:
    found = find_peak_rates(name)
    assert found is not None and (found.tflops, found.gb_per_s) == peak


def test_a_gpu_that_nobody_knows_has_no_peak() -> None:
    assert (
        parse_gpu_model("NVIDIA H100 80GB HBM3") == "H100"
        and parse_gpu_model("NVIDIA L400") is None
    )
    assert find_peak_rates("NVIDIA L400") is None and find_peak_rates("") is None
