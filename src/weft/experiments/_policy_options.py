"""Options shared by the methods that sample completions and reward them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from weft.algorithms.covariance import METHODS
from weft.algorithms.sampler import CORRECTIONS
from weft.data.spec import DatasetSpec
from weft.engine.limits import MOST_PASSES
from weft.engine.service_spec import NO_NETWORK, ServedSpec
from weft.engine.spec import GenerationSpec, ModelSpec, OptimizerSpec
from weft.errors import ConfigError
from weft.experiments.common import MFCOptions, RunConfig
from weft.host.spec import locate, parse_reward
from weft.options import option

__all__ = ["MFCOptions", "PolicyConfig", "PolicyOptions", "SamplingConfig", "SamplingOptions"]


def _find_reward_problem(reward: Any) -> str | None:
    try:
        for part in parse_reward(reward):
            locate(part)
    except ConfigError as error:
        return str(error).removeprefix("reward: ")
    return None


@dataclass
class SamplingOptions:
    """Options of methods that train on sampled and rewarded completions.

    The defaults are those of PPO; other methods override some of them.
    """

    gen: GenerationSpec = option(GenerationSpec(), "how completions are sampled")
    ppo_n_minibatches: int = option(4, "optimizer steps per pass over a batch", at_least=1)
    mini_batch_size: int | None = option(
        None, "completions per optimizer step, in place of ppo_n_minibatches", at_least=1
    )
    ppo_epochs: int = option(
        1, "passes over each batch of completions", at_least=1, at_most=MOST_PASSES
    )
    max_reward_clip: float | None = option(
        None, "bound of the absolute reward, after scaling and bias; null: no bound", at_least=0.0
    )
    reward_output_scaling: float = option(
        1.0, "factor for rewards, applied after the bias is subtracted"
    )
    reward_output_bias: float = option(0.0, "subtracted from rewards first")
    missing_eos_penalty: float = option(
        0.0, "subtracted from the reward of a completion that hit the length limit"
    )
    pass_reward: float = option(0.5, "a completion passes if its reward is above this (pass@k)")
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


@dataclass
class PolicyOptions(SamplingOptions):
    """Additional options of the policy gradient methods PPO and GRPO."""

    dual_clip: float | None = option(
        None, "bound on the loss of tokens with a negative advantage; must be above 1 (dual clip)"
    )
    entropy_coef: float = option(0.0, "weight of the entropy bonus")
    early_stop_imp_ratio: float | None = option(
        5.0,
        "skip the update of a minibatch whose mean importance ratio is above this; null: no bound",
        at_least=0.0,
    )
    early_stop_kl: float | None = option(
        None, "skip the update of a minibatch whose approx_kl is above this; null: no bound"
    )
    sampler_correction: str = option(
        "none",
        "score completions again with the actor before its first update, and weight the loss by "
        "how these log-probs differ from the sampler's: token_truncate (TIS), token_mask, "
        "sequence_truncate, sequence_mask",
        choices=("none", *CORRECTIONS),
    )
    sampler_correction_high: float = option(
        2.0,
        "larger weights are truncated (truncate), or exclude their token or sequence (mask)",
        at_least=1.0,
    )
    sampler_correction_low: float | None = option(
        None,
        "smaller weights exclude their token or sequence (mask only); null: no bound",
        at_least=0.0,
        at_most=1.0,
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
    covariance: str = option(
        "none",
        "preserve entropy by treating the few tokens with the highest covariance of log-prob and "
        "advantage: no loss on some of them (clip, Clip-Cov), or a penalty (kl, KL-Cov)",
        choices=METHODS,
    )
    covariance_share: float = option(
        2e-4, "share of all tokens that covariance applies to", at_least=0.0, at_most=1.0
    )
    clip_cov_low: float = option(1.0, "smallest covariance for clip")
    clip_cov_high: float = option(5.0, "largest covariance for clip")
    kl_cov_coef: float = option(1.0, "weight of the penalty for covariance=kl", at_least=0.0)

    @property
    def correction(self) -> str:
        """Name of the correction for differences between the log-probs of sampler and actor.

        This is the value of `sampler_correction`, except that "none" becomes "token_truncate" if
        completions can be sampled with older weights (`max_staleness`).
        """
        lags = self.max_staleness and self.sampler_correction == "none"
        return "token_truncate" if lags else self.sampler_correction

    def clip_args(self) -> dict[str, Any]:
        """Return the arguments that the policy losses of PPO and GRPO share."""
        names = (
            "eps_clip",
            "eps_clip_high",
            "dual_clip",
            "entropy_coef",
            "early_stop_imp_ratio",
            "early_stop_kl",
            "covariance",
            "kl_cov_coef",
        )
        return {name: getattr(self, name) for name in names}


REWARD_VARIABLE = "TRITON_HOST_RM"  # host:port/model of a gRPC server of a reward model


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
    reward: Any = option(
        None,
        "reward function: a verifier (gsm8k, math, exact, format, ifeval, length, code, judge), "
        "module:function, "
        "FILE.py:function, weights by name as {gsm8k: 1.0, length: 0.1}, or a list of names, of "
        "[name, weight] or of "
        "{name, weight, args}; added to the reward model's score if both are set",
        check=_find_reward_problem,
    )
    reward_column: str | None = option(
        None,
        "column that names each row's verifier, in the forms of reward; rows without one get "
        "reward",
    )
    reward_by_token: bool = option(
        False, "allow reward functions to return a reward for each token or step of a completion"
    )
    reward_timeout_s: float = option(
        60.0, "maximum seconds of a reward function for a batch", at_least=0.001
    )
    reward_on_timeout: float | None = option(
        None, "reward of completions whose function has timed out; absent: the run stops"
    )
    rew_weight: float = option(
        1.0, "weight of the reward model's score if there is also a reward function"
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
            or os.environ.get(REWARD_VARIABLE)
        )
        if model or self.reward is not None or self.reward_column is not None:
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
