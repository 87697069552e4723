"""Host function that corrects for the mismatch between the sampler and the trained network."""

from __future__ import annotations

import numpy as np

from weft.algorithms.ppo import CORRECTIONS, SamplerCorrection, compute_sampler_weights
from weft.data.sample import SequenceSample
from weft.errors import ConfigError, build_unknown_name_error
from weft.host._rows import CompletionRows
from weft.host.base import ConfiguredHostFunction, HostContext
from weft.registry import register_function


@register_function("sampler_correction")
class SamplerCorrectionFunction(ConfiguredHostFunction):
    """Host function that computes `sampler_weights`, importance weights for the policy loss.

    The weights correct for differences between the log-probs of the sampler and those of the
    trained network; see `weft.algorithms.ppo`.

    Input keys, with one value per completion token: `logprobs` by the sampler, `old_logprobs` by
    the trained network with the same weights, and `loss_mask` and `prompt` if present.

    Metrics over trained tokens:

    - `weight`: mean of the weights before they are bounded
    - `weight_max`: maximum of the weights before they are bounded
    - `bounded_fraction`: fraction of weights that are truncated or set to 0
    - `effective_fraction`: (sum of weights)^2 / (tokens * sum of squared weights)
    """

    options_class = SamplerCorrection

    def __init__(self, options: SamplerCorrection) -> None:
        if options.correction not in CORRECTIONS:
            raise build_unknown_name_error("sampler correction", options.correction, CORRECTIONS)
        if not options.high >= 1.0 or not 0.0 <= (options.low or 0.0) <= 1.0:
            raise ConfigError(
                f"sampler_correction: high={options.high} must be at least 1 and low={options.low} "
                f"between 0 and 1, so that a "
                f"ratio of 1 "
                "is not changed"
            )
        self.options = options

    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample:
        rows = CompletionRows(batch)
        mask = rows.mask
        trainer = rows.read_tokens("old_logprobs")
        sampler = rows.read_tokens("logprobs")
        weights, ratio = compute_sampler_weights(
            trainer,
            sampler,
            mask,
            rows.lengths,
            self.options.correction,
            self.options.high,
            self.options.low,
        )
        trained = mask != 0.0
        trained_weights = weights[trained]
        unbounded = ratio[trained]
        if len(trained_weights):
            context.record("weight", float(unbounded.mean()))
            context.record("weight_max", float(unbounded.max()))
            context.record("bounded_fraction", float((trained_weights != unbounded).mean()))
            context.record(
                "effective_fraction",
                float(
                    trained_weights.sum() ** 2
                    / max(len(trained_weights) * np.square(trained_weights).sum(), 1e-12)
                ),
            )
        return rows.build_token_sample(sampler_weights=weights)
