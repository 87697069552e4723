"""Selection of tokens with a high covariance of log-prob and advantage (Clip-Cov, KL-Cov)."""

from __future__ import annotations

import numpy as np

from weft import randomness
from weft.algorithms.ppo import (
    HighCovariance,
    compute_covariances,
    select_clip_cov_rows,
    select_kl_cov_rows,
)
from weft.data.sample import SequenceSample
from weft.errors import ConfigError, build_unknown_name_error
from weft.host._rows import CompletionRows, Vector
from weft.host.base import ConfiguredHostFunction, HostContext
from weft.registry import register_function


@register_function("high_covariance")
class HighCovarianceFunction(ConfiguredHostFunction):
    """Host function that selects the tokens on which Clip-Cov or KL-Cov acts.

    The output key `high_covariance` is 1 for selected completion tokens and 0 for all others.
    `method` is the algorithm: "clip" for Clip-Cov, "kl" for KL-Cov; `weft.algorithms.ppo`
    describes both. `share` is the fraction of all trained tokens to select. Clip-Cov draws these
    tokens at random from those with a covariance between `low` and `high`.

    Input keys: `logprobs` and `advantages`, with one value per completion token, and `loss_mask`
    and `prompt` if present.
    """

    options_class = HighCovariance

    def __init__(self, options: HighCovariance) -> None:
        if options.method not in ("clip", "kl"):
            raise build_unknown_name_error("covariance control", options.method, ("clip", "kl"))
        is_empty_range = options.method == "clip" and options.low >= options.high
        if not 0.0 < options.share <= 1.0 or is_empty_range:
            raise ConfigError(
                f"high_covariance: share={options.share} must be in (0, 1], and low={options.low} "
                f"must be below high={options.high}"
            )
        self.options = options

    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample:
        rows = CompletionRows(batch)
        covariance = compute_covariances(
            rows.read_tokens("logprobs"), rows.read_tokens("advantages"), rows.mask
        )
        if self.options.method == "clip":
            order = self._draw_random_order(batch, rows, context)
            chosen = select_clip_cov_rows(
                covariance, self.options.share, self.options.low, self.options.high, order
            )
        else:
            chosen = select_kl_cov_rows(covariance, self.options.share)
        trained = np.isfinite(covariance)
        if trained.any():
            context.record("covariance", float(covariance[trained].mean()))
            context.record("chosen_fraction", float(chosen[trained].mean()))
        return rows.build_token_sample(high_covariance=chosen.astype(np.float64))

    def _draw_random_order(
        self, batch: SequenceSample, rows: CompletionRows, context: HostContext
    ) -> Vector:
        """Return a uniform random number for each completion token [T].

        Of the candidate tokens, Clip-Cov selects those with the smallest numbers.

        A token's number depends only on the seed, the step, the id, the completion's index and the
        token's position, not on the order and layout of the batch.
        """
        draws = []
        index = dict.fromkeys(batch.ids, 0)
        for group, length in zip(rows.group.tolist(), rows.lengths.tolist(), strict=True):
            id = batch.ids[group]
            key = randomness.derive_key(context.seed, "clip_cov", context.step, id, index[id])
            draws.append(randomness.draw_uniforms(key, np.arange(length)))
            index[id] += 1
        return np.concatenate([np.zeros(0), *draws])
