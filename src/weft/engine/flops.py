"""Operation counts of training for MFU (model FLOPs utilization), and peak rates of GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TokenCost:
    """Sizes of a network that determine its number of operations per token.

    Attributes:
        products: Number of weights that are multiplied with each token's hidden states. It includes
            only the experts to which a token is routed, and excludes the embedding.
        attention: Number of layers x number of heads x head size.
        backward: Cost of a backward pass relative to a forward pass: 2, or 1 if most weights are
            frozen and need no gradient.
        late: Part of `products` that is used only for tokens whose output is needed, such as the
            number of weights of the output layer.
    """

    products: int
    attention: int
    backward: int = 2
    late: int = 0

    def count_training_flops(
        self, lengths: npt.NDArray[np.int64], *, rows: float | None = None, across: float = 0.0
    ) -> float:
        """Return the floating-point operations of a forward and a backward pass over a pack.

        `lengths` contains the number of tokens of each segment of the pack, usually a sequence.
        `across` is the number of (query, key) pairs between segments, for example between a shared
        prefix and its continuations. The output layer is computed for `rows` tokens, or for all
        tokens if `rows` is None.

        A forward pass has 2 operations per parameter and token, and 4 per head dimension and
        (query, key) pair. A backward pass has `backward` times as many; recomputation is not
        counted. Attention is causal, so a segment of length L has L (L + 1) / 2 pairs. Chowdhery et
        al. 2022 (arXiv:2204.02311, appendix B) count all L^2 pairs instead.
        """
        tokens = float(lengths.sum())
        pairs = float((lengths.astype(np.float64) * (lengths + 1) / 2).sum()) + across
        products = self.products * tokens - self.late * (0.0 if rows is None else tokens - rows)
        return (1 + self.backward) * (2.0 * products + 4.0 * self.attention * pairs)

    def split_over_ranks(self, ranks: int) -> TokenCost:
        """Return the cost of one rank under context parallelism.

        `ranks` is the number of ranks that divide the tokens of each pack. The cost is still per
        token of the whole pack, so it is 1 / `ranks` of the total.
        """
        return replace(
            self,
            products=self.products // ranks,
            attention=self.attention // ranks,
            late=self.late // ranks,
        )

    @property
    def flops_per_token(self) -> float:
        """Number of floating-point operations per token in training, except those of attention."""
        return (1 + self.backward) * 2.0 * self.products


class BestMatmulRate:
    """Highest matmul rate known for a device, in operations per second.

    This is the measured rate, or the rate of the fastest training step so far if that is higher.
    """

    def __init__(self, measure: Callable[[], float]) -> None:
        self._measure = measure

    @functools.cached_property
    def best(self) -> float:
        """Highest known rate in operations per second, measured on the first access."""
        return self._measure()

    def compute_mfu(self, operations: float, seconds: float) -> float:
        """Return the MFU (model FLOPs utilization) of a training step, at most 1.

        This is the step's rate, `operations` operations in `seconds` seconds, divided by the best
        known rate. A rate above the best known rate becomes the new best rate.
        """
        rate = operations / seconds
        self.best = max(self.best, rate)
        return rate / self.best


@dataclass(frozen=True)
class PeakRates:
    """Peak rates of a GPU according to its manufacturer.

    `tflops` is the rate of dense bfloat16 products with float32 accumulation (float16 products if
    the GPU lacks bfloat16); `gb_per_s` is the memory bandwidth.
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
    """Return the GPU model for the device name that the driver reports, or None if unknown.

    For example, the model of `NVIDIA A100-SXM4-80GB` is `A100 80GB SXM`.
    """
    words = name.replace("-", " ").replace("SXM4", "SXM").replace("SXM5", "SXM").split()
    return next((known for known, _ in PEAKS if set(known.split()) <= set(words)), None)


def find_peak_rates(name: str) -> PeakRates | None:
    """Return the peak rates of a GPU, or None if the GPU is not known.

    `name` is the device name that the driver reports.
    """
    model = parse_gpu_model(name)
    return None if model is None else dict(PEAKS)[model]
