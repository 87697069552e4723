"""Times of a GPU's kernels and messages, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.decoders import SMALL, with_settings
from weft.planner.compute_times import ComputeTimes, PassSize, compute_expert_imbalance
from weft.planner.cost import CallWorkload, estimate_call
from weft.planner.devices import find_gpu_rates
from weft.planner.gpu_kernels import (
    BLEND,
    CACHE_SECONDS,
    ELEMENTWISE_SECONDS,
    KERNEL_SECONDS,
    MESSAGES,
    GpuKernels,
)
from weft.topology import Layout, Mesh

KERNELS = GpuKernels(1e15, 3e12)
H100 = find_gpu_rates("H100", "bfloat16")


def test_large_products_are_bound_by_operations_and_small_ones_by_reads() -> None:
    large = KERNELS.time_product(1e5, 1e4, 1e4, 2)
    assert large.seconds == pytest.approx(2e13 / 0.81e15, rel=0.01) and large.memory == 0
    small = KERNELS.time_product(1, 1e4, 1e4, 2)
    assert small.products == 0
    assert small.seconds == pytest.approx(KERNEL_SECONDS + 2e8 / (0.89 * 3e12), rel=0.01)
    tiny = KERNELS.time_product(1, 10, 10, 2)
    assert tiny.seconds == pytest.approx(KERNEL_SECONDS, rel=1e-3)
    # Equally bound by both
    both = replace(KERNELS, peak_flops=2e8 / 0.81, peak_bandwidth=2 * (1e4 + 1e4 + 1e8) / 0.89)
    assert both.time_product(1, 1e4, 1e4, 2).seconds == pytest.approx(2 ** (1 / BLEND), rel=1e-3)


def test_more_work_never_takes_less_time_and_never_gets_less_efficient() -> None:
    before = rate = 0.0
    for power in range(0, 16):
        rows = 2.0**power
        seconds = KERNELS.time_product(rows, 4096, 4096, 2).seconds
        assert seconds >= before and rows / seconds > rate
        before, rate = seconds, rows / seconds


def test_experts_read_all_their_weights() -> None:
    one = KERNELS.time_product(8, 1000, 1000, 2)
    eight = KERNELS.time_product(8, 1000, 1000, 2, matrices=8)
    assert eight.memory - one.memory == pytest.approx(7 * 2e6 / (0.89 * 3e12), rel=0.02)


def test_attention_of_longer_sequences_reaches_more() -> None:
    long, short = (KERNELS.time_attention(1e6, length, 4096) for length in (1e5, 1090))
    # half of the share, and a longer sequence has more to do
    assert short.seconds == pytest.approx(2 * 4096 * 1090 * 1e6 / (0.33e15), rel=1e-3)
    assert long.seconds == pytest.approx(2 * 4096 * 1e5 * 1e6 / 0.66e15, rel=0.02)


def test_a_step_reads_its_cache() -> None:
    found = KERNELS.time_cache_attention(3e9, 1e9)
    assert found.products == 0 and found.memory == pytest.approx(CACHE_SECONDS + 1e-3 / 0.89)
    assert KERNELS.time_traffic(0, 3).seconds == pytest.approx(3 * ELEMENTWISE_SECONDS)


def test_messages_between_machines_share_their_ports() -> None:
    """Eight GPUs of each of two machines send over eight ports, two over one of each."""
    large = 8e9
    whole = H100.time_sum(large, range(16), 16)
    apart = H100.time_sum(large, (0, 8), 2)
    inside = H100.time_sum(large, range(8), 8)
    share = MESSAGES["sum"].share + 8 * MESSAGES["sum"].share_per_rank
    assert inside == pytest.approx(large * 2 * 7 / 8 / (share * 450e9), rel=0.01)
    assert whole == pytest.approx(large * 2 * 15 / 16 / (share * 400e9), rel=0.01)
    assert apart > 5 * whole
    # Small messages take their latency, which grows with the ranks.
    assert 5e-6 < H100.time_sum(100, range(2), 2) < H100.time_sum(100, range(8), 8) < 2e-5
    assert H100.time_exchange(8e8, range(8), 8) < H100.time_gather(8e9, range(8), 8)


def test_a_gpus_host_starts_kernels_ahead() -> None:
    """A pass over few tokens waits for the host, one over many does not."""
    small, large = (
        ComputeTimes(SMALL, H100, Layout()).compute_pass(PassSize(tokens, 100, 10, False))
        for tokens in (10, 1e8)
    )
    assert small.block.seconds == pytest.approx(H100.launch)
    assert large.block.overhead == 0.0


def test_expert_parallel_ranks_wait_for_the_busiest() -> None:
    """128 experts on eight ranks: 16 each, and 0.6 / 4 more on the busiest rank."""
    network = replace(SMALL, experts=128)
    assert compute_expert_imbalance(network, 1) == 1.0
    assert compute_expert_imbalance(network, 8) == pytest.approx(1.15)
    assert compute_expert_imbalance(replace(network, expert_load=3.0), 8) == pytest.approx(1.5)
    sparse = with_settings(
        replace(SMALL, experts=8, chosen_experts=2, active=10**8), dtype="bfloat16"
    )
    shape = replace(SMALL.shape, hidden=5000, inner=20000)
    sparse = replace(sparse, shape=shape)
    size = PassSize(1e6, 100, 10, False)
    alone, shared = (
        ComputeTimes(sparse, H100, Layout(data=2, fsdp=1, expert=expert))
        .compute_pass(size)
        .block.products
        for expert in (1, 2)
    )
    rest = 2 * 1e6 * 5000 * 300  # q, k, v and o: not divided
    experts = 2 * 1e6 * 5000 * 20000 * 2
    assert shared / alone == pytest.approx((rest + 1.3 * experts) / (rest + experts), rel=0.01)


def test_gathered_weights_need_new_graphs() -> None:
    """Six graphs of four layers, started three times each."""
    load = CallWorkload("generate", 8, 60, 40)
    starts = 6 * 3 * 4 * H100.launch
    mesh = Mesh(Layout(data=2, fsdp=1), (0, 1))
    sharded = Mesh(Layout(data=2, fsdp=2), (0, 1))
    kept, gathered = (estimate_call(SMALL, load, each, H100).parts for each in (mesh, sharded))
    assert gathered["overhead"] - kept["overhead"] == pytest.approx(starts)
    away = replace(load, offloads=frozenset({"weights"}))
    moved = estimate_call(SMALL, away, mesh, H100).parts
    assert moved["overhead"] - kept["overhead"] == pytest.approx(starts)
