"""Every option that the documentation promises exists under its name, in every experiment that has
it.
"""

from __future__ import annotations

import pytest

from weft import registry
from weft.cli import overrides
from weft.cli.quickstart import apply_overrides
from weft.options import OptionDescription, iterate_options

RUN = """experiment_name trial_name fileroot mode seed n_nodes n_gpus_per_node total_train_epochs max_steps
save_freq_steps save_freq_epochs save_freq_secs eval_freq_steps eval_freq_epochs eval_freq_secs recover_mode imports
max_tokens_per_microbatch device log_freq_steps save_total_limit save_milestone_freq_steps save_milestone_freq_epochs
allocation_mode logger.wandb.entity logger.wandb.project logger.wandb.name logger.wandb.prefix logger.wandb.id logger.wandb.dir
logger.wandb.mode logger.tensorboard logger.trackio.project
dataset.train_path dataset.valid_path dataset.path dataset.max_seqlen dataset.max_prompt_len dataset.train_bs_n_seqs
dataset.train_tokens_per_batch dataset.valid_tokens_per_batch dataset.overlong dataset.remove_truncated_samples dataset.type
dataset.args dataset.sources"""
MODEL = """path type init_from_scratch dtype backend gradient_checkpointing offload lora.r lora.alpha lora.dropout
lora.targets layout parallel.pipeline_parallel_size parallel.data_parallel_size parallel.model_parallel_size
optimizer.type optimizer.lr optimizer.weight_decay optimizer.beta1 optimizer.beta2 optimizer.eps
optimizer.lr_scheduler_type optimizer.warmup_steps_proportion optimizer.min_lr_ratio optimizer.max_grad_norm
optimizer.warmup_steps optimizer.warmup_epochs optimizer.end_lr tokenizer.path tokenizer.chat_template
tokenizer.bos_token tokenizer.eos_token tokenizer.pad_token tokenizer.sep_token tokenizer.add_bos_token"""
GEN = "max_new_tokens min_new_tokens temperature top_p top_k greedy"
PPO = """ppo_n_minibatches kl_ctl use_adaptive_kl_ctl discount gae_lambda eps_clip value_eps_clip max_reward_clip
reward_output_scaling reward_output_bias early_stop_imp_ratio adv_norm value_norm samples_per_prompt ppo_epochs
mini_batch_size critic_warmup_epochs"""
REWARD = "reward reward_timeout_s rew.path rew.prompt_prefix rew.prompt_suffix"
ROLES = {
    "sft": ["model"],
    "rw": ["model"],
    "dpo": ["actor", "ref"],
    "ppo": ["actor", "critic", "ref", "rew"],
    "grpo": ["actor", "ref", "rew"],
    "online_dpo": ["actor", "ref", "rew"],
    "distill": ["actor", "teacher"],
    "gen": ["model"],
}
CALLS = {
    "sft": ["train"],
    "rw": ["train"],
    "dpo": ["ref_inf", "actor_train"],
    "ppo": ["actor_gen", "rew_inf", "ref_inf", "critic_inf", "actor_train", "critic_train"],
    "grpo": ["actor_gen", "rew_inf", "ref_inf", "actor_train"],
    "online_dpo": ["actor_gen", "rew_inf", "ref_inf", "actor_train"],
    "distill": ["actor_gen", "teacher_inf", "actor_train"],
    "gen": ["gen"],
}
OWN = {
    "sft": [],
    "rw": [],
    "dpo": ["dpo.beta", "dpo.loss_type", "dpo.label_smoothing"],
    "ppo": [
        *(f"ppo.{name}" for name in PPO.split()),
        *(f"ppo.gen.{name}" for name in GEN.split()),
        *REWARD.split(),
    ],
    "grpo": ["grpo.group_size", *(f"grpo.gen.{name}" for name in GEN.split()), *REWARD.split()],
    "online_dpo": [
        *(f"online_dpo.{name}" for name in ("loss_type", "beta", "pairs", "samples_per_prompt")),
        *(f"online_dpo.gen.{name}" for name in GEN.split()),
        *REWARD.split(),
    ],
    "distill": [
        *(
            f"distill.{name}"
            for name in ["loss_type", "on_policy", "divergence_beta", "top_k", "samples_per_prompt"]
        ),
        *(f"distill.gen.{name}" for name in GEN.split()),
    ],
    "gen": [f"gen.{name}" for name in GEN.split()],
}


def promised(name: str) -> set[str]:
    models = {f"{role}.{option}" for role in ROLES[name] for option in MODEL.split()}
    fields = ("interface", "pre_hooks", "post_hooks", "max_tokens_per_microbatch")
    calls = {f"{call}.{field}" for call in CALLS[name] for field in fields}
    return {*RUN.split(), *OWN[name]} | models | calls


@pytest.mark.parametrize("name", sorted(ROLES))
def test_every_promised_option_exists(name: str) -> None:
    there = {leaf.name for leaf in iterate_options(registry.quickstarts.get(name)())}
    assert promised(name) - there == set()


@pytest.mark.parametrize("name", sorted(ROLES))
def test_every_option_can_be_written_as_its_default(name: str) -> None:
    """What --help shows as a default is what the command line takes."""
    base = registry.quickstarts.get(name)()
    config, notes = apply_overrides(
        base, overrides.parse([written(leaf) for leaf in iterate_options(base)])
    )
    assert (config, notes) == (base, [])


def written(leaf: OptionDescription) -> str:
    """The option with its default, as a user would type it."""
    if leaf.default is None or isinstance(leaf.default, (bool, int, float)):
        return f"{leaf.name}={'null' if leaf.default is None else str(leaf.default).lower()}"
    return (
        f"{leaf.name}='{leaf.default}'"
        if isinstance(leaf.default, str)
        else f"{leaf.name}={leaf.default}"
    )


def test_sampling_defaults_of_rl_leave_the_distribution_as_it_is() -> None:
    for name in ("ppo", "grpo", "online_dpo", "distill"):
        gen = getattr(registry.quickstarts.get(name)(), name).gen
        assert (gen.temperature, gen.top_p, gen.top_k, gen.greedy) == (1.0, 1.0, 0, False)
