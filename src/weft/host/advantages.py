"""Advantages of a whole batch, PPO's and GRPO's. The one home of the KL controller and of value statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.algorithms.advantages import baselined, gae, scaled, segment_sums, soft_overlong, starts_of, whiten
from weft.algorithms.base import host_array
from weft.algorithms.kl import AdaptiveController, Controller, FixedController, ValueNormalizer, kl_estimate
from weft.data.sample import SequenceSample
from weft.errors import ConfigError, DataError
from weft.host.base import HostContext, Stateless
from weft.registry import register_function

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """The tokens and completions of a batch as float64 vectors; `[T]` tokens of `[S]` completions."""

    batch: SequenceSample

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return self.batch.lengths["completion"].astype(np.int64)

    def tokens(self, key: str) -> Vector:
        """A key of one value a token. Raises `DataError` where it is laid out in another way."""
        if not np.array_equal(self.batch.lengths[key], self.lengths):
            raise DataError(f"key {key!r} does not hold one value a completion token")
        return host_array(self.batch.data[key]).astype(np.float64)

    def sequences(self, key: str) -> Vector:
        """A key of one value a completion, or one an id, which all its completions share."""
        values = host_array(self.batch.data[key]).astype(np.float64)
        group = self.batch.group_of("completion")
        if len(values) == len(group):
            return values
        if len(values) == self.batch.num_ids:
            return values[group]
        raise DataError(f"key {key!r} holds {len(values)} values; there are {len(group)} completions")

    @property
    def mask(self) -> Vector:
        """1 where a token is trained: `loss_mask` where the batch holds one, and never what nothing precedes."""
        mask = self.tokens("loss_mask") if "loss_mask" in self.batch.data else np.ones(int(self.lengths.sum()))
        if "prompt" in self.batch.lengths:
            alone = self.batch.lengths["prompt"][self.batch.group_of("completion")] == 0
            mask[starts_of(self.lengths)[alone & (self.lengths > 0)]] = 0.0
        return mask

    def sample(self, **keys: Vector) -> SequenceSample:
        """New keys of one value a token, as float32."""
        counts = np.diff(self.batch.offsets["completion"])
        by_id = [part.tolist() for part in np.split(self.lengths, np.cumsum(counts)[:-1])]
        data = {key: torch.from_numpy(values.astype(np.float32)) for key, values in keys.items()}
        return SequenceSample.from_groups(self.batch.ids, dict.fromkeys(keys, by_id), data)


@dataclass(frozen=True)
class RewardShape:
    """clip((reward - bias) * scaling, +-clip), less a penalty where the completion was cut by its length."""

    clip: float
    scaling: float
    bias: float
    missing_eos_penalty: float

    def __call__(self, rewards: Vector, finished: Vector) -> Vector:
        shaped = np.clip((rewards - self.bias) * self.scaling, -self.clip, self.clip)
        return shaped - self.missing_eos_penalty * (finished == 0.0)


@register_function("gae_advantages")
@dataclass
class GAEAdvantages:
    """PPO: `advantages` and `returns` [L] of each completion from its reward, its KL and the critic's values.

        r_t = -kl_coef * KL_t,   and the shaped reward is added to the last trained token of a completion that has ended

    then generalised advantage estimation over trained tokens, and whitening over the whole batch (`adv_norm`).

    Keys: completion (lengths), `rewards` [1], `values` [L + 1], `finished` [1]; `logprobs` and `ref_logprobs` where kl_ctl is
    above 0; `loss_mask`, `prompt` where there are any. `truncated` says what a completion that was cut by its length gets:
    "bootstrap", the critic's value of what would follow and no reward, whose text is not whole (ReaLHF); "score", its reward
    as if it had ended (TRL). The missing-eos penalty is taken off either way.

    With `value_norm` the critic lives in units of the running mean and deviation of returns: `values` are brought to
    rewards' units first, `returns` are given in the critic's.
    """

    kl_ctl: float = 0.1
    kl_estimator: str = "k1"
    use_adaptive_kl_ctl: bool = False
    adaptive_kl_target: float = 6.0
    adaptive_kl_horizon: float = 10_000.0
    discount: float = 1.0
    gae_lambda: float = 1.0
    adv_norm: bool = True
    value_norm: bool = True
    value_norm_type: str = "exp"
    value_norm_beta: float = 0.99995
    value_norm_eps: float = 1e-5
    max_reward_clip: float = 20.0
    reward_output_scaling: float = 1.0
    reward_output_bias: float = 0.0
    missing_eos_penalty: float = 0.0
    truncated: str = "bootstrap"
    controller: Controller = field(init=False)
    normalizer: ValueNormalizer = field(init=False)

    def __post_init__(self) -> None:
        if self.truncated not in ("bootstrap", "score"):
            raise ConfigError(f"truncated={self.truncated!r} must be bootstrap or score")
        adaptive = AdaptiveController(self.kl_ctl, self.adaptive_kl_target, self.adaptive_kl_horizon)
        self.controller = adaptive if self.use_adaptive_kl_ctl else FixedController(self.kl_ctl)
        kl_estimate(np.zeros(0), np.zeros(0), self.kl_estimator)  # refuses an unknown name
        self.normalizer = ValueNormalizer(self.value_norm_type, self.value_norm_beta, self.value_norm_eps**0.5)

    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample:
        rows = Rows(batch)
        mask, finished = rows.mask, rows.sequences("finished")
        kl = self._kl(rows, mask, context)
        values, after = self._values(rows)
        ended = (finished != 0.0) | (self.truncated == "score")
        rewards = self._token_rewards(rows, mask, kl, ended, context)

        # Trained tokens only: what somebody else wrote in between is passed over, and takes no time.
        trained = mask != 0.0
        counts = segment_sums(trained.astype(np.float64), rows.lengths).astype(np.int64)
        last_values = np.where(ended, 0.0, after)
        found = gae(rewards[trained], values[trained], last_values, counts, discount=self.discount, lam=self.gae_lambda)
        advantages, returns = (_scatter(each, trained) for each in found)
        context.record("advantage_std", float(np.std(found[0])) if len(found[0]) else 0.0)
        context.record("return", float(np.mean(found[1])) if len(found[1]) else 0.0)
        if self.value_norm:
            self.normalizer.update(returns, mask)
            returns = self.normalizer.normalize(returns) * trained
        if self.adv_norm:
            advantages = whiten(advantages, trained.astype(np.float64))
        return rows.sample(advantages=advantages, returns=returns)

    def _kl(self, rows: Rows, mask: Vector, context: HostContext) -> Vector:
        """The KL of each trained token. Raises `DataError` where a penalty has no reference to compare with."""
        if "ref_logprobs" not in rows.batch.data:
            if self.kl_ctl > 0:
                raise DataError(f"kl_ctl={self.kl_ctl} needs the key ref_logprobs; add it to the node or set kl_ctl=0")
            return np.zeros_like(mask)
        kl = kl_estimate(rows.tokens("logprobs"), rows.tokens("ref_logprobs"), self.kl_estimator) * mask
        by_completion = float(segment_sums(kl, rows.lengths).mean())
        context.record("kl", float(kl.sum() / max(mask.sum(), 1.0)))
        context.record("kl_per_completion", by_completion)
        context.record("kl_coef", self.controller.value)
        penalty = kl * self.controller.value
        self.controller.update(by_completion, len(rows.lengths))
        return penalty

    def _values(self, rows: Rows) -> tuple[Vector, Vector]:
        """(V before each token, V after the last one of each completion) in rewards' units."""
        lengths = rows.lengths
        if not np.array_equal(rows.batch.lengths["values"], lengths + 1):
            raise DataError("key 'values' must hold one value a completion token and one after the last")
        values = host_array(rows.batch.data["values"]).astype(np.float64)
        if self.value_norm:
            values = self.normalizer.denormalize(values)
        last = np.cumsum(lengths + 1) - 1
        return np.delete(values, last), values[last]

    def _token_rewards(
        self, rows: Rows, mask: Vector, penalty: Vector, ended: npt.NDArray[np.bool_], context: HostContext
    ) -> Vector:
        """-penalty at every token, and at the last trained one the shaped reward."""
        raw, finished = rows.sequences("rewards"), rows.sequences("finished")
        shape = RewardShape(
            self.max_reward_clip, self.reward_output_scaling, self.reward_output_bias, self.missing_eos_penalty
        )
        scored = np.where(ended, shape(raw, finished), -self.missing_eos_penalty)
        rewards = -penalty
        last = _last_trained(mask, rows.lengths)
        held = last >= 0
        np.add.at(rewards, last[held], scored[held])
        context.record("reward", float(raw.mean()))
        context.record("reward_after_kl", float(segment_sums(rewards, rows.lengths).mean()))
        context.record("truncated_fraction", float((finished == 0.0).mean()))
        return rewards

    def state_dict(self) -> dict[str, Any]:
        return {"controller": self.controller.state_dict(), "normalizer": self.normalizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.controller.load_state_dict(state["controller"])
        self.normalizer.load_state_dict(state["normalizer"])


def _scatter(values: Vector, where: npt.NDArray[np.bool_]) -> Vector:
    """`values` at the places where `where` is true, 0 elsewhere."""
    out = np.zeros(len(where))
    out[where] = values
    return out


def _last_trained(mask: Vector, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """int64 [S]: the row of each completion's last trained token, -1 where it has none."""
    last = np.full(len(lengths), -1, dtype=np.int64)
    rows = np.flatnonzero(mask != 0.0)
    owner = np.repeat(np.arange(len(lengths)), lengths)[rows]
    last[owner] = rows  # of equal owners the last assignment stays, and rows ascend
    return last


@register_function("group_advantages")
@dataclass
class GroupAdvantages(Stateless):
    """GRPO and kin: `advantages` [L], one value for all trained tokens of a completion, from the rewards of its group.

    The reward is shaped (bias, scale, clip, missing-eos penalty, DAPO's soft overlong penalty), its `baseline` taken off
    and the rest divided by `scale` (`weft.algorithms.advantages`), then whitened over all trained tokens of the batch where
    `whiten` is set (REINFORCE++). GRPO: group, group. Dr. GRPO: group, none. RLOO: leave_one_out, none. ReMax: given, none.
    REINFORCE++: none, none, whiten (its variant with a baseline: group, none, whiten).

    Keys: completion (lengths), `rewards` [1], `finished` [1]; for baseline "given" `baseline_rewards`, `baseline_finished` [1]
    and `baseline_completion` (lengths), one an id: the baseline is shaped and penalised as the samples are; `loss_mask`,
    `prompt` where there are any. `max_new_tokens` and `overlong_buffer` are in tokens; a buffer of 0 is no penalty.
    `mask_truncated` also gives a `loss_mask` that leaves out completions cut by their length (DAPO's overlong filtering).
    """

    baseline: str = "group"
    scale: str = "group"
    whiten: bool = False
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    max_new_tokens: int | None = None
    mask_truncated: bool = False
    max_reward_clip: float = 20.0
    reward_output_scaling: float = 1.0
    reward_output_bias: float = 0.0
    missing_eos_penalty: float = 0.0

    def __post_init__(self) -> None:
        if self.overlong_buffer and not self.overlong_buffer <= (self.max_new_tokens or 0):
            raise ConfigError(
                f"overlong_buffer={self.overlong_buffer} lies before the end of a completion; set max_new_tokens "
                f"({self.max_new_tokens}) to the most tokens a completion may have, at least the buffer"
            )
        pair = np.arange(2.0)
        baselined(pair, np.zeros(2, np.int64), self.baseline, pair)  # refuses an unknown name
        scaled(pair, pair, np.zeros(2, np.int64), self.scale)

    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample:
        rows = Rows(batch)
        raw, finished, group = rows.sequences("rewards"), rows.sequences("finished"), batch.group_of("completion")
        overlong = self._overlong(rows.lengths)
        if self.overlong_buffer:
            context.record("overlong_penalty", float(-overlong.mean()))
        context.record("reward", float(raw.mean()))
        rewards = self._shape(raw, finished) + overlong
        given = self._given(rows, context) if self.baseline == "given" else None
        each = scaled(baselined(rewards, group, self.baseline, given), rewards, group, self.scale)
        context.record("advantage_std", float(each.std()))
        trained = (rows.mask != 0.0).astype(np.float64)
        if self.mask_truncated:
            trained = trained * np.repeat(rows.sequences("finished") != 0.0, rows.lengths)
        advantages = np.repeat(each, rows.lengths) * trained
        if self.whiten:
            advantages = whiten(advantages, trained)
        keys = {"advantages": advantages}
        return rows.sample(**keys, loss_mask=rows.mask * trained) if self.mask_truncated else rows.sample(**keys)

    def _given(self, rows: Rows, context: HostContext) -> Vector:
        """The baseline's reward at each completion, less what its own length and its missing end cost."""
        raw, finished = rows.sequences("baseline_rewards"), rows.sequences("baseline_finished")
        context.record("baseline_reward", float(raw.mean()))
        lengths = rows.batch.lengths["baseline_completion"].astype(np.int64)
        overlong = self._overlong(lengths[rows.batch.group_of("completion")])
        return self._shape(raw, finished) + overlong

    def _shape(self, rewards: Vector, finished: Vector) -> Vector:
        return RewardShape(
            self.max_reward_clip, self.reward_output_scaling, self.reward_output_bias, self.missing_eos_penalty
        )(rewards, finished)

    def _overlong(self, lengths: npt.NDArray[np.int64]) -> Vector:
        """What completions of these lengths lose, 0 or below."""
        if not (self.overlong_buffer and self.max_new_tokens):
            return np.zeros(len(lengths))
        return self.overlong_penalty * soft_overlong(lengths, self.max_new_tokens, self.overlong_buffer)
