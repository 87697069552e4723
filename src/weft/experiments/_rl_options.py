"""Options of the methods that train on sampled completions: PPO, GRPO and online DPO."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from weft.algorithms.advantages import PassRates
from weft.algorithms.ppo import CORRECTIONS, HighCovariance, PolicyLoss, SamplerCorrection
from weft.data.spec import DatasetSpec
from weft.engine.service_spec import NO_NETWORK, ServedSpec
from weft.engine.spec import GenerationSpec, ModelSpec, OptimizerSpec
from weft.engine.spec_parts import MAX_PASSES
from weft.experiments._roles import VARIABLES
from weft.experiments.common import MFCOptions, RunConfig
from weft.host.spec import RewardOptions
from weft.options import include, option


@dataclass
class SamplingOptions:
    """Options of methods that train on sampled and rewarded completions.

    Each method adds the options of its components: its loss, and what becomes of rewards.
    """

    gen: GenerationSpec = option(GenerationSpec(), "how completions are sampled")
    ppo_n_minibatches: int = option(4, "optimizer steps per pass over a batch", at_least=1)
    mini_batch_size: int | None = option(
        None, "completions per optimizer step, in place of ppo_n_minibatches", at_least=1
    )
    ppo_epochs: int = option(
        1, "passes over each batch of completions", at_least=1, at_most=MAX_PASSES
    )
    pass_rates: PassRates = include(PassRates, count="eval_samples")
    eval_samples: int = option(
        1, "completions of each validation prompt, for avg@k and pass@k", at_least=1
    )
    ref_ema_eta: float | None = option(
        None,
        "move the reference this share of the way to the actor after every step; null: keep it "
        "fixed",
        at_least=0.0,
        at_most=1.0,
    )
    logprob_temperature: float | None = option(
        None,
        "temperature of all log-probs in training, over the whole vocabulary, whatever "
        "gen.temperature, top_k, top_p and min_p are; PPO and GRPO then score completions again "
        "with the actor before its first update; absent: log-probs of the sampling distribution",
        check=lambda value: None if value is None or value > 0 else "must be above 0",
    )


@dataclass
class PolicyOptions(SamplingOptions):
    """Additional options of the policy gradient methods PPO and GRPO."""

    loss: PolicyLoss = include(PolicyLoss)
    sampler_correction: str = option(
        "none",
        "score completions again with the actor before its first update, and weight the loss by "
        "how these log-probs differ from the sampler's: token_truncate (TIS), token_mask, "
        "sequence_truncate, sequence_mask",
        choices=("none", *CORRECTIONS),
    )
    correction: SamplerCorrection = include(
        SamplerCorrection,
        correction="correction_method",
        high="sampler_correction_high",
        low="sampler_correction_low",
    )
    max_staleness: int = option(
        0,
        "maximum number of training steps by which the sampling weights are older than the "
        "trained ones: above 0, sampling continues while earlier batches are trained, on other "
        "devices than training, and the loss is the decoupled one (sampler_correction, or "
        "token_truncate if that is none); up to max_staleness - 1 sets of weights are kept in "
        "host memory; 0: sample every batch with the newest weights",
        at_least=0,
    )
    interrupt_generation: bool = option(
        False,
        "with max_staleness above 0: switch to new weights in the middle of completions, so that "
        "tokens of one completion come from several versions, depending on timing",
    )
    high_covariance: HighCovariance = include(
        HighCovariance,
        method="covariance",
        share="covariance_share",
        low="clip_cov_low",
        high="clip_cov_high",
    )

    @property
    def correction_method(self) -> str:
        """Name of the correction for differences between the log-probs of sampler and actor.

        This is the value of `sampler_correction`, except that "none" becomes "token_truncate" if
        completions can be sampled with older weights (`max_staleness`).
        """
        lags = self.max_staleness and self.sampler_correction == "none"
        return SamplerCorrection.correction if lags else self.sampler_correction


@dataclass
class SamplingConfig(RunConfig):
    """Options of a run that samples completions and trains on their rewards."""

    main_role: ClassVar[str] = "actor"
    trained_roles: ClassVar[tuple[str, ...]] = ("actor",)
    host_nodes: ClassVar[tuple[str, ...]] = ("reward", "pass_rates")

    actor: ModelSpec = option(
        ModelSpec(optimizer=OptimizerSpec(lr_scheduler_type="constant")),
        "the policy that is trained",
    )
    ref: ServedSpec = option(
        ServedSpec(), "the frozen reference of the KL; the actor's path if ref.path is absent"
    )
    rew: ServedSpec = option(
        ServedSpec(), "reward model; none when rew.path and rew.url are absent"
    )
    rew_step: str | None = option(
        None,
        "text that ends a step, such as \\n\\n for a blank line: the reward model then scores "
        "every step of a completion",
    )
    rewards: RewardOptions = include(
        RewardOptions,
        column="reward_column",
        by_token="reward_by_token",
        timeout_s="reward_timeout_s",
        on_timeout="reward_on_timeout",
        scores_weight="rew_weight",
    )
    dataset: DatasetSpec = option(
        DatasetSpec(), "rows of type prompt, with columns for the reward function"
    )
    actor_gen: MFCOptions = option(MFCOptions(), "the call that samples completions")
    rew_inf: MFCOptions = option(MFCOptions(), "the call of the reward model")
    ref_inf: MFCOptions = option(
        MFCOptions(), "the call that scores completions with the reference"
    )
    actor_train: MFCOptions = option(MFCOptions(), "the call that trains the actor")

    def missing(self) -> list[str]:
        """Return a description of each required option that is not set.

        If there is no source of rewards, the list includes a description of the options that set
        one.
        """
        model = (
            self.rew.path
            or self.rew.url
            or self.rew.backend in NO_NETWORK
            or os.environ.get(VARIABLES["rew"])
        )
        if model or self.rewards.has_functions:
            return super().missing()
        return [*super().missing(), "reward=FUNCTION or rew.path=MODEL (what gives the reward)"]


@dataclass
class PolicyConfig(SamplingConfig):
    """Options that PPO and GRPO share."""

    host_nodes: ClassVar[tuple[str, ...]] = (
        *SamplingConfig.host_nodes,
        "advantages",
        "sampler_correction",
        "high_covariance",
    )

    actor_inf: MFCOptions = option(
        MFCOptions(), "the call that scores completions with the actor (sampler_correction)"
    )
