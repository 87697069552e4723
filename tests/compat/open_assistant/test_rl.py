"""Open-Assistant's RL keys and trlX's PPO configuration."""

from __future__ import annotations

from typing import Any

import pytest

from weft.compat.open_assistant.key_mapping import IMPLIED, KeyMapping
from weft.compat.open_assistant.keys import map_keys
from weft.experiments import GenConfig, PPOConfig

TRAINER = {
    "trlx.train.seq_length": 2032,
    "trlx.train.total_steps": 10000,
    "trlx.train.batch_size": 18,
    "trlx.train.checkpoint_interval": 1000,
    "trlx.method.num_rollouts": 1024,
    "trlx.method.ppo_epochs": 4,
    "trlx.method.gen_kwargs.max_new_tokens": 512,
}


def mapped(given: dict[str, Any] | None = None, **values: Any) -> KeyMapping:
    return map_keys(KeyMapping(PPOConfig(), values, dict.fromkeys(values, 0), given or {}))


def options(**values: Any) -> dict[str, Any]:
    done = mapped(**values)
    assert done.rejections == []
    return {name: option.value for name, option in done.options.items() if option.key != IMPLIED}


@pytest.mark.parametrize(
    ("values", "made"),
    [
        (
            {
                "rank_config": {
                    "is_reward_model": True,
                    "model_name": "rm",
                    "pooling": "last",
                    "dtype": "fp16",
                    "batch_size": 8,
                }
            },
            {"rew.path": "rm", "rew.pooling": "last", "rew.dtype": "float16"},
        ),
        (
            {
                "sft_config": {
                    "model_name": "s",
                    "freeze_layer": None,
                    "num_layers_unfrozen": -1,
                    "residual_dropout": 0.2,
                    "dtype": "fp16",
                    "quantization": False,
                    "seq2seqmodel": False,
                    "batch_size": 1,
                }
            },
            {
                "actor.path": "s",
                "ref.path": "s",
                "actor.residual_dropout": 0.2,
                "actor.dtype": "float16",
                "critic.dtype": "float16",
                "actor.optimizer.state_dtype": "float32",
                "critic.optimizer.state_dtype": "float32",
            },
        ),
        ({"sft_config": {"freeze_layer": 52}}, {"actor.freeze_layers": 52}),
        ({"triton_host_rm": "localhost:8002/rm"}, {"rew.url": "grpc://localhost:8002/rm"}),
        ({"triton_host_sft": "http://h:1/m"}, {"ref.url": "http://h:1/m"}),
        (
            {"rank_model": "a", "sft_model": "b"},
            {"rew.path": "a", "actor.path": "b", "ref.path": "b"},
        ),
        (
            {
                "eval_size": 500,
                "num_eval_prompts": 64,
                "datasets": ["oasst_export"],
                "debug": False,
            },
            {"dataset.sources": [{"named": "oasst_export", "max_valid": 64}]},
        ),
        (
            {
                "trlx.method.init_kl_coef": 0.1,
                "trlx.method.target": 6,
                "trlx.method.horizon": 10000,
            },
            {
                "ppo.kl_ctl": 0.1,
                "ppo.use_adaptive_kl_ctl": True,
                "ppo.adaptive_kl_target": 6,
                "ppo.adaptive_kl_horizon": 10000,
            },
        ),
        (
            {
                "trlx.method.gamma": 1,
                "trlx.method.lam": 0.95,
                "trlx.method.cliprange": 0.4,
                "trlx.method.cliprange_value": 0.3,
                "trlx.method.cliprange_reward": 4,
                "trlx.method.vf_coef": 1,
                "trlx.method.scale_reward": False,
            },
            {
                "ppo.discount": 1,
                "ppo.gae_lambda": 0.95,
                "ppo.eps_clip": 0.4,
                "ppo.value_eps_clip": 0.3,
                "ppo.max_reward_clip": 4,
            },
        ),
        (
            {"trlx.method.gen_kwargs.do_sample": True, "trlx.method.gen_kwargs.top_p": 0.7},
            {"ppo.gen.greedy": False, "ppo.gen.top_p": 0.7},
        ),
        ({"trlx.method.ref_std": 2.0}, {"ppo.reward_output_scaling": 0.5}),
        (
            {"trlx.optimizer.kwargs.betas": [0.9, 0.95], "trlx.scheduler.name": "cosine_annealing"},
            {
                "actor.optimizer.beta1": 0.9,
                "actor.optimizer.beta2": 0.95,
                "critic.optimizer.beta1": 0.9,
                "critic.optimizer.beta2": 0.95,
                "actor.optimizer.lr_scheduler_type": "cosine",
                "critic.optimizer.lr_scheduler_type": "cosine",
            },
        ),
        (
            {"trlx.train.seq_length": 2032, "trlx.method.gen_kwargs.max_new_tokens": 512},
            {
                "dataset.max_prompt_len": 1520,
                "dataset.overlong": "truncate",
                "ppo.gen.max_new_tokens": 512,
            },
        ),
    ],
)
def test_what_keys_come_to(values: dict[str, Any], made: dict[str, Any]) -> None:
    assert options(**values) == made


