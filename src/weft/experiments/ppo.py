"""PPO: sample completions, compute rewards and values, then train actor and critic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from weft.engine.limits import MOST_SAMPLES
from weft.engine.spec import ModelSpec, OptimizerSpec
from weft.experiment import Experiment
from weft.experiments._policy_options import MFCOptions, PolicyConfig, PolicyOptions
from weft.experiments._rl_graph import RLGraphBuilder
from weft.graph.mfc import HostFunction, MFCDef, Node
from weft.options import option
from weft.registry import register_quickstart


@dataclass
class PPOOptions(PolicyOptions):
    """Options of PPO (`ppo.*`).

    They set clipping, the KL penalty, advantage estimation (GAE) and the critic.
    """

    eps_clip: float = option(0.2, "clip the importance ratio to 1 - eps_clip .. 1 + eps_clip")
    eps_clip_high: float | None = option(
        None, "upper bound 1 + eps_clip_high in place of 1 + eps_clip (clip-higher)"
    )
    samples_per_prompt: int = option(1, "completions per prompt", at_least=1, at_most=MOST_SAMPLES)
    max_reward_clip: float | None = option(
        20.0, "bound of the absolute reward, after scaling and bias; null: no bound", at_least=0.0
    )
    kl_ctl: float = option(
        0.05,
        "weight of the KL penalty in the reward; 0: no penalty and no reference model",
        at_least=0.0,
    )
    kl_estimator: str = option(
        "k1", "estimator of the KL in the reward", choices=("k1", "k2", "k3")
    )
    use_adaptive_kl_ctl: bool = option(
        False, "adapt kl_ctl so that the KL of a completion approaches adaptive_kl_target"
    )
    adaptive_kl_target: float = option(
        6.0, "target of the adaptive kl_ctl, in nats per completion", at_least=0.0
    )
    adaptive_kl_horizon: float = option(
        10_000.0,
        "time constant of the adaptive kl_ctl, in completions; larger is slower",
        at_least=1.0,
    )
    discount: float = option(1.0, "discount per token (gamma)", at_least=0.0, at_most=1.0)
    gae_lambda: float = option(
        0.95, "lambda of generalised advantage estimation", at_least=0.0, at_most=1.0
    )
    adv_norm: bool = option(True, "whiten advantages over the whole batch")
    value_eps_clip: float | None = option(
        0.2, "maximum difference of a new value from the old one; null: no bound"
    )
    value_norm: bool = option(
        True, "train the critic on returns normalised by their running mean and standard deviation"
    )
    value_norm_type: str = option(
        "exp",
        "running statistics of returns: exponential average (exp) or mean over all so far (ma)",
        choices=("exp", "ma"),
    )
    value_norm_beta: float = option(
        0.99995, "decay of the exponential average", at_least=0.0, at_most=1.0
    )
    value_norm_eps: float = option(
        1e-5, "minimum variance of returns in the division", at_least=0.0
    )
    truncated: str = option(
        "score",
        "for completions that hit the length limit: use their reward (score), or no reward but "
        "the critic's value of the missing rest (bootstrap)",
        choices=("score", "bootstrap"),
    )
    critic_init: str | None = option(
        None,
        "initial weights of the critic if critic.path is absent: rew (default if it reads the "
        "actor's tokens) or actor",
        choices=("rew", "actor"),
    )
    critic_warmup_epochs: int = option(
        0, "epochs at the start that train only the critic", at_least=0
    )


@register_quickstart("ppo")
@dataclass
class PPOConfig(PolicyConfig):
    """Proximal policy optimization (PPO) with a critic.

    Rewards come from a reward model, from reward functions, or from both. A KL penalty, which keeps
    the policy close to the reference model, is subtracted from the rewards.
    """

    trained_roles: ClassVar[tuple[str, ...]] = ("actor", "critic")
    algorithm: ClassVar[str] = "ppo"
    generation: ClassVar[str] = "ppo.gen"
    spellings: ClassVar[dict[str, str]] = {
        "rollouts_per_prompt": "ppo.samples_per_prompt",
        "num_generations": "ppo.samples_per_prompt",
        "num_ppo_epochs": "ppo.ppo_epochs",
        "num_mini_batches": "ppo.ppo_n_minibatches",
        "kl_coef": "ppo.kl_ctl",
        "cliprange": "ppo.eps_clip",
        "cliprange_value": "ppo.value_eps_clip",
        "gamma": "ppo.discount",
        "lam": "ppo.gae_lambda",
        "response_length": "ppo.gen.max_new_tokens",
        "whiten_advantages": "ppo.adv_norm",
        "reward_model_path": "rew.path",
        "value_model_path": "critic.path",
        "sft_model_path": "actor.path",
    }

    critic: ModelSpec = option(
        ModelSpec(optimizer=OptimizerSpec(lr_scheduler_type="constant")),
        "the critic; see ppo.critic_init when critic.path is absent",
    )
    ppo: PPOOptions = option(PPOOptions(), "the algorithm")
    critic_inf: MFCOptions = option(MFCOptions(), "the call that predicts values")
    critic_train: MFCOptions = option(MFCOptions(), "the call that trains the critic")

    def build(self) -> Experiment:
        """Return the experiment, whose dataflow graph is one PPO training step.

        The nodes sample completions, compute rewards, reference log-probs and values, derive
        advantages, and train actor and critic. Raises `UserError` if an option is invalid.
        """
        policy = RLGraphBuilder.from_options(self, self.ppo, "ppo", self.ppo.samples_per_prompt)
        assert isinstance(policy.config, PPOConfig), (
            "from_options returns this configuration with its models resolved"
        )
        # Choose the models; the actor is frozen while only the critic is trained.
        critic, begins_as = policy.build_critic(policy.config.critic, self.ppo.critic_init)
        others, copied = policy.build_roles(
            reference_removed_by=None if self._has_ref else "ppo.kl_ctl=0"
        )
        actor = others.pop("actor")
        warmup = replace(actor.optimizer, frozen_epochs=self.ppo.critic_warmup_epochs)
        roles = {"actor": replace(actor, optimizer=warmup), "critic": critic, **others}
        return policy.build_experiment(roles, begins_as | copied, self._build_nodes(policy))

    @property
    def _has_ref(self) -> bool:
        return self.ppo.kl_ctl > 0

    def _build_nodes(self, policy: RLGraphBuilder) -> list[Node]:
        ppo = self.ppo
        size = policy.num_prompts
        actor_loss = policy.build_training(
            "actor_train", "actor", "ppo_actor", ppo.clip_args(), ("logprobs", "advantages")
        )
        critic_args = {"value_eps_clip": ppo.value_eps_clip}
        critic_loss = policy.build_training(
            "critic_train", "critic", "ppo_critic", critic_args, ("values", "returns")
        )
        critic_inf = MFCDef(
            name="critic_inf",
            role="critic",
            interface="infer",
            method="inference",
            batch_size=size,
            input_keys=("prompt", "completion"),
            output_keys=("values",),
            args={"outputs": ["values"]},
        )
        references = [policy.build_reference()] if self._has_ref else []
        return [
            policy.build_generation(size, ppo.samples_per_prompt),
            *policy.build_rewards(size),
            *references,
            critic_inf,
            *policy.build_corrections(),
            self._build_advantages(policy),
            *policy.build_covariance(),
            actor_loss,
            critic_loss,
        ]

    def _build_advantages(self, policy: RLGraphBuilder) -> HostFunction:
        ppo = self.ppo
        size = policy.num_prompts
        same = (
            "kl_ctl",
            "kl_estimator",
            "discount",
            "gae_lambda",
            "adv_norm",
            "value_norm",
            "value_norm_type",
            "value_norm_beta",
            "value_norm_eps",
            "max_reward_clip",
            "reward_output_scaling",
            "reward_output_bias",
            "missing_eos_penalty",
            "truncated",
            "use_adaptive_kl_ctl",
            "adaptive_kl_target",
            "adaptive_kl_horizon",
        )
        args: dict[str, Any] = {name: getattr(ppo, name) for name in same}
        more = (*(("ref_logprobs",) if self._has_ref else ()), *policy.token_reward_keys)
        return HostFunction(
            name="advantages",
            function="gae_advantages",
            batch_size=size,
            input_keys=("prompt", "completion", "logprobs", "rewards", "values", "finished", *more),
            optional_keys=("loss_mask",),
            output_keys=("advantages", "returns"),
            args=args,
        )
