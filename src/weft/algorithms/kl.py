"""KL estimators, controllers of the KL penalty's weight, and value normalisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import array_api_compat
import numpy as np
import numpy.typing as npt
from jaxtyping import Float

from weft.algorithms.base import Array, exp_ratio
from weft.errors import ConfigError, build_unknown_name_error

ESTIMATORS = ("k1", "k2", "k3")
NORMALIZERS = ("exp", "ma")
K3_BOUND = 10.0  # nats per token
Vector = npt.NDArray[np.float64]


def estimate_kl(
    logprobs: Float[Array, "..."], reference: Float[Array, "..."], estimator: str = "k1"
) -> Float[Array, "..."]:
    """Estimate KL(policy || reference) at each sampled token, in nats, from log-probs.

    `logprobs` and `reference` are the log-probs of the sampled tokens under the policy and under
    the reference model. The result has the same shape. With r = `logprobs` - `reference`, the
    estimators are (Schulman 2020, "Approximating KL divergence"):

        k1 = r                  unbiased, large variance, can be negative
        k2 = r^2 / 2            biased, small variance
        k3 = exp(-r) - 1 + r    unbiased, never negative

    k3 is clipped to at most `K3_BOUND` = 10 nats per token, as in verl, and its gradient is 0 above
    this bound. Otherwise, a token that is much less likely under the policy than under the
    reference could have a k3 of about e^20 (`exp_ratio` clips -r to 20). TRL clips neither k3 nor
    r.

    As loss terms, the estimators behave differently: the gradient of k1 vanishes in expectation,
    and the gradient of k2 is the gradient of the true KL. k3 is the term that DeepSeekMath (2024,
    eq. 4) and TRL add to the loss.
    """
    xp = array_api_compat.array_namespace(logprobs, reference)
    ratio = logprobs - reference
    if estimator == "k1":
        return ratio
    if estimator == "k2":
        return xp.square(ratio) / 2
    if estimator == "k3":
        return xp.clip(exp_ratio(-ratio) - 1 + ratio, None, K3_BOUND)
    raise build_unknown_name_error("KL estimator", estimator, ESTIMATORS)


@runtime_checkable
class KLController(Protocol):
    """Weight of the KL penalty, with a rule for updating it."""

    value: float

    def update(self, kl: float, num_sequences: int) -> None:
        """Update the weight of the KL penalty after a batch of `num_sequences` sequences.

        `kl` is the mean KL of a whole sequence, in nats: the KL is summed over the tokens of each
        sequence and then averaged over the sequences.
        """
        ...

    def state_dict(self) -> dict[str, float]: ...
    def load_state_dict(self, state: Mapping[str, float]) -> None: ...


@dataclass
class FixedKLController:
    """Constant weight of the KL penalty."""

    value: float

    def update(self, kl: float, num_sequences: int) -> None:
        return None

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = float(state["value"])


@dataclass
class AdaptiveKLController:
    """Adaptive weight of the KL penalty, which keeps the KL near a target.

    After each batch of `num_sequences` sequences, the weight `value` is updated as in Ziegler et
    al. 2019, section 2.2:

        value *= 1 + clip(kl / target - 1, -0.2, 0.2) * min(num_sequences / horizon, 1)

    `kl` is the mean KL of a whole sequence: a `target` of 6 means 6 nats per sequence, not per
    token. With a larger `horizon`, the weight changes more slowly.
    """

    value: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        for name in ("target", "horizon"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"adaptive KL: {name}={getattr(self, name)} must be above 0")

    def update(self, kl: float, num_sequences: int) -> None:
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        # The factor is at most 1, so a batch beyond the horizon never flips the sign.
        self.value *= 1.0 + error * min(num_sequences / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = float(state["value"])


@dataclass
class ValueNormalizer:
    """Running mean and standard deviation of returns, for normalising the critic's values.

    The standard deviation is computed from the running means of the returns and of their squares,
    and is at least `min_std`. `type` selects how these means are computed:

        exp   exponential moving average over batches with decay `beta`, divided by 1 - beta^t
              after t batches to correct its bias towards 0
        ma    mean of all returns seen so far

    The averages of `exp` are the same as in PopArt (van Hasselt et al. 2016, section 2.1), but the
    critic's last layer is not rescaled. Before the first `update`, `normalize` and `denormalize`
    leave values unchanged.
    """

    type: str
    beta: float
    min_std: float
    mean: float = 0.0
    mean_square: float = 0.0
    weight: float = 0.0  # exp: 1 - beta^t; ma: number of returns seen

    def __post_init__(self) -> None:
        if self.type not in NORMALIZERS:
            raise build_unknown_name_error("value normalisation", self.type, NORMALIZERS)
        if not 0.0 <= self.beta < 1.0:
            raise ConfigError(f"value_norm_beta={self.beta} must be at least 0 and below 1")

    def update(self, returns: Float[Vector, "T"], mask: Float[Vector, "T"]) -> None:
        """Update the moments with the returns that have mask 1, if there are any."""
        count = float(mask.sum())
        if count == 0.0:
            return
        mean = float((returns * mask).sum()) / count
        square = float((np.square(returns) * mask).sum()) / count
        keep, new = (self.beta, 1.0 - self.beta) if self.type == "exp" else (1.0, count)
        self.mean = (self.mean * keep * self.weight + mean * new) / (keep * self.weight + new)
        self.mean_square = (self.mean_square * keep * self.weight + square * new) / (
            keep * self.weight + new
        )
        self.weight = keep * self.weight + new

    @property
    def std(self) -> float:
        if self.weight:
            return max(float(np.sqrt(max(self.mean_square - self.mean**2, 0.0))), self.min_std)
        return 1.0

    def normalize(self, values: Float[Vector, "T"]) -> Float[Vector, "T"]:
        """Return (values - mean) / std."""
        return (values - self.mean) / self.std

    def denormalize(self, values: Float[Vector, "T"]) -> Float[Vector, "T"]:
        """Return values * std + mean."""
        return values * self.std + self.mean

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "mean_square": self.mean_square, "weight": self.weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean = float(state["mean"])
        self.mean_square = float(state["mean_square"])
        self.weight = float(state["weight"])