def test_steps_are_rounds_of_rollouts() -> None:
    """1,024 rollouts in batches of 18, four times over: 57 x 4 updates a round."""
    made = options(**TRAINER)
    assert made["dataset.train_bs_n_seqs"] == 1024 and made["ppo.mini_batch_size"] == 18
    assert made["max_steps"] == 44 and made["save_freq_steps"] == 4


def test_their_own_sizes_go_over_trlx_and_count_every_device() -> None:
    made = mapped(
        {"actor.layout": "d2"}, **TRAINER, num_rollouts=16, batch_size=1, total_steps=100
    ).options
    assert made["dataset.train_bs_n_seqs"].value == 32 and made["ppo.mini_batch_size"].value == 2
    assert made["max_steps"].value == 2


def test_of_two_keys_for_a_size_the_one_set_last_counts_and_is_named() -> None:
    values = {**TRAINER, "num_rollouts": 16, "batch_size": 1, "total_steps": 100}
    late = dict.fromkeys(TRAINER, 2)
    made = map_keys(KeyMapping(PPOConfig(), values, {**dict.fromkeys(values, 1), **late})).options
    assert (made["dataset.train_bs_n_seqs"].value, made["dataset.train_bs_n_seqs"].key) == (
        1024,
        "trlx.method.num_rollouts",
    )
    assert (made["ppo.mini_batch_size"].value, made["ppo.mini_batch_size"].key) == (
        18,
        "trlx.train.batch_size",
    )
    assert (made["max_steps"].value, made["max_steps"].key) == (44, "trlx.train.total_steps")
    late = {"trlx.train.batch_size": 2}
    made = map_keys(KeyMapping(PPOConfig(), values, {**dict.fromkeys(values, 1), **late})).options
    assert (made["dataset.train_bs_n_seqs"].key, made["max_steps"].key) == (
        "num_rollouts",
        "total_steps",
    )
    assert (made["ppo.mini_batch_size"].value, made["max_steps"].value) == (16, 25)


def test_trlx_has_no_value_normalisation_and_a_critic_of_the_policy() -> None:
    made = mapped(**TRAINER).options
    assert made["ppo.value_norm"].value is False and made["ppo.critic_init"].value == "actor"
    assert (
        made["ppo.early_stop_imp_ratio"].value is None
        and made["critic.optimizer.warmup_steps"].value == 0
    )


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"rank_config": 3}, "rank_config=3: must be a group of keys"),
        ({"rank_config": {"is_reward_model": False}}, "rank_config.is_reward_model=False"),
        (
            {"rank_config": {"modelname": "x"}},
            "rank_config.modelname='x': unknown; known are model_name",
        ),
        (
            {"sft_config": {"modelname": "x"}},
            "sft_config.modelname='x': unknown; known are model_name",
        ),
        (
            {"sft_config": {"seq2seqmodel": True}},
            "sft_config.seq2seqmodel=True: the policy is a decoder",
        ),
        ({"triton_host_rm": "localhost:8002"}, "must be host:port/model"),
        ({"debug": True}, "debug=true: write num_rollouts=1"),
        ({"trlx.method.scale_reward": "running"}, "rewards are not rescaled while training"),
        ({"trlx.method.vf_coef": 0.5}, "the critic is a separate network with its own optimizer"),
        (
            {"trlx.train.total_steps": 10, "trlx.scheduler.kwargs.T_max": 99},
            "must equal total_steps=10, because a schedule ends",
        ),
        ({"trlx.optimizer.kwargs.betas": 0.9}, "betas=0.9: must be a list of two numbers"),
        ({"trlx.scheduler.kwargs.T_max": "long"}, "T_max=long: must be a number"),
        (
            {"trlx.train.seq_length": 100, "trlx.method.gen_kwargs.max_new_tokens": 100},
            "leaves no room for a prompt",
        ),
        ({"trlx.model.model_arch_type": "seq2seq"}, "policies are decoders"),
    ],
)
def test_what_weft_cannot_follow_is_refused(values: dict[str, Any], wrong: str) -> None:
    done = mapped(**values)
    assert len(done.rejections) == 1 and wrong in done.rejections[0][1]


def test_a_schedule_follows_a_number_of_steps_that_is_set_over_it() -> None:
    values = {"trlx.scheduler.kwargs.T_max": 10000, "total_steps": 2}
    done = map_keys(
        KeyMapping(PPOConfig(), values, {"trlx.scheduler.kwargs.T_max": 0, "total_steps": 1}, {})
    )
    assert not done.rejections and any("after total_steps=2" in note for note in done.notes)


def test_beside_a_reference_behind_a_server_nothing_is_left_out() -> None:
    done = mapped(**{"trlx.method.gen_kwargs.top_p": 0.7, "triton_host_sft": "h:1/m"})
    assert not done.rejections and "ppo.gen.top_p" not in done.options
    assert any("top_p=0.7 is left out" in note for note in done.notes)


def test_what_trlx_does_anyway_is_no_option_of_a_run_that_only_samples() -> None:
    done = map_keys(KeyMapping(GenConfig(), {}, {}, {}))
    assert not [name for name in done.options if name.startswith("gen.") or "optimizer" in name]
