"""GRPO and related methods, which have no critic.

The baseline of a reward, if any, is computed from completions of the same prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from weft.algorithms.advantages import GroupAdvantages
from weft.algorithms.grpo import GRPOLoss
from weft.engine.spec_parts import MAX_SAMPLES
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.experiments._rl_graph import RLGraphBuilder
from weft.experiments._rl_options import MFCOptions, PolicyConfig, PolicyOptions
from weft.graph.mfc import HostFunction, Node
from weft.host.spec import parse_reward
from weft.options import include, option
from weft.registry import register_quickstart

GROUP_BASELINES = ("group", "leave_one_out", "opo")


@dataclass
class GRPOOptions(PolicyOptions):
    """Options of GRPO and related methods (`grpo.*`).

    Those of the loss and of the advantages are defined next to the formulas.
    """

    group_size: int = option(
        8,
        "completions per prompt; a group baseline needs 2 or more",
        at_least=1,
        at_most=MAX_SAMPLES,
    )
    ppo_n_minibatches: int = option(1, "optimizer steps per pass over a batch", at_least=1)
    loss: GRPOLoss = include(GRPOLoss, max_completion_length="gen.new_token_limit")
    advantages: GroupAdvantages = include(GroupAdvantages, scale="scale_rewards", whiten="adv_norm")
    normalize_each_reward: bool = option(
        False,
        "normalise each reward function separately in its group, then the weighted sum over the "
        "batch (GDPO)",
    )
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
        if grpo.advantages.baseline == "greedy":
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
        # The loss, with the clip bounds resolved
        loss = replace(
            grpo.loss,
            kl_coef=0.0 if self._kl_in_reward else grpo.kl_coef,
            kl_estimator=grpo.kl_estimator or "k3",
            max_completion_length=policy.gen.max_new_tokens,
        )
        loss = replace(loss, eps_clip=loss.clip.low, eps_clip_high=loss.clip.high)
        extra = (("ref_logprobs",) if self._has_ref else ()) + (
            ("loss_mask",) if grpo.advantages.mask_truncated else ()
        )
        keys = ("logprobs", "advantages", *extra)
        return [
            *nodes,
            *policy.build_corrections(waits),
            self._build_advantages(policy, waits),
            *policy.build_covariance(),
            policy.build_training("actor_train", "actor", "grpo", asdict(loss), keys),
        ]

    def _build_advantages(self, policy: RLGraphBuilder, waits: Sequence[str]) -> HostFunction:
        grpo = self.grpo
        greedy = grpo.advantages.baseline == "greedy"
        options = replace(
            grpo.advantages,
            baseline="given" if greedy else grpo.advantages.baseline,
            scale=grpo.advantages.scale
            or ("none" if grpo.loss.loss_type == "dr_grpo" else "group"),
            max_new_tokens=policy.gen.max_new_tokens,
        )
        extra_keys: list[str] = [*waits, *policy.token_reward_keys]
        if self._kl_in_reward:
            options = replace(options, kl_coef=grpo.kl_coef, kl_estimator=grpo.kl_estimator or "k1")
            extra_keys += ["logprobs", "ref_logprobs"]
        if grpo.normalize_each_reward:
            weights = [part.weight for part in parse_reward(policy.rewards.reward)]
            if policy.has_model:
                weights.append(policy.rewards.scores_weight)
            options = replace(options, part_weights=weights)
            extra_keys.append("reward_parts")
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
            input_keys=("prompt", "completion", "rewards", "finished", *baselines, *extra_keys),
            optional_keys=() if grpo.advantages.mask_truncated else ("loss_mask",),
            output_keys=("advantages", *(("loss_mask",) if grpo.advantages.mask_truncated else ())),
            input_key_remap={**baselines, **(policy.logprob_remap if self._kl_in_reward else {})},
            args=asdict(options),
        )


def _check_options(grpo: GRPOOptions, config: GRPOConfig, policy: RLGraphBuilder) -> None:
    """Raise `ConfigError` for options that are mutually exclusive."""
    advantages = grpo.advantages
    scaled = advantages.scale == "group" or (
        advantages.scale is None and grpo.loss.loss_type != "dr_grpo"
    )
    if grpo.group_size < 2 and (advantages.baseline in GROUP_BASELINES or scaled):
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
    if grpo.loss.surrogate == "reinforce" and policy.num_updates > 1:
        raise ConfigError(
            "grpo.surrogate=reinforce: has no importance ratio, so it allows only one optimizer "
            f"step per batch, and this run makes {policy.num_updates} (grpo.ppo_n_minibatches, "
            "mini_batch_size, ppo_epochs); set these to 1, or surrogate=clip"
        )
    if advantages.pass_k is not None and advantages.pass_k > grpo.group_size:
        raise ConfigError(
            f"grpo.pass_k={advantages.pass_k}: is more than grpo.group_size={grpo.group_size}; "
            f"lower the first or raise the second"
        )
    is_greedy = advantages.baseline == "greedy"
    if advantages.pass_k is not None and (grpo.normalize_each_reward or is_greedy):
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
    if config.rewards.reward is None or config.rewards.column is not None:
        raise ConfigError(
            "grpo.normalize_each_reward=true: needs reward functions in reward (and no "
            "reward_column)"
        )
    # Options that GDPO ignores must have their defaults.
    defaults = GRPOOptions()
    for name in (
        "max_reward_clip",
        "reward_output_scaling",
        "reward_output_bias",
        "baseline",
        "scale_rewards",
    ):
        if getattr(grpo, name) != getattr(defaults, name):
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
