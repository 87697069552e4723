"""AOT: the better completions' scores as a distribution should lie above the worse ones', whichever
pair they come from.

Melnyk et al. 2024, "Distributional Preference Alignment of LLMs via Optimal Transport", arXiv
2406.05882. Both sides are sorted and compared rank by rank. The sort is a statistic of the whole
batch, so each completion gets what it is compared with as a key, `partner`, from the host function
`optimal_transport`; the batch must be trained in one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import array_api_compat
import numpy as np
import numpy.typing as npt
from jaxtyping import Float

from weft.algorithms.base import Array, Loss, RowBatch, Sample, Stat, fixed
from weft.algorithms.preferences import sigmoid_loss
from weft.algorithms.reward import num_pairs
from weft.algorithms.scores import completion_scores, pair_stats

TRANSPORTED = ("aot", "aot_unpaired")


def sorted_partners(
    one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """[P]: for each element of `one` the element of `other` that has the same rank; equal ones keep
    their order.
    """
    made = np.empty_like(one)
    made[np.argsort(one, kind="stable")] = np.sort(other, kind="stable")
    return made


@dataclass(frozen=True)
class TransportLoss(Loss):
    """Mean over pairs of the smoothed -log sigmoid(beta (a - b)), where a and b have one rank among
    the batch's.

    `aot`: a is the policy's log pi(better) - log pi(worse), b the reference's. `aot_unpaired`: a is
    the log-ratio to the reference of a better completion, b that of a worse one. `label_smoothing`
    as in cDPO.

    Keys: `rank` (and `comparison`), `ref_logprobs`, `partner`: for aot b, at the better completion
    of a pair; for aot_unpaired b at a better completion and a at a worse one. There both sides of a
    comparison have a gradient, each with the other as a constant. Metrics as `PairwiseLoss`.
    """

    loss_type: str = "aot"
    beta: float = 0.1
    label_smoothing: float = 0.0

    outputs = frozenset({"logprobs"})
    unit = "group"

    def denominators(self, minibatch: Sample) -> Mapping[str, float]:
        """`pairs`: pairs of all ids."""
        return {"pairs": float(num_pairs(minibatch).sum())}

    def __call__(
        self, out: Mapping[str, Array], batch: RowBatch, total: Mapping[str, float]
    ) -> tuple[Array, Mapping[str, Stat]]:
        xp = array_api_compat.array_namespace(out["logprobs"])
        ratios, logps = completion_scores(out["logprobs"], batch["ref_logprobs"], batch)
        better, worse = batch.pairs()
        partner = batch["partner"]
        if self.loss_type == "aot":
            sums = completion_scores(out["logprobs"], None, batch)[0]
            each = self._each(
                xp.take(sums, better) - xp.take(sums, worse) - xp.take(partner, better)
            )
        else:
            each = self._both_sides(
                self._each(xp.take(ratios, better) - xp.take(partner, better)),
                self._each(xp.take(partner, worse) - xp.take(ratios, worse)),
            )
        rewards = (
            self.beta * fixed(xp.take(ratios, better)),
            self.beta * fixed(xp.take(ratios, worse)),
        )
        both = xp.take(logps, better), xp.take(logps, worse)
        stats = pair_stats(rewards, both, (self.beta * both[0], self.beta * both[1]))
        return xp.sum(each) / max(total["pairs"], 1.0), stats

    def _each(self, delta: Float[Array, "P"]) -> Float[Array, "P"]:
        return sigmoid_loss(delta, self.beta, self.label_smoothing)

    def _both_sides(self, one: Float[Array, "P"], other: Float[Array, "P"]) -> Float[Array, "P"]:
        """Each comparison is counted at both its ends: the value of one half of their sum, with the
        gradient of the whole.
        """
        whole = one + other
        return whole - 0.5 * fixed(whole)
