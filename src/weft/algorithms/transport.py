"""AOT: alignment of the score distributions of better and worse completions.

The scores of the better completions should be distributed above those of the worse ones, regardless
of which pair a completion belongs to (Melnyk et al. 2024, "Distributional Preference Alignment of
LLMs via Optimal Transport", arXiv 2406.05882). To this end, the scores on both sides are sorted,
and scores of the same rank are compared. Sorting needs the whole batch. The host function
`optimal_transport` therefore provides each completion's counterpart as the key `partner`, and the
batch must be trained in one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import array_api_compat
import numpy as np
import numpy.typing as npt
from jaxtyping import Float

from weft.algorithms.base import Array, Loss, RowBatch, Sample, Stat, fixed
from weft.algorithms.preferences import compute_sigmoid_loss
from weft.algorithms.reward import count_pairs
from weft.algorithms.scores import compute_completion_scores, compute_pair_stats

TRANSPORTED = ("aot", "aot_unpaired")


def find_sorted_partners(
    one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return, for each element of `one`, the element of `other` with the same rank, [P].

    Ties are ranked in their original order.
    """
    partners = np.empty_like(one)
    partners[np.argsort(one, kind="stable")] = np.sort(other, kind="stable")
    return partners


@dataclass(frozen=True)
class TransportLoss(Loss):
    """AOT loss: mean of -log sigmoid(beta (a - b)) over values a and b that are matched by sorting.

    `loss_type` determines these values:

        aot            a is log pi(better) - log pi(worse) of a pair under the policy, and b is the
                       same difference under the reference
        aot_unpaired   a is the log-ratio of policy to reference for a better completion, and b is
                       the log-ratio for a worse completion

    Before the model is updated, the host function `optimal_transport` sorts all a and all b of the
    batch. Values at the same position are matched. The function outputs the key `partner`, with one
    number per completion:

        aot            for the better completion of a pair: the b that is matched with the pair's a
        aot_unpaired   for a better completion: the b that is matched with its a;
                       for a worse completion: the a that is matched with its b

    No gradient flows through `partner`.

    The loss reads the keys `rank`, `ref_logprobs`, `partner` and, if present, `comparison`.
    `label_smoothing` has the same meaning as in cDPO. The metrics are those of `PairwiseLoss`.
    """

    loss_type: str
    beta: float
    label_smoothing: float

    outputs = frozenset({"logprobs"})
    unit = "group"

    def denominators(self, minibatch: Sample) -> Mapping[str, float]:
        """Return the number of pairs in the minibatch, under the key `pairs`."""
        return {"pairs": float(count_pairs(minibatch).sum())}

    def __call__(
        self, out: Mapping[str, Array], batch: RowBatch, total: Mapping[str, float]
    ) -> tuple[Array, Mapping[str, Stat]]:
        xp = array_api_compat.array_namespace(out["logprobs"])
        ratios, logps = compute_completion_scores(out["logprobs"], batch["ref_logprobs"], batch)
        better, worse = batch.pairs()
        partner = batch["partner"]
        if self.loss_type == "aot":
            sums = compute_completion_scores(out["logprobs"], None, batch)[0]
            each = self._compute_each(
                xp.take(sums, better) - xp.take(sums, worse) - xp.take(partner, better)
            )
        else:
            each = self._average_both_sides(
                self._compute_each(xp.take(ratios, better) - xp.take(partner, better)),
                self._compute_each(xp.take(partner, worse) - xp.take(ratios, worse)),
            )
        rewards = (
            self.beta * fixed(xp.take(ratios, better)),
            self.beta * fixed(xp.take(ratios, worse)),
        )
        both = xp.take(logps, better), xp.take(logps, worse)
        stats = compute_pair_stats(rewards, both, (self.beta * both[0], self.beta * both[1]))
        return xp.sum(each) / max(total["pairs"], 1.0), stats

    def _compute_each(self, delta: Float[Array, "P"]) -> Float[Array, "P"]:
        return compute_sigmoid_loss(delta, self.beta, self.label_smoothing)

    def _average_both_sides(
        self, one: Float[Array, "P"], other: Float[Array, "P"]
    ) -> Float[Array, "P"]:
        """Return the mean of two losses, but with the gradient of their sum.

        `one` is the loss of the better completions, and `other` that of the worse ones. Each is
        computed over all comparisons, so the mean of both is reported. However, the gradient of
        each flows only through the completions on its own side, so the gradients are added.
        """
        whole = one + other
        return whole - 0.5 * fixed(whole)
