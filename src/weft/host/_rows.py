"""View of a batch as vectors over tokens or completions, and shaping of rewards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.algorithms.advantages import RewardShaping, compute_segment_sums, compute_starts
from weft.algorithms.base import to_host_array
from weft.algorithms.kl import estimate_kl
from weft.data.sample import SequenceSample
from weft.errors import DataError
from weft.host._results import MAX_REWARD
from weft.host.base import HostContext

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CompletionRows:
    """View of a batch as flat NumPy vectors.

    A vector of shape [T] has one entry per completion token, over all completions; one of shape [S]
    has one entry per completion. Values are float64 unless stated otherwise.
    """

    batch: SequenceSample

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each completion, int64 [S]."""
        return self.batch.lengths["completion"].astype(np.int64)

    def read_tokens(self, key: str) -> Vector:
        """Return the values of a key that has one value per completion token, [T].

        Raises `DataError` if the key has a different number of values for some completion.
        """
        if not np.array_equal(self.batch.lengths[key], self.lengths):
            raise DataError(f"key {key!r} must have one value per completion token")
        return to_host_array(self.batch.data[key]).astype(np.float64)

    def read_sequences(self, key: str) -> Vector:
        """Return the values of a key, one per completion, [S].

        If the key has one value per id, each completion gets the value of its id. Raises
        `DataError` for any other number of values.
        """
        values = to_host_array(self.batch.data[key]).astype(np.float64)
        group = self.batch.group_of("completion")
        if len(values) == len(group):
            return values
        if len(values) == self.batch.num_ids:
            return values[group]
        raise DataError(f"key {key!r} has {len(values)} values for {len(group)} completions")

    def read_rewards(self) -> Vector:
        """Return the values of the key "rewards", one per completion, [S].

        Raises `DataError`, naming the id, if a reward is so large that the loss would overflow
        float32.
        """
        values = self.read_sequences("rewards")
        too_large = np.flatnonzero(np.isfinite(values) & (np.abs(values) > MAX_REWARD))
        if len(too_large):
            index = int(too_large[0])
            raise DataError(
                f"{self.batch.ids[int(self.group[index])]}: a completion's reward is "
                f"{values[index]:g}; the absolute value of a reward must be at most "
                f"{MAX_REWARD:g}, or the loss is not finite: check the reward model, "
                f"or scale its scores"
            )
        return values

    def read_tokens_or_sequences(self, key: str) -> Vector:
        """Return the values of a key: [S] if it has one per completion or id, and [T] otherwise.

        Raises `DataError` if the batch does not have the key.
        """
        if key not in self.batch.data:
            available = ", ".join(self.batch.data) or "none"
            raise DataError(
                f"there is no key {key!r}; the node reads: {available}; add it to the "
                f"node's input_keys"
            )
        if (self.batch.lengths[key] == 1).all():
            return self.read_sequences(key)
        return self.read_tokens(key)

    @property
    def group(self) -> npt.NDArray[np.int64]:
        """Index of the id that each completion belongs to, int64 [S]."""
        return self.batch.group_of("completion")

    @property
    def mask(self) -> Vector:
        """Mask of the trained tokens [T]: `loss_mask` if present, else 1 for all tokens.

        If the prompt is empty, the first token of the completion is not trained (0), because no
        token precedes it.
        """
        if "loss_mask" in self.batch.data:
            mask = self.read_tokens("loss_mask")
        else:
            mask = np.ones(int(self.lengths.sum()))
        if "prompt" in self.batch.lengths:
            has_no_prompt = self.batch.lengths["prompt"][self.batch.group_of("completion")] == 0
            mask[compute_starts(self.lengths)[has_no_prompt & (self.lengths > 0)]] = 0.0
        return mask

    def sum_tokens(self, key: str) -> Vector:
        """Return the sum of `key` over each completion's tokens, weighted by `mask`, [S]."""
        trained = self.mask
        return compute_segment_sums(
            np.where(trained != 0.0, self.read_tokens(key), 0.0) * trained, self.lengths
        )

    def build_sequence_sample(self, **keys: Vector) -> SequenceSample:
        """Return a sample with the given keys in float32, each with one value per completion."""
        return self.batch.one_per(
            "completion", **{key: values.astype(np.float32) for key, values in keys.items()}
        )

    def build_token_sample(self, **keys: Vector) -> SequenceSample:
        """Return a sample with the given keys in float32, each with one value per completion token."""
        return self.batch.like(
            "completion", **{key: values.astype(np.float32) for key, values in keys.items()}
        )


def shape_rewards(
    shaping: RewardShaping, rewards: Vector, finished: Vector, context: HostContext
) -> Vector:
    """Return the shaped rewards [S]; `finished` [S] is 0 for truncated completions.

    Records the metric `reward_clipped_fraction` if rewards are clipped.
    """
    if shaping.missing_eos_reward is not None:
        rewards = np.where(finished == 0.0, shaping.missing_eos_reward, rewards)
    shaped = (rewards - shaping.reward_output_bias) * shaping.reward_output_scaling
    clip = shaping.max_reward_clip
    if clip is not None:
        context.record("reward_clipped_fraction", float((np.abs(shaped) > clip).mean()))
        shaped = np.clip(shaped, -clip, clip)
    return shaped - shaping.missing_eos_penalty * (finished == 0.0)


def compute_kl_rows(
    rows: CompletionRows, mask: Vector, estimator: str, context: HostContext
) -> Vector:
    """Return the estimated KL divergence from the reference model at each token [T], in nats.

    The values are multiplied by `mask`. Two metrics are recorded. `kl_{estimator}` is the mean over
    the tokens in the mask. `kl_{estimator}_per_completion` is the mean over the completions, after
    summing the values of each completion.
    """
    kl = (
        estimate_kl(rows.read_tokens("logprobs"), rows.read_tokens("ref_logprobs"), estimator)
        * mask
    )
    context.record(f"kl_{estimator}", float(kl.sum() / max(mask.sum(), 1.0)))
    context.record(
        f"kl_{estimator}_per_completion", float(compute_segment_sums(kl, rows.lengths).mean())
    )
    return kl
