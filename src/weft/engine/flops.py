"""Floating-point operations of training, for `mfu`, and peak rates of GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TokenCost:
    """Operations of a network per token.

    `products` is the number of parameters that a token is multiplied with, including the experts it
    is routed to and excluding the embedding, which is a look-up. `late` is the number of those that
    are applied only to rows whose output is read: the head, and the part of the last layer after
    attention. `attention` is layers x heads x head size. `backward` is the cost of a backward pass
    in forward passes: 2, or 1 if most weights are frozen and need no gradient.
    """

    products: int
    attention: int
    backward: int = 2
    late: int = 0

    def count_training_flops(
        self, lengths: npt.NDArray[np.int64], *, rows: float | None = None, across: float = 0.0
    ) -> float:
        """Return the operations of a forward and backward pass over segments of these lengths.

        They are 2 per parameter and token, and 4 per head dimension and (query, key) pair. Causal
        attention has L (L + 1) / 2 pairs in a segment of length L (Chowdhery et al. 2022,
        arXiv:2204.02311, appendix B, counts all L^2), and `across` more pairs between segments.
        Outputs are read at `rows` tokens, or at all tokens if it is None. Recomputation is not
        counted.
        """
        tokens = float(lengths.sum())
        pairs = float((lengths.astype(np.float64) * (lengths + 1) / 2).sum()) + across
        products = self.products * tokens - self.late * (0.0 if rows is None else tokens - rows)
        return (1 + self.backward) * (2.0 * products + 4.0 * self.attention * pairs)

    def split_over_ranks(self, ranks: int) -> TokenCost:
        """Return one rank's cost per token if `ranks` ranks share the tokens of every pack."""
        return replace(
            self,
            products=self.products // ranks,
            attention=self.attention // ranks,
            late=self.late // ranks,
        )

    @property
    def flops_per_token(self) -> float:
        """Number of matmul operations per token in training."""
        return (1 + self.backward) * 2.0 * self.products


class BestMatmulRate:
    """Best rate of matmuls on a device: the measured rate, or that of a faster training step."""

    def __init__(self, measure: Callable[[], float]) -> None:
        self._measure = measure

    @functools.cached_property
    def best(self) -> float:
        """Operations per second; measured on first use."""
        return self._measure()

    def compute_mfu(self, operations: float, seconds: float) -> float:
        """Return the MFU: the rate of a step as a share of the best rate, at most 1."""
        rate = operations / seconds
        self.best = max(self.best, rate)
        return rate / self.best


@dataclass(frozen=True)
class PeakRates:
    """Peak rates of a GPU according to its maker.

    `tflops` is the rate of dense bfloat16 products (float16 without bfloat16), summed in float32;
    `gb_per_s` is the memory bandwidth.
    """

    tflops: float
    gb_per_s: float


# Rates from the makers' data sheets, without sparsity. The first entry whose words are all in the
# GPU's name applies.
PEAKS: tuple[tuple[str, PeakRates], ...] = (
    ("B200", PeakRates(2250, 8000)),
    ("H200 NVL", PeakRates(835, 4800)),
    ("H200", PeakRates(989, 4800)),
    ("H100 PCIe", PeakRates(756, 2000)),
    ("H100 NVL", PeakRates(835, 3900)),
    ("H100", PeakRates(989, 3350)),
    ("H800", PeakRates(989, 3350)),
    ("H20", PeakRates(148, 4000)),
    ("A100 80GB SXM", PeakRates(312, 2039)),
    ("A100 80GB", PeakRates(312, 1935)),
    ("A100", PeakRates(312, 1555)),
    ("A800", PeakRates(312, 2039)),
    ("L40S", PeakRates(362, 864)),
    ("L40", PeakRates(181, 864)),
    ("L4", PeakRates(121, 300)),
    ("A10G", PeakRates(70, 600)),
    ("A10", PeakRates(125, 600)),
    ("A30", PeakRates(165, 933)),
    ("A40", PeakRates(150, 696)),
    ("RTX 5090", PeakRates(209, 1792)),
    ("RTX 4090", PeakRates(165, 1008)),
    ("RTX 3090", PeakRates(71, 936)),
    ("RTX A6000", PeakRates(155, 768)),
    ("RTX 6000 Ada", PeakRates(364, 960)),
    ("V100", PeakRates(125, 900)),
    ("T4", PeakRates(65, 320)),
    ("MI300X", PeakRates(1307, 5300)),
)


def parse_gpu_model(name: str) -> str | None:
    """Return the GPU model for a driver name, or None if it is not in the table.

    For example, `NVIDIA A100-SXM4-80GB` gives `A100 80GB SXM`.
    """
    words = name.replace("-", " ").replace("SXM4", "SXM").replace("SXM5", "SXM").split()
    return next((known for known, _ in PEAKS if set(known.split()) <= set(words)), None)


def find_peak_rates(name: str) -> PeakRates | None:
    """Return the peak rates of the GPU with this driver name, or None if the table lacks it."""
    model = parse_gpu_model(name)
    return None if model is None else dict(PEAKS)[model]
