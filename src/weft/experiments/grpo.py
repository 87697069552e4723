"""GRPO and related methods, which have no critic.

The baseline of a reward, if any, is computed from completions of the same prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from weft.algorithms.grpo import GRPOLoss
from weft.engine.limits import MOST_SAMPLES
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.experiments._policy_options import MFCOptions, PolicyConfig, PolicyOptions
from weft.experiments._rl_graph import RLGraphBuilder
from weft.graph.mfc import HostFunction, Node
from weft.options import option
from weft.registry import register_quickstart

BASELINES = ("group", "leave_one_out", "opo", "greedy", "none")
GROUP_BASELINES = ("group", "leave_one_out", "opo")


@dataclass
class GRPOOptions(PolicyOptions):
    """Options of GRPO and related methods (`grpo.*`).

    They select the baseline, the surrogate objective, the KL penalty and the sampling of groups.
    """

    group_size: int = option(
        8,
        "completions per prompt; a group baseline needs 2 or more",
        at_least=1,
        at_most=MOST_SAMPLES,
    )
    ppo_n_minibatches: int = option(1, "optimizer steps per pass over a batch", at_least=1)
    early_stop_imp_ratio: float | None = option(
        None,
        "skip the update of a minibatch whose mean importance ratio is above this; null: no bound",
        at_least=0.0,
    )
    eps_clip: float | None = option(
        None,
        "clip the importance ratio to 1 - eps_clip .. 1 + eps_clip; absent: 0.2, or for ratios of "
        "sequences GSPO's 3e-4 below and 4e-4 above; cispo has no lower bound",
    )
    eps_clip_high: float | None = option(
        None,
        "upper bound 1 + eps_clip_high in place of 1 + eps_clip (clip-higher); absent for cispo: 4",
    )
    baseline: str = option(
        "group",
        "subtracted from each reward: mean of the group (group: GRPO), mean of the other "
        "completions (leave_one_out: RLOO), mean weighted by length (opo: OPO), reward of the "
        "greedy completion (greedy: ReMax), or nothing (none: REINFORCE++, with adv_norm)",
        choices=BASELINES,
    )
    scale_rewards: str | None = option(
        None,
        "divide advantages by the standard deviation of the rewards in the group or batch, or do "
        "not divide (none); absent: group, or none for dr_grpo",
        choices=("group", "batch", "none"),
    )
    adv_norm: bool = option(False, "whiten advantages over the whole batch (REINFORCE++)")
    rescale_informative: bool = option(
        False,
        "multiply advantages by prompts / prompts whose rewards differ, to compensate for those "
        "whose advantages are 0 (GPG)",
    )
    normalize_each_reward: bool = option(
        False,
        "normalise each reward function separately in its group, then the weighted sum over the "
        "batch (GDPO)",
    )
    pass_k: int | None = option(
        None,
        "train for pass@k: at least one of k completions passes; replaces baseline and "
        "scale_rewards",
        at_least=1,
    )
    loss_type: str = option(
        "dapo",
        "average of the loss: dapo (over all tokens), grpo (over the tokens of each completion, "
        "then over completions), dr_grpo (sum divided by the maximum completion length), bnpo "
        "(same as dapo)",
        choices=("dapo", "grpo", "dr_grpo", "bnpo"),
    )
    importance_level: str = option(
        "token",
        "one importance ratio for each token, or for each sequence (GSPO)",
        choices=("token", "sequence"),
    )
    surrogate: str = option(
        "clip",
        "clipped ratio (clip), truncated ratio as a weight (cispo), soft gate (sapo), or no ratio "
        "(reinforce; only for one update per batch)",
        choices=("clip", "cispo", "sapo", "reinforce"),
    )
    sapo_positive: float = option(1.0, "temperature of sapo's gate for positive advantages")
    sapo_negative: float = option(1.05, "temperature of sapo's gate for negative advantages")
    kl_coef: float = option(
        0.001,
        "weight of the KL to the reference; 0: no penalty and no reference model",
        at_least=0.0,
    )
    kl_in: str = option(
        "loss",
        "add the KL penalty to the loss (GRPO), or subtract it from the reward (RLOO, REINFORCE++)",
        choices=("loss", "reward"),
    )
    kl_estimator: str | None = option(
        None,
        "estimator of the KL; absent: k3 in the loss, k1 in the reward",
        choices=("k1", "k2", "k3"),
    )
    dynamic_sampling: bool = option(
        False,
        "replace prompts whose completions all have the same reward by other prompts (DAPO)",
    )
    dynamic_sampling_rounds: int = option(
        10, "maximum rounds of sampling per step; then train on the groups found so far", at_least=1
    )
    mask_truncated: bool = option(
        False, "exclude completions that hit the length limit from the loss"
    )
    overlong_buffer: int = option(
        0,
        "number of tokens before gen.max_new_tokens over which the overlong penalty grows (DAPO); "
        "0: no penalty",
        at_least=0,
    )
    overlong_penalty: float = option(1.0, "penalty of a completion of full length", at_least=0.0)


@register_quickstart("grpo")
@dataclass
class GRPOConfig(PolicyConfig):
    """Group relative policy optimization and related methods.

    The methods are GRPO, RLOO, REINFORCE++, ReMax, OPO, GPG, Dr. GRPO, DAPO, GSPO, CISPO and SAPO.
    """

    host_nodes: ClassVar[tuple[str, ...]] = (*PolicyConfig.host_nodes, "greedy_reward", "filter")
    algorithm: ClassVar[str] = "grpo"
    generation: ClassVar[str] = "grpo.gen"
    spellings: ClassVar[dict[str, str]] = {
        "rollouts_per_prompt": "grpo.group_size",
        "samples_per_prompt": "grpo.group_size",
        "num_generations": "grpo.group_size",
        "num_iterations": "grpo.ppo_epochs",
        "epochs": "grpo.ppo_epochs",
        "n_minibatches": "grpo.ppo_n_minibatches",
        "beta": "grpo.kl_coef",
        "kl_ctl": "grpo.kl_coef",
        "epsilon": "grpo.eps_clip",
        "epsilon_high": "grpo.eps_clip_high",
        "delta": "grpo.dual_clip",
        "loss_type": "grpo.loss_type",
        "importance_sampling_level": "grpo.importance_level",
        "scale_rewards": "grpo.scale_rewards",
        "mask_truncated_completions": "grpo.mask_truncated",
        "reward_funcs": "reward",
    }

    grpo: GRPOOptions = option(GRPOOptions(), "the algorithm")
    greedy_gen: MFCOptions = option(
        MFCOptions(), "the call that samples the greedy completion (ReMax)"
    )
    greedy_rew_inf: MFCOptions = option(
        MFCOptions(), "the call that scores the greedy completion with the reward model (ReMax)"
    )

    def build(self) -> Experiment:
        """Return the experiment, whose dataflow graph is one GRPO training step.

        The nodes sample completions, compute rewards and log-probs of the reference, derive
        advantages, and train the actor. Raises `UserError` if an option is invalid.
        """
        grpo = self.grpo
        policy = RLGraphBuilder.from_options(self, grpo, "grpo", grpo.group_size)
        _check_options(grpo, self, policy)
        roles, copied = policy.build_roles(
            reference_removed_by=None if self._has_ref else "grpo.kl_coef=0"
        )
        return policy.build_experiment(
            roles, copied, self._build_nodes(policy), *_build_notes(grpo)
        )

    @property
    def _has_ref(self) -> bool:
        return self.grpo.kl_coef > 0

    @property
    def _kl_in_reward(self) -> bool:
        return self._has_ref and self.grpo.kl_in == "reward"

    def _build_nodes(self, policy: RLGraphBuilder) -> list[Node]:
        # Sampling, rewards, and the scores of the reference
        grpo = self.grpo
        size = policy.num_prompts
        nodes: list[Node] = [
            policy.build_generation(size, grpo.group_size),
            *policy.build_rewards(size, parts=grpo.normalize_each_reward),
        ]
        if grpo.baseline == "greedy":
            nodes.append(
                policy.build_generation(
                    size, 1, name="greedy_gen", prefix="greedy_", greedy=True, record_support=False
                )
            )
            nodes += policy.build_rewards(size, prefix="greedy_")
        waits = ("kept",) if grpo.dynamic_sampling else ()
        if grpo.dynamic_sampling:
            filter_node = HostFunction(
                "filter",
                "dynamic_sampling",
                size,
                input_keys=("rewards",),
                output_keys=("kept",),
                refill_rounds=grpo.dynamic_sampling_rounds,
            )
            nodes.append(filter_node)
        if self._has_ref:
            nodes.append(policy.build_reference(waits))
        # Arguments of the loss, with the clip bounds resolved
        loss = {
            **grpo.clip_args(),
            "loss_type": grpo.loss_type,
            "importance_level": grpo.importance_level,
            "surrogate": grpo.surrogate,
            "sapo_positive": grpo.sapo_positive,
            "sapo_negative": grpo.sapo_negative,
            "kl_coef": 0.0 if self._kl_in_reward else grpo.kl_coef,
            "kl_estimator": grpo.kl_estimator or "k3",
            "max_completion_length": policy.gen.max_new_tokens,
        }
        clip = GRPOLoss(**loss).clip
        loss |= {"eps_clip": clip.low, "eps_clip_high": clip.high}
        extra = (("ref_logprobs",) if self._has_ref else ()) + (
            ("loss_mask",) if grpo.mask_truncated else ()
        )
        keys = ("logprobs", "advantages", *extra)
        return [
            *nodes,
            *policy.build_corrections(waits),
            self._build_advantages(policy, waits),
            *policy.build_covariance(),
            policy.build_training("actor_train", "actor", "grpo", loss, keys),
        ]

    def _build_advantages(self, policy: RLGraphBuilder, waits: Sequence[str]) -> HostFunction:
        grpo = self.grpo
        # Options with the same name as the argument, then the others.
        greedy = grpo.baseline == "greedy"
        same = (
            "overlong_buffer",
            "overlong_penalty",
            "mask_truncated",
            "max_reward_clip",
            "reward_output_scaling",
            "reward_output_bias",
            "missing_eos_penalty",
            "rescale_informative",
            "pass_k",
            "pass_reward",
        )
        args: dict[str, Any] = {
            **{name: getattr(grpo, name) for name in same},
            "baseline": "given" if greedy else grpo.baseline,
            "scale": grpo.scale_rewards or ("none" if grpo.loss_type == "dr_grpo" else "group"),
            "whiten": grpo.adv_norm,
            "max_new_tokens": policy.gen.max_new_tokens,
        }
        more: list[str] = [*waits, *policy.token_reward_keys]
        if self._kl_in_reward:
            args |= {"kl_coef": grpo.kl_coef, "kl_estimator": grpo.kl_estimator or "k1"}
            more += ["logprobs", "ref_logprobs"]
        if grpo.normalize_each_reward:
            args["part_weights"] = policy.reward_weights
            more.append("reward_parts")
        if greedy:
            baselines = {}
            for key in ("rewards", "finished", "completion"):
                baselines[f"baseline_{key}"] = f"greedy_{key}"
        else:
            baselines = {}
        return HostFunction(
            name="advantages",
            function="group_advantages",
            batch_size=policy.num_prompts,
            input_keys=("prompt", "completion", "rewards", "finished", *baselines, *more),
            optional_keys=() if grpo.mask_truncated else ("loss_mask",),
            output_keys=("advantages", *(("loss_mask",) if grpo.mask_truncated else ())),
            input_key_remap=baselines,
            args=args,
        )


def _check_options(grpo: GRPOOptions, config: GRPOConfig, policy: RLGraphBuilder) -> None:
    """Raise `ConfigError` for options that are mutually exclusive."""
    scaled = grpo.scale_rewards == "group" or (
        grpo.scale_rewards is None and grpo.loss_type != "dr_grpo"
    )
    if grpo.group_size < 2 and (grpo.baseline in GROUP_BASELINES or scaled):
        raise ConfigError(
            f"grpo.group_size={grpo.group_size}: a group of 1 is its own baseline and every "
            f"advantage is 0; "
            "set it to 2 or more, or grpo.baseline=greedy or none with grpo.scale_rewards=none"
        )
    if grpo.gen.greedy:
        raise ConfigError(
            "grpo.gen.greedy=true: greedy completions of one prompt are all the same, so every "
            "advantage would be 0"
        )
    if grpo.surrogate == "reinforce" and policy.num_updates > 1:
        raise ConfigError(
            "grpo.surrogate=reinforce: has no importance ratio, so it allows only one optimizer "
            f"step per batch, and this run makes {policy.num_updates} (grpo.ppo_n_minibatches, "
            "mini_batch_size, ppo_epochs); set these to 1, or surrogate=clip"
        )
    if grpo.pass_k is not None and grpo.pass_k > grpo.group_size:
        raise ConfigError(
            f"grpo.pass_k={grpo.pass_k}: is more than grpo.group_size={grpo.group_size}; lower "
            f"the first or raise the second"
        )
    if grpo.pass_k is not None and (grpo.normalize_each_reward or grpo.baseline == "greedy"):
        raise ConfigError(
            "grpo.pass_k computes its own advantages; leave out grpo.normalize_each_reward and "
            "grpo.baseline=greedy"
        )
    if grpo.normalize_each_reward:
        _check_gdpo(grpo, config)


def _check_gdpo(grpo: GRPOOptions, config: GRPOConfig) -> None:
    """Raise `ConfigError` for options that GDPO does not support or ignores.

    GDPO (`normalize_each_reward`) normalizes the rewards of each reward function separately.
    """
    if config.reward is None or config.reward_column is not None:
        raise ConfigError(
            "grpo.normalize_each_reward=true: needs reward functions in reward (and no "
            "reward_column)"
        )
    # Options that GDPO ignores must have their defaults.
    usual = GRPOOptions()
    for name in (
        "max_reward_clip",
        "reward_output_scaling",
        "reward_output_bias",
        "baseline",
        "scale_rewards",
    ):
        if getattr(grpo, name) != getattr(usual, name):
            raise ConfigError(
                f"grpo.{name}={getattr(grpo, name)}: has no effect with "
                "grpo.normalize_each_reward=true; leave it out"
            )


def _build_notes(grpo: GRPOOptions) -> list[str]:
    """Return notes on dynamic sampling for the plan that is printed before the run.

    The list has one line, or is empty if dynamic sampling is disabled.
    """
    if not grpo.dynamic_sampling:
        return []
    rounds = grpo.dynamic_sampling_rounds
    return [
        "filter: prompts whose completions all have the same reward are replaced by whole batches "
        f"of other prompts, in at most {rounds} rounds of sampling per step; surplus prompts are "
        "not trained on"
    ]
