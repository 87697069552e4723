"""Times of a GPU's kernels and messages by kind and size, from the figures of its data sheet.

Each kind of operation reaches a share of the data sheet's figure that grows with its size, and every
kernel or message takes a while even if it is tiny. The constants were fitted on published
measurements of an H100 SXM (benchmarks.gpu_rates): products by torch's `linear`, attention by flash
attention 3, and messages by NCCL within a machine, all in bfloat16. Other GPUs are assumed to reach
the same shares of their data sheets. Times of starting kernels from the host are not included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

KERNEL_SECONDS = 3.7e-6  # shortest time of a matrix product
PRODUCT_SHARE = 0.81  # of the peak operations per second, by large products
READ_SHARE = 0.89  # of the memory bandwidth, by large reads
# Products are bound by operations or by reads; where both take equally long, they take
# 2^(1 / BLEND) times as long.
BLEND = 3.2
ATTENTION_SECONDS = 14e-6  # shortest time of attention over packed sequences
ATTENTION_SHARE = 0.66  # of the peak, by attention of very long sequences
HALF_LENGTH = 1090  # tokens of sequences whose attention reaches half of that
# Flash attention goes backward at 0.8 of its forward rate, with five products instead of two (Shah
# et al. 2024, arXiv:2407.08608, figures 5 and 6).
BACKWARD_ATTENTION = 2.5 / 0.8
CACHE_SECONDS = 12.5e-6  # shortest time of a decode step's attention
ELEMENTWISE_SHARE = 0.8  # of the memory bandwidth, by norms and activations
ELEMENTWISE_SECONDS = 3e-6  # shortest time of such a kernel
# Under sustained load the clock falls below that of short measurements (power limit): matrix products
# and attention of training and scoring reach this share of their rates. Adjusted to the fit rows of
# benchmarks.gpu_training.
SUSTAINED_SHARE = 0.68


class KernelTime(NamedTuple):
    """Seconds of a kernel by what bounds it; one of the two is 0."""

    products: float = 0.0
    memory: float = 0.0

    @property
    def seconds(self) -> float:
        return self.products + self.memory


@dataclass(frozen=True)
class GpuKernels:
    """Speed of a GPU's kernels.

    Attributes:
        peak_flops: Operations per second of dense products in the dtype, from the data sheet.
        peak_bandwidth: Bytes per second of the device memory, from the data sheet.
    """

    peak_flops: float
    peak_bandwidth: float

    def time_product(
        self, rows: float, inputs: float, outputs: float, width: int, matrices: float = 1.0
    ) -> KernelTime:
        """Return the time of a product [rows, inputs] x [inputs, outputs].

        `width` is the size of an element in bytes. With several `matrices`, as of experts, each
        processes a part of the rows.
        """
        elements = rows * (inputs + outputs) + matrices * inputs * outputs
        computing = 2 * rows * inputs * outputs / (PRODUCT_SHARE * self.peak_flops)
        reading = width * elements / (READ_SHARE * self.peak_bandwidth)
        seconds = KERNEL_SECONDS + (computing**BLEND + reading**BLEND) ** (1 / BLEND)
        return KernelTime(seconds) if computing > reading else KernelTime(0.0, seconds)

    def time_attention(self, tokens: float, length: float, query: float) -> KernelTime:
        """Return the time of causal attention of `tokens` tokens in sequences of `length` tokens.

        `query` is the width of all query heads.
        """
        share = ATTENTION_SHARE * length / (length + HALF_LENGTH)
        operations = 2 * query * length * tokens  # half of the pairs of tokens
        return KernelTime(ATTENTION_SECONDS + operations / (share * self.peak_flops))

    def time_cache_attention(self, num_bytes: float, operations: float) -> KernelTime:
        """Return the time of attention of a decode step, which reads `num_bytes` of keys and values."""
        reading = num_bytes / (READ_SHARE * self.peak_bandwidth)
        computing = operations / (ATTENTION_SHARE * self.peak_flops)
        seconds = CACHE_SECONDS + max(reading, computing)
        return KernelTime(seconds) if computing > reading else KernelTime(0.0, seconds)

    def time_traffic(self, num_bytes: float, kernels: int) -> KernelTime:
        """Return the time of `kernels` elementwise kernels that read and write `num_bytes` in all."""
        bandwidth = ELEMENTWISE_SHARE * self.peak_bandwidth
        return KernelTime(0.0, kernels * ELEMENTWISE_SECONDS + num_bytes / bandwidth)


# -- messages


@dataclass(frozen=True)
class MessageRates:
    """Speed of one kind of message between the devices of a machine.

    Attributes:
        share: Share of the link's bandwidth that large messages reach, without `share_per_rank`.
        start: Shortest time, in seconds.
        per_rank: Further seconds for each rank of the group, at most `MAX_RING` of them.
        ramp: Seconds by which a message of b bytes takes longer on a link of w bytes per second,
            divided by sqrt(b / w): messages reach the bandwidth only slowly.
        share_per_rank: Further share for each rank of the group, at most `MAX_RING` of them: the
            switch of a machine sums for many ranks.
    """

    share: float
    start: float
    per_rank: float
    ramp: float = 0.0
    share_per_rank: float = 0.0


MAX_RING = 8  # ranks of a machine; beyond, each doubling of the machines adds `HOP_SECONDS`
HOP_SECONDS = 1e-5
MESSAGES = {
    "sum": MessageRates(0.6, 3.7e-6, 1.7e-6, share_per_rank=0.045),
    "gather": MessageRates(0.77, 4.8e-6, 0.6e-6, 3.5e-3),
    "scatter": MessageRates(0.58, 4.7e-6, 0.75e-6),
    "send": MessageRates(0.77, 6e-6, 0.0, 3.5e-3),
    "exchange": MessageRates(0.57, 9e-6, 0.1e-6),
}


def time_message(kind: str, num_bytes: float, bandwidth: float, size: int, nodes: int) -> float:
    """Return the time of a message, in seconds.

    `num_bytes` is what each rank sends, `bandwidth` that of the slowest link, `size` the number of
    ranks, and `nodes` the number of machines on which they are.
    """
    rates = MESSAGES[kind]
    ring = min(size, MAX_RING)
    start = rates.start + rates.per_rank * ring + HOP_SECONDS * math.log2(nodes)
    alone = num_bytes / bandwidth
    share = rates.share + rates.share_per_rank * ring
    return start + alone / share + rates.ramp * math.sqrt(alone)
