"""Mapping of Open-Assistant's RL keys, and of the keys of trlX's PPO configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from weft.compat.open_assistant.key_mapping import (
    IMPLIED,
    RL,
    KeyMapping,
    KeyRule,
    format_yaml_value,
    ignore_with_note,
    map_to_option,
    reject_unless,
)

# Keys of rank_config (reward model) and sft_config (policy) -> options of their roles.
RANK_CONFIG_TARGETS = {"model_name": "rew.path", "pooling": "rew.pooling", "dtype": "rew.dtype"}
SFT_CONFIG_TARGETS = {
    "dtype": "dtype",
    "freeze_layer": "freeze_layers",
    "num_layers_unfrozen": "train_last_layers",
    "residual_dropout": "residual_dropout",
    "residual_dropout_lima": "residual_dropout_lima",
    "gradient_checkpointing": "gradient_checkpointing",
}
VALUES_WITHOUT_EFFECT = {
    "freeze_layers": None,
    "train_last_layers": None,
    "residual_dropout": 0.0,
    "residual_dropout_lima": False,
}
DTYPE_NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
KEYS_WITHOUT_OPTION = (
    "cache_dir",
    "use_flash_attention",
    "batch_size",
    "is_reward_model",
    "seq2seqmodel",
    "peft_type",
    "peft_model",
    "per_digit_tokens",
    "superhot",
)
TRUNCATION_KEYS = ("top_k", "top_p")
GENERATION = ("max_new_tokens", "min_new_tokens", "top_k", "top_p", "temperature")
DEBUG_ROWS = 10


def _read_group(mapping: KeyMapping, value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return {key: each for key, each in value.items() if each is not None}
    mapping.reject(value, "must be a group of keys")
    return {}


def _map_rank_config(mapping: KeyMapping, value: Any) -> None:
    for key, each in _read_group(mapping, value).items():
        if key in RANK_CONFIG_TARGETS:
            mapping.with_key(f"rank_config.{key}").set_option(
                RANK_CONFIG_TARGETS[key], DTYPE_NAMES.get(each, each) if key == "dtype" else each
            )
        elif key == "is_reward_model" and each is not True:
            mapping.rejections.append(
                (
                    f"rank_config.{key}",
                    f"rank_config.{key}={each}: rank_config is the reward model; write true",
                )
            )
        elif key not in (
            *KEYS_WITHOUT_OPTION,
            "residual_dropout",
            "residual_dropout_lima",
            "freeze_layer",
            "quantization",
        ):
            mapping.rejections.append(
                (
                    f"rank_config.{key}",
                    f"rank_config.{key}={each!r}: unknown; known are "
                    f"{', '.join(RANK_CONFIG_TARGETS)}",
                )
            )


def _map_sft_config(mapping: KeyMapping, value: Any) -> None:
    for key, each in _read_group(mapping, value).items():
        keyed = mapping.with_key(f"sft_config.{key}")
        if key == "model_name":
            for role in ("actor", "ref"):
                keyed.set_option(f"{role}.path", each)
        elif key == "quantization":
            keyed.set_option(
                "{model}.optimizer.state_dtype", "8bit" if each else "float32", off="float32"
            )
        elif (key == "num_layers_unfrozen" and each == -1) or (
            key == "residual_dropout_lima" and not value.get("residual_dropout")
        ):
            continue  # no effect: all layers are trained, or LIMA's dropout ramp ends at 0
        elif key in SFT_CONFIG_TARGETS:
            name = SFT_CONFIG_TARGETS[key]
            option_value = DTYPE_NAMES.get(each, each) if key == "dtype" else each
            for role in mapping.config.trained_roles if key == "dtype" else ("actor",):
                keyed.set_option(
                    f"{role}.{name}", option_value, off=VALUES_WITHOUT_EFFECT.get(name, object())
                )
        elif key in ("is_reward_model", "seq2seqmodel", "peft_model", "superhot") and each:
            mapping.rejections.append(
                (
                    f"sft_config.{key}",
                    f"sft_config.{key}={each}: the policy is a decoder; leave it out",
                )
            )
        elif key not in KEYS_WITHOUT_OPTION:
            known = ", ".join(("model_name", "quantization", *SFT_CONFIG_TARGETS))
            mapping.rejections.append(
                (f"sft_config.{key}", f"sft_config.{key}={each!r}: unknown; known are {known}")
            )


def _map_to_server(role: str) -> KeyRule:
    def apply_rule(mapping: KeyMapping, value: Any) -> None:
        url = str(value)
        if "/" not in url.split("://")[-1]:
            mapping.reject(value, "must be host:port/model")
            return
        mapping.set_option(f"{role}.url", url if "://" in url else f"grpc://{url}")

    return KeyRule(
        f"`{role}.url=grpc://HOST:PORT/MODEL`; null computes it in the run", apply_rule, (RL,)
    )


def _map_to_paths(*targets: str) -> KeyRule:
    def apply_rule(mapping: KeyMapping, value: Any) -> None:
        for target in targets:
            mapping.set_option(target, value)

    return KeyRule(" and ".join(f"`{target}`" for target in targets), apply_rule, (RL,))


# -- batch sizes and intervals: trlX counts updates (one batch each), weft rounds of rollouts


ROLLOUT_KEYS = ("num_rollouts", "trlx.method.num_rollouts")
BATCH_KEYS = ("batch_size", "trlx.train.batch_size")
TOTAL_STEP_KEYS = ("total_steps", "trlx.train.total_steps")


def _find_latest_key(mapping: KeyMapping, keys: Sequence[str]) -> str:
    """Return the key in `keys` that was set last, or `IMPLIED` if none of the keys is set.

    Config sections are applied in the order in which the user names them, and the command line is
    applied last. If one section sets several of the keys, the one that comes first in `keys` is
    returned.
    """
    return max(
        (key for key in keys if mapping.get(key) is not None), key=mapping.get_rank, default=IMPLIED
    )


def _read_number(mapping: KeyMapping, keys: Sequence[str], default: int) -> int:
    """Return the value of the key in `keys` that was set last (see `_find_latest_key`).

    Returns `default` if none of the keys is set, or if the value is not a number of at least 1.
    """
    key = _find_latest_key(mapping, keys)
    if key != IMPLIED and mapping.with_key(key).is_valid_number(mapping.get(key), 1):
        return int(mapping.get(key))
    return default


def _count_rollouts(mapping: KeyMapping) -> int:
    return _read_number(mapping, ROLLOUT_KEYS, 128)


def _compute_batch_size(mapping: KeyMapping) -> int:
    return min(_read_number(mapping, BATCH_KEYS, 1), _count_rollouts(mapping))


def _count_updates(mapping: KeyMapping) -> int:
    """Return the number of optimizer updates per step.

    This is the number of passes over the rollouts times the number of batches per pass.
    """
    return _read_number(mapping, ("trlx.method.ppo_epochs",), 4) * math.ceil(
        _count_rollouts(mapping) / _compute_batch_size(mapping)
    )


def _map_batch_sizes(mapping: KeyMapping, value: Any) -> None:
    """Set the number of rollouts per step and the minibatch size.

    In trlX, both numbers are per device, so they are multiplied by the number of data-parallel
    ranks.
    """
    mapping.with_key(_find_latest_key(mapping, ROLLOUT_KEYS)).set_option(
        "dataset.train_bs_n_seqs", _count_rollouts(mapping) * mapping.data_ranks
    )
    mapping.with_key(_find_latest_key(mapping, BATCH_KEYS)).set_option(
        "{algorithm}.mini_batch_size", _compute_batch_size(mapping) * mapping.data_ranks
    )


def _map_total_steps(mapping: KeyMapping, value: Any) -> None:
    mapping.with_key(_find_latest_key(mapping, TOTAL_STEP_KEYS)).set_option(
        "max_steps", math.ceil(_read_number(mapping, TOTAL_STEP_KEYS, 1) / _count_updates(mapping))
    )


def _map_to_interval(target: str) -> KeyRule:
    def apply_rule(mapping: KeyMapping, value: Any) -> None:
        if mapping.is_valid_number(value, 1):
            mapping.set_option(target, max(1, round(value / _count_updates(mapping))))

    return KeyRule(f"`{target}`, counted in rounds of rollouts", apply_rule, (RL,))


def _map_debug(mapping: KeyMapping, value: Any) -> None:
    if mapping.check_boolean(value):
        mapping.reject(
            value,
            f"write num_rollouts=1 total_steps=4 and size: {DEBUG_ROWS} below the names of "
            f"datasets instead",
        )


# -- trlX


def _map_adaptive_kl(mapping: KeyMapping, value: Any) -> None:
    mapping.set_option("{algorithm}.use_adaptive_kl_ctl", True)
    mapping.set_option("{algorithm}.adaptive_kl_target", value)


def _map_scheduler(mapping: KeyMapping, value: Any) -> None:
    kinds = {"cosine_annealing": "cosine", "linear": "linear", "constant": "constant"}
    if value not in kinds:
        mapping.reject(value, f"must be one of {', '.join(kinds)}")
        return
    mapping.set_option("{model}.optimizer.lr_scheduler_type", kinds[value])


def _map_schedule_period(mapping: KeyMapping, value: Any) -> None:
    if not mapping.is_valid_number(value, 1):
        return
    total = _read_number(mapping, TOTAL_STEP_KEYS, int(value))
    if value == total:
        return
    if mapping.get_rank(_find_latest_key(mapping, TOTAL_STEP_KEYS)) > mapping.get_rank(mapping.key):
        mapping.add_note(
            f"the learning rate's schedule ends with the run, after total_steps={total}"
        )
    else:
        mapping.reject(
            value, f"must equal total_steps={total}, because a schedule ends with the run"
        )


def _map_betas(mapping: KeyMapping, value: Any) -> None:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        mapping.reject(value, "must be a list of two numbers, such as [0.9, 0.95]")
        return
    for index, beta in enumerate(value, 1):
        mapping.set_option(f"{{model}}.optimizer.beta{index}", beta)


def _map_to_generation(name: str) -> KeyRule:
    key = map_to_option("{gen}." + name, RL)
    if name not in TRUNCATION_KEYS:
        return key
    return replace(key, rule=partial(_map_truncation, name))


def _map_truncation(name: str, mapping: KeyMapping, value: Any) -> None:
    """Set the sampling limit `name`, such as top_k.

    If a server computes the reference log-probs, the limit is not set and a note is added, because
    the server normalizes its log-probs over the whole vocabulary.
    """
    if mapping.get("triton_host_sft") is not None and value not in (0, 1):
        mapping.add_note(
            f"{name}={format_yaml_value(value)} is left out: the server of triton_host_sft returns "
            f"log-probs over all ids"
        )
    else:
        mapping.set_option("{gen}." + name, value)


def _map_do_sample(mapping: KeyMapping, value: Any) -> None:
    mapping.set_option("{gen}.greedy", not mapping.check_boolean(value))


def _map_prompt_length(mapping: KeyMapping, value: Any) -> None:
    longest = mapping.get("trlx.method.gen_kwargs.max_new_tokens", 40)
    if mapping.is_valid_number(value, 2) and isinstance(longest, int):
        if longest >= value:
            mapping.reject(value, f"leaves no room for a prompt with max_new_tokens={longest}")
            return
        mapping.set_option("dataset.max_prompt_len", value - longest)
        mapping.set_option("dataset.overlong", "truncate")


def _map_tracker(mapping: KeyMapping, value: Any) -> None:
    if value == "tensorboard":
        mapping.set_option("logger.tensorboard", True)
    elif value != "wandb":
        mapping.reject(value, "must be wandb, tensorboard or null")
    else:
        mapping.add_note("logger.wandb.mode=online turns Weights & Biases on")


def _map_last_layers(mapping: KeyMapping, value: Any) -> None:
    if value != -1:
        mapping.set_option("{first}.train_last_layers", value)


def _map_reward_deviation(mapping: KeyMapping, value: Any) -> None:
    if mapping.is_valid_number(value, 1e-12):
        mapping.set_option("{algorithm}.reward_output_scaling", 1 / value)


def _set_implied_options(mapping: KeyMapping, value: Any) -> None:
    """Set the options that correspond to fixed behavior of trlX.

    In trlX, the value head is part of the policy, so the critic is initialized from the actor.
    Values are not normalized, and there is neither early stopping nor learning-rate warm-up.
    """
    for name, each in (
        ("value_norm", False),
        ("early_stop_imp_ratio", None),
        ("critic_init", "actor"),
    ):
        mapping.set_option("{algorithm}." + name, each, off=each)
    mapping.set_option("{model}.optimizer.warmup_steps", 0, off=0)


TRLX: dict[str, KeyRule] = {
    f"trlx.{name}": key
    for name, key in {
        "train.seq_length": KeyRule(
            "`dataset.max_prompt_len`, less the tokens of a completion; longer prompts are cut",
            _map_prompt_length,
            (RL,),
        ),
        "train.epochs": map_to_option("total_train_epochs", RL),
        "train.total_steps": KeyRule(
            "`max_steps`, counted in rounds of rollouts", _map_total_steps, (RL,)
        ),
        "train.batch_size": KeyRule(
            "`ppo.mini_batch_size`, times data-parallel ranks", _map_batch_sizes, (RL,)
        ),
        "train.checkpoint_interval": _map_to_interval("save_freq_steps"),
        "train.eval_interval": _map_to_interval("eval_freq_steps"),
        "train.pipeline": ignore_with_note("one loop trains every algorithm", RL),
        "train.trainer": ignore_with_note("one loop trains every algorithm", RL),
        "train.tracker": KeyRule(
            "tensorboard: `logger.tensorboard`; wandb is noted", _map_tracker, (RL,)
        ),
        "train.project_name": ignore_with_note("logger.wandb.project names it", RL),
        "train.entity_name": ignore_with_note("logger.wandb.entity names it", RL),
        "train.seed": map_to_option("seed", RL),
        "train.checkpoint_dir": map_to_option("fileroot", RL),
        "model.model_path": map_to_option("{first}.path", RL),
        "model.model_arch_type": reject_unless(
            "policies are decoders; write causal", "causal", modes=(RL,)
        ),
        "model.num_layers_unfrozen": KeyRule(
            "`actor.train_last_layers`; -1 is all of them", _map_last_layers, (RL,)
        ),
        "tokenizer.tokenizer_path": map_to_option("{first}.tokenizer.path", RL),
        "tokenizer.truncation_side": map_to_option("dataset.truncate_side", RL),
        "tokenizer.padding_side": ignore_with_note("nothing is padded", RL),
        "optimizer.name": map_to_option("{model}.optimizer.type", RL),
        "optimizer.kwargs.lr": map_to_option("{model}.optimizer.lr", RL),
        "optimizer.kwargs.betas": KeyRule("`MODEL.optimizer.beta1` and `beta2`", _map_betas, (RL,)),
        "optimizer.kwargs.eps": map_to_option("{model}.optimizer.eps", RL),
        "optimizer.kwargs.weight_decay": map_to_option("{model}.optimizer.weight_decay", RL),
        "scheduler.name": KeyRule("`MODEL.optimizer.lr_scheduler_type`", _map_scheduler, (RL,)),
        "scheduler.kwargs.T_max": KeyRule(
            "nothing where `total_steps` is set over it, else refused unless they are equal: a "
            "schedule ends with the run",
            _map_schedule_period,
            (RL,),
        ),
        "scheduler.kwargs.eta_min": map_to_option("{model}.optimizer.end_lr", RL),
        "method.name": reject_unless(
            "weft quickstart ppo is PPO", "ppoconfig", "PPOConfig", modes=(RL,)
        ),
        "method.num_rollouts": KeyRule(
            "`dataset.train_bs_n_seqs`, times data-parallel ranks", _map_batch_sizes, (RL,)
        ),
        "method.chunk_size": ignore_with_note(
            "the number of completions sampled at a time depends on memory", RL
        ),
        "method.ppo_epochs": map_to_option("{algorithm}.ppo_epochs", RL),
        "method.init_kl_coef": map_to_option("{algorithm}.kl_ctl", RL),
        "method.target": KeyRule(
            "`ppo.use_adaptive_kl_ctl` and `ppo.adaptive_kl_target`", _map_adaptive_kl, (RL,)
        ),
        "method.horizon": map_to_option("{algorithm}.adaptive_kl_horizon", RL),
        "method.gamma": map_to_option("{algorithm}.discount", RL),
        "method.lam": map_to_option("{algorithm}.gae_lambda", RL),
        "method.cliprange": map_to_option("{algorithm}.eps_clip", RL),
        "method.cliprange_value": map_to_option("{algorithm}.value_eps_clip", RL),
        "method.vf_coef": reject_unless(
            "the critic is a separate network with its own optimizer; write 1", 1, modes=(RL,)
        ),
        "method.scale_reward": reject_unless(
            "rewards are not rescaled while training; write ppo.reward_output_scaling",
            False,
            modes=(RL,),
        ),
        "method.ref_mean": map_to_option("{algorithm}.reward_output_bias", RL),
        "method.ref_std": KeyRule(
            "`ppo.reward_output_scaling`, 1 over it", _map_reward_deviation, (RL,)
        ),
        "method.cliprange_reward": map_to_option("{algorithm}.max_reward_clip", RL),
        **{f"method.gen_kwargs.{name}": _map_to_generation(name) for name in GENERATION},
        "method.gen_kwargs.do_sample": KeyRule(
            "`GEN.greedy`, the other way round", _map_do_sample, (RL,)
        ),
    }.items()
} | {"implied": KeyRule("", _set_implied_options, (RL,))}

KEYS: dict[str, KeyRule] = {
    "batch_size": KeyRule(
        "`ppo.mini_batch_size`, times data-parallel ranks", _map_batch_sizes, (RL,)
    ),
    "chunk_size": ignore_with_note(
        "the number of completions sampled at a time depends on memory", RL
    ),
    "num_rollouts": KeyRule(
        "`dataset.train_bs_n_seqs`, times data-parallel ranks", _map_batch_sizes, (RL,)
    ),
    "total_steps": KeyRule("`max_steps`, counted in rounds of rollouts", _map_total_steps, (RL,)),
    "reward_model_batch_size": ignore_with_note(
        "micro-batches are counted in tokens, max_tokens_per_microbatch"
    ),
    "num_eval_prompts": KeyRule("`max_valid` of every source", lambda mapping, value: None, (RL,)),
    "rank_config": KeyRule(
        "the reward model: `rew.path`, `rew.pooling`, `rew.dtype`", _map_rank_config, (RL,)
    ),
    "sft_config": KeyRule("the policy: `actor.*`, and `ref.path`", _map_sft_config, (RL,)),
    "rank_model": _map_to_paths("rew.path"),
    "sft_model": _map_to_paths("actor.path", "ref.path"),
    "triton_host_rm": _map_to_server("rew"),
    "triton_host_sft": _map_to_server("ref"),
    "debug": KeyRule("rejected if it is true; set the sizes instead", _map_debug, (RL,)),
}
