"""PPO: sample completions, compute rewards and values, then train actor and critic."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from weft.algorithms.advantages import GAEAdvantages
from weft.algorithms.ppo import PPOActorLoss, PPOCriticLoss
from weft.engine.spec import ModelSpec, OptimizerSpec
from weft.engine.spec_parts import MAX_SAMPLES
from weft.experiment import Experiment
from weft.experiments._rl_graph import RLGraphBuilder
from weft.experiments._rl_options import MFCOptions, PolicyConfig, PolicyOptions
from weft.graph.mfc import HostFunction, MFCDef
from weft.options import include, option
from weft.registry import register_quickstart


@dataclass
class PPOOptions(PolicyOptions):
    """Options of PPO (`ppo.*`).

    Those of the losses and of the advantages are defined next to the formulas.
    """

    loss: PPOActorLoss = include(PPOActorLoss)
    value_loss: PPOCriticLoss = include(PPOCriticLoss)
    advantages: GAEAdvantages = include(GAEAdvantages)
    samples_per_prompt: int = option(1, "completions per prompt", at_least=1, at_most=MAX_SAMPLES)
    critic_init: str | None = option(
        None,
        "initial weights of the critic if critic.path is absent: rew (default if it reads the "
        "actor's tokens) or actor",
        choices=("rew", "actor"),
    )
    critic_warmup_epochs: float = option(
        0.0, "epochs at the start that train only the critic, such as 1 or 0.5", at_least=0.0
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
        ppo = self.ppo
        policy = RLGraphBuilder.from_options(self, ppo, "ppo", ppo.samples_per_prompt)
        assert isinstance(policy.config, PPOConfig), (
            "from_options returns this configuration with its models resolved"
        )
        gae, actor_loss, critic_loss = ppo.advantages, ppo.loss, ppo.value_loss
        # Choose the models; the actor is frozen while only the critic is trained.
        has_ref = gae.kl_ctl > 0
        roles, init_from = policy.build_roles(
            reference_removed_by=None if has_ref else "ppo.kl_ctl=0",
            critic=policy.config.critic,
            critic_init=ppo.critic_init,
        )
        warmup = replace(roles["actor"].optimizer, frozen_epochs=ppo.critic_warmup_epochs)
        roles["actor"] = replace(roles["actor"], optimizer=warmup)
        # Compute values, then advantages from rewards, values and the KL to the reference.
        size = policy.num_prompts
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
        more = (*(("ref_logprobs",) if has_ref else ()), *policy.token_reward_keys)
        advantages = HostFunction(
            name="advantages",
            function="gae_advantages",
            batch_size=size,
            input_keys=("prompt", "completion", "logprobs", "rewards", "values", "finished", *more),
            optional_keys=("loss_mask",),
            output_keys=("advantages", "returns"),
            input_key_remap=policy.logprob_remap,
            args=asdict(gae),
        )
        nodes = [
            policy.build_generation(size, ppo.samples_per_prompt),
            *policy.build_rewards(size),
            *([policy.build_reference()] if has_ref else []),
            critic_inf,
            *policy.build_corrections(),
            advantages,
            *policy.build_covariance(),
            policy.build_training(
                "actor_train",
                "actor",
                "ppo_actor",
                asdict(actor_loss),
                ("logprobs", "advantages"),
            ),
            policy.build_training(
                "critic_train", "critic", "ppo_critic", asdict(critic_loss), ("values", "returns")
            ),
        ]
        return policy.build_experiment(roles, init_from, nodes)
