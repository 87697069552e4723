"""GRPO and its kin: several completions of each prompt are each other's baseline, so there is no critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from weft.engine.spec import ModelSpec
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.experiments._assemble import Plan, assemble, batches, check, type_of
from weft.experiments._policy import Policy, PolicyConfig, PolicyOptions
from weft.experiments._roles import reference
from weft.experiments.common import MFCOptions
from weft.graph.mfc import HostFunction, Node
from weft.options import option
from weft.registry import register_quickstart

BASELINES = ("group", "leave_one_out", "greedy", "none")
OF_GROUPS = ("group", "leave_one_out")


@dataclass
class GRPOOptions(PolicyOptions):
    group_size: int = option(8, "completions of each prompt; a baseline of the group needs 2 or more", at_least=1)
    ppo_n_minibatches: int = option(1, "optimizer steps of one pass over a batch", at_least=1)
    early_stop_imp_ratio: float | None = option(
        None, "a minibatch whose mean importance ratio is above takes no step; null for no bound"
    )
    baseline: str = option(
        "group",
        "taken off each reward: mean of the group (GRPO), leave_one_out mean of the others (RLOO), greedy completion's "
        "reward (ReMax), or none (REINFORCE++, with adv_norm)",
        choices=BASELINES,
    )
    scale_rewards: str = option(
        "group",
        "advantages are divided by the rewards' deviation in the group or batch, or not",
        choices=("group", "batch", "none"),
    )
    adv_norm: bool = option(False, "whiten advantages over the whole batch (REINFORCE++)")
    loss_type: str = option(
        "dapo",
        "average: dapo (all tokens), grpo (tokens of a completion, then completions), dr_grpo (sum / longest completion)",
        choices=("dapo", "grpo", "dr_grpo", "bnpo"),
    )
    importance_level: str = option(
        "token",
        "importance ratio of each token, or of a sequence (GSPO; set eps_clip to 3e-4 or so)",
        choices=("token", "sequence"),
    )
    surrogate: str = option(
        "clip", "clipped ratio, or reinforce without one (one update a batch)", choices=("clip", "reinforce")
    )
    kl_coef: float = option(
        0.001, "weight of the KL to the reference in the loss; 0 leaves the reference out", at_least=0.0
    )
    kl_estimator: str = option("k3", "estimator of the KL in the loss", choices=("k1", "k2", "k3"))
    dynamic_sampling: bool = option(
        False, "drop prompts whose completions all have one reward and sample others in their place (DAPO)"
    )
    mask_truncated: bool = option(False, "leave completions that were cut by their length out of the loss")
    overlong_buffer: int = option(
        0, "tokens before gen.max_new_tokens in which the overlong penalty grows; 0 is no penalty (DAPO)", at_least=0
    )
    overlong_penalty: float = option(1.0, "what a completion of the full length loses", at_least=0.0)


@register_quickstart("grpo")
@dataclass
class GRPOConfig(PolicyConfig):
    """Group relative policy optimization and its kin: RLOO, REINFORCE++, ReMax, Dr. GRPO, DAPO, GSPO."""

    host_nodes: ClassVar[tuple[str, ...]] = ("advantages", "reward", "greedy_reward", "filter")
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
    greedy_gen: MFCOptions = option(MFCOptions(), "the call that samples the greedy completion (ReMax)")
    greedy_rew_inf: MFCOptions = option(MFCOptions(), "the call of the reward model on it (ReMax)")

    def build(self) -> Experiment:
        """The graph of a GRPO step. Raises `UserError` with the option, its value and the rule."""
        check(self)
        grpo = self.grpo
        if grpo.group_size < 2 and (grpo.baseline in OF_GROUPS or grpo.scale_rewards == "group"):
            raise ConfigError(
                f"grpo.group_size={grpo.group_size}: a group of 1 is its own baseline and every advantage is 0; "
                "set it to 2 or more, or grpo.baseline=greedy or none with grpo.scale_rewards=none"
            )
        if grpo.gen.greedy:
            raise ConfigError(
                "grpo.gen.greedy=true: greedy completions of one prompt are all the same, so no group teaches anything"
            )
        dataset = batches(self.dataset)
        policy = Policy.of(self, grpo, "grpo", dataset, grpo.group_size)
        roles, init_from = self._roles(policy)
        return assemble(
            self,
            Plan(
                roles=roles,
                nodes=self._nodes(policy),
                dataset=dataset,
                dataset_type=type_of(dataset, "prompt"),
                data_role="actor",
                steps_follow="actor_train",
                longest=policy.longest,
                evaluation=policy.evaluation(),
                syncs=policy.syncs() if self._has_ref else [],
                init_from=init_from,
                updates_per_firing={"actor_train": policy.updates},
                notes=policy.notes(["actor"]),
            ),
        )

    @property
    def _has_ref(self) -> bool:
        return self.grpo.kl_coef > 0

    def _roles(self, policy: Policy) -> tuple[dict[str, ModelSpec], dict[str, str]]:
        """(roles, which role begins as a copy of which)."""
        roles = {"actor": self.actor.with_head("lm", trained=True)}
        init_from: dict[str, str] = {}
        if self._has_ref:
            roles["ref"], init_from = reference(self.ref, self.actor)
        elif self.grpo.ref_ema_eta:
            raise ConfigError(
                "grpo.ref_ema_eta moves a reference, and grpo.kl_coef=0 leaves it out; set one of the two"
            )
        if policy.has_model:
            roles["rew"] = self.rew.with_head("score", trained=False)
        return roles, init_from

    def _nodes(self, policy: Policy) -> list[Node]:
        grpo, size = self.grpo, policy.batch
        nodes: list[Node] = [policy.generate(size, grpo.group_size), *policy.rewards(size)]
        if grpo.baseline == "greedy":
            nodes.append(
                policy.generate(size, 1, name="greedy_gen", prefix="greedy_", greedy=True, record_support=False)
            )
            nodes += policy.rewards(size, prefix="greedy_")
        if grpo.dynamic_sampling:
            kept = HostFunction("filter", "dynamic_sampling", size, input_keys=("rewards",), output_keys=("kept",))
            nodes.append(kept)
        if self._has_ref:
            nodes.append(policy.reference(("kept",) if grpo.dynamic_sampling else ()))
        loss = {
            **grpo.clip_args(),
            "loss_type": grpo.loss_type,
            "importance_level": grpo.importance_level,
            "surrogate": grpo.surrogate,
            "kl_coef": grpo.kl_coef,
            "kl_estimator": grpo.kl_estimator,
            "max_completion_length": policy.gen.max_new_tokens,
        }
        extra = (("ref_logprobs",) if self._has_ref else ()) + (("loss_mask",) if grpo.mask_truncated else ())
        keys = ("logprobs", "advantages", *extra)
        return [*nodes, self._advantages(size), policy.train("actor_train", "actor", "grpo", loss, keys)]

    def _advantages(self, size: int) -> HostFunction:
        grpo = self.grpo
        greedy = grpo.baseline == "greedy"
        args: dict[str, Any] = {
            "baseline": "given" if greedy else grpo.baseline,
            "scale": grpo.scale_rewards,
            "whiten": grpo.adv_norm,
            "overlong_buffer": grpo.overlong_buffer,
            "overlong_penalty": grpo.overlong_penalty,
            "max_new_tokens": grpo.gen.max_new_tokens,
            "mask_truncated": grpo.mask_truncated,
            "max_reward_clip": grpo.max_reward_clip,
            "reward_output_scaling": grpo.reward_output_scaling,
            "reward_output_bias": grpo.reward_output_bias,
            "missing_eos_penalty": grpo.missing_eos_penalty,
        }
        baselines = (
            {f"baseline_{key}": f"greedy_{key}" for key in ("rewards", "finished", "completion")} if greedy else {}
        )
        waits = (*baselines, *(("kept",) if grpo.dynamic_sampling else ()))
        return HostFunction(
            name="advantages", function="group_advantages", batch_size=size,
            input_keys=("prompt", "completion", "rewards", "finished", *waits),
            output_keys=("advantages", *(("loss_mask",) if grpo.mask_truncated else ())),
            input_key_remap=baselines, args=args,
        )  # fmt: skip
