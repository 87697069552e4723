"""Mapping of Open-Assistant's RL keys, and of trlX's PPO configuration that it reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from weft.cli.open_assistant.mapped import IMPLIED, RL, Key, Mapped, anyway, never, shown, to

# Keys of rank_config (reward model) and sft_config (policy) -> options of their roles.
RANK = {"model_name": "rew.path", "pooling": "rew.pooling", "dtype": "rew.dtype"}
POLICY = {
    "dtype": "dtype",
    "freeze_layer": "freeze_layers",
    "num_layers_unfrozen": "train_last_layers",
    "residual_dropout": "residual_dropout",
    "residual_dropout_lima": "residual_dropout_lima",
    "gradient_checkpointing": "gradient_checkpointing",
}
OFF = {
    "freeze_layers": None,
    "train_last_layers": None,
    "residual_dropout": 0.0,
    "residual_dropout_lima": False,
}
HALF = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
ANYWAY = (
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
TRUNCATES = ("top_k", "top_p")
GENERATION = ("max_new_tokens", "min_new_tokens", "top_k", "top_p", "temperature")
DEBUG_ROWS = 10


def _group(done: Mapped, value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return {key: each for key, each in value.items() if each is not None}
    done.refuse(value, "must be a group of keys")
    return {}


def _rank(done: Mapped, value: Any) -> None:
    for key, each in _group(done, value).items():
        if key in RANK:
            done.under(f"rank_config.{key}").put(
                RANK[key], HALF.get(each, each) if key == "dtype" else each
            )
        elif key == "is_reward_model" and each is not True:
            done.refused.append(
                (
                    f"rank_config.{key}",
                    f"rank_config.{key}={each}: rank_config is the reward model; write true",
                )
            )
        elif key not in (
            *ANYWAY,
            "residual_dropout",
            "residual_dropout_lima",
            "freeze_layer",
            "quantization",
        ):
            done.refused.append(
                (
                    f"rank_config.{key}",
                    f"rank_config.{key}={each!r}: unknown; known are {', '.join(RANK)}",
                )
            )


def _policy(done: Mapped, value: Any) -> None:
    for key, each in _group(done, value).items():
        at = done.under(f"sft_config.{key}")
        if key == "model_name":
            for role in ("actor", "ref"):
                at.put(f"{role}.path", each)
        elif key == "quantization":
            at.put("{model}.optimizer.state_dtype", "8bit" if each else "float32", off="float32")
        elif (key == "num_layers_unfrozen" and each == -1) or (
            key == "residual_dropout_lima" and not value.get("residual_dropout")
        ):
            continue  # no effect: all layers are trained, or LIMA's dropout ramp ends at 0
        elif key in POLICY:
            name = POLICY[key]
            made = HALF.get(each, each) if key == "dtype" else each
            for role in done.config.trained_roles if key == "dtype" else ("actor",):
                at.put(f"{role}.{name}", made, off=OFF.get(name, object()))
        elif key in ("is_reward_model", "seq2seqmodel", "peft_model", "superhot") and each:
            done.refused.append(
                (
                    f"sft_config.{key}",
                    f"sft_config.{key}={each}: the policy is a decoder; leave it out",
                )
            )
        elif key not in ANYWAY:
            known = ", ".join(("model_name", "quantization", *POLICY))
            done.refused.append(
                (f"sft_config.{key}", f"sft_config.{key}={each!r}: unknown; known are {known}")
            )


def _server(role: str) -> Key:
    def rule(done: Mapped, value: Any) -> None:
        url = str(value)
        if "/" not in url.split("://")[-1]:
            done.refuse(value, "must be host:port/model")
            return
        done.put(f"{role}.url", url if "://" in url else f"grpc://{url}")

    return Key(f"`{role}.url=grpc://HOST:PORT/MODEL`; null computes it in the run", rule, (RL,))


def _path(*targets: str) -> Key:
    def rule(done: Mapped, value: Any) -> None:
        for target in targets:
            done.put(target, value)

    return Key(" and ".join(f"`{target}`" for target in targets), rule, (RL,))


# -- how long, how large: an update of trlX is one batch, a step of weft one round of rollouts


ROLLOUTS = ("num_rollouts", "trlx.method.num_rollouts")
BATCH = ("batch_size", "trlx.train.batch_size")
TOTAL = ("total_steps", "trlx.train.total_steps")


def _latest(done: Mapped, keys: Sequence[str]) -> str:
    """Return the key set last in the stack, `IMPLIED` if none is set.

    Of two keys in one section the first is returned.
    """
    return max((key for key in keys if done.get(key) is not None), key=done.rank, default=IMPLIED)


def _number(done: Mapped, keys: Sequence[str], default: int) -> int:
    """Return the number under the key that was set last."""
    key = _latest(done, keys)
    if key != IMPLIED and done.under(key).number(done.get(key), 1):
        return int(done.get(key))
    return default


def _rollouts(done: Mapped) -> int:
    return _number(done, ROLLOUTS, 128)


def _batch(done: Mapped) -> int:
    return min(_number(done, BATCH, 1), _rollouts(done))


def _updates(done: Mapped) -> int:
    """Return the optimizer updates per step: passes over the rollouts x batches per pass."""
    return _number(done, ("trlx.method.ppo_epochs",), 4) * math.ceil(_rollouts(done) / _batch(done))


def _sizes(done: Mapped, value: Any) -> None:
    """Map the rollouts per step and the batch of an update; both are per device in trlX."""
    done.under(_latest(done, ROLLOUTS)).put(
        "dataset.train_bs_n_seqs", _rollouts(done) * done.data_ranks
    )
    done.under(_latest(done, BATCH)).put(
        "{algorithm}.mini_batch_size", _batch(done) * done.data_ranks
    )


def _total(done: Mapped, value: Any) -> None:
    done.under(_latest(done, TOTAL)).put(
        "max_steps", math.ceil(_number(done, TOTAL, 1) / _updates(done))
    )


def _every(target: str) -> Key:
    def rule(done: Mapped, value: Any) -> None:
        if done.number(value, 1):
            done.put(target, max(1, round(value / _updates(done))))

    return Key(f"`{target}`, counted in rounds of rollouts", rule, (RL,))


def _debug(done: Mapped, value: Any) -> None:
    if done.truth(value):
        done.refuse(
            value,
            f"write num_rollouts=1 total_steps=4 and size: {DEBUG_ROWS} below the names of "
            f"datasets instead",
        )


# -- trlX


def _adaptive(done: Mapped, value: Any) -> None:
    done.put("{algorithm}.use_adaptive_kl_ctl", True)
    done.put("{algorithm}.adaptive_kl_target", value)


def _scheduler(done: Mapped, value: Any) -> None:
    kinds = {"cosine_annealing": "cosine", "linear": "linear", "constant": "constant"}
    if value not in kinds:
        done.refuse(value, f"must be one of {', '.join(kinds)}")
        return
    done.put("{model}.optimizer.lr_scheduler_type", kinds[value])


def _period(done: Mapped, value: Any) -> None:
    if not done.number(value, 1):
        return
    total = _number(done, TOTAL, int(value))
    if value == total:
        return
    if done.rank(_latest(done, TOTAL)) > done.rank(done.key):
        done.note(f"the learning rate's schedule ends with the run, after total_steps={total}")
    else:
        done.refuse(value, f"must equal total_steps={total}, because a schedule ends with the run")


def _betas(done: Mapped, value: Any) -> None:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        done.refuse(value, "must be a list of two numbers, such as [0.9, 0.95]")
        return
    for index, beta in enumerate(value, 1):
        done.put(f"{{model}}.optimizer.beta{index}", beta)


def _generation(name: str) -> Key:
    key = to("{gen}." + name, RL)
    if name not in TRUNCATES:
        return key
    return replace(key, rule=partial(_truncation, name))


def _truncation(name: str, done: Mapped, value: Any) -> None:
    """Map a sampling limit.

    It is left out if a server is the reference, which cannot know the excluded ids.
    """
    if done.get("triton_host_sft") is not None and value not in (0, 1):
        done.note(
            f"{name}={shown(value)} is left out: the server of triton_host_sft returns "
            f"log-probs over all ids"
        )
    else:
        done.put("{gen}." + name, value)


def _sample(done: Mapped, value: Any) -> None:
    done.put("{gen}.greedy", not done.truth(value))


def _prompt_length(done: Mapped, value: Any) -> None:
    longest = done.get("trlx.method.gen_kwargs.max_new_tokens", 40)
    if done.number(value, 2) and isinstance(longest, int):
        if longest >= value:
            done.refuse(value, f"leaves no room for a prompt with max_new_tokens={longest}")
            return
        done.put("dataset.max_prompt_len", value - longest)
        done.put("dataset.overlong", "truncate")


def _tracker(done: Mapped, value: Any) -> None:
    if value == "tensorboard":
        done.put("logger.tensorboard", True)
    elif value != "wandb":
        done.refuse(value, "must be wandb, tensorboard or null")
    else:
        done.note("logger.wandb.mode=online turns Weights & Biases on")


def _last_layers(done: Mapped, value: Any) -> None:
    if value != -1:
        done.put("{first}.train_last_layers", value)


def _deviation(done: Mapped, value: Any) -> None:
    if done.number(value, 1e-12):
        done.put("{algorithm}.reward_output_scaling", 1 / value)


def _implied(done: Mapped, value: Any) -> None:
    """Set the options that match trlX's fixed behaviour.

    The value head is on the policy; no value scaling, early stop or warm-up.
    """
    for name, each in (
        ("value_norm", False),
        ("early_stop_imp_ratio", None),
        ("critic_init", "actor"),
    ):
        done.put("{algorithm}." + name, each, off=each)
    done.put("{model}.optimizer.warmup_steps", 0, off=0)


TRLX: dict[str, Key] = {
    f"trlx.{name}": key
    for name, key in {
        "train.seq_length": Key(
            "`dataset.max_prompt_len`, less the tokens of a completion; longer prompts are cut",
            _prompt_length,
            (RL,),
        ),
        "train.epochs": to("total_train_epochs", RL),
        "train.total_steps": Key("`max_steps`, counted in rounds of rollouts", _total, (RL,)),
        "train.batch_size": Key("`ppo.mini_batch_size`, times data-parallel ranks", _sizes, (RL,)),
        "train.checkpoint_interval": _every("save_freq_steps"),
        "train.eval_interval": _every("eval_freq_steps"),
        "train.pipeline": anyway("one loop trains every algorithm", RL),
        "train.trainer": anyway("one loop trains every algorithm", RL),
        "train.tracker": Key("tensorboard: `logger.tensorboard`; wandb is noted", _tracker, (RL,)),
        "train.project_name": anyway("logger.wandb.project names it", RL),
        "train.entity_name": anyway("logger.wandb.entity names it", RL),
        "train.seed": to("seed", RL),
        "train.checkpoint_dir": to("fileroot", RL),
        "model.model_path": to("{first}.path", RL),
        "model.model_arch_type": never(
            "policies are decoders; write causal", "causal", modes=(RL,)
        ),
        "model.num_layers_unfrozen": Key(
            "`actor.train_last_layers`; -1 is all of them", _last_layers, (RL,)
        ),
        "tokenizer.tokenizer_path": to("{first}.tokenizer.path", RL),
        "tokenizer.truncation_side": to("dataset.truncate_side", RL),
        "tokenizer.padding_side": anyway("nothing is padded", RL),
        "optimizer.name": to("{model}.optimizer.type", RL),
        "optimizer.kwargs.lr": to("{model}.optimizer.lr", RL),
        "optimizer.kwargs.betas": Key("`MODEL.optimizer.beta1` and `beta2`", _betas, (RL,)),
        "optimizer.kwargs.eps": to("{model}.optimizer.eps", RL),
        "optimizer.kwargs.weight_decay": to("{model}.optimizer.weight_decay", RL),
        "scheduler.name": Key("`MODEL.optimizer.lr_scheduler_type`", _scheduler, (RL,)),
        "scheduler.kwargs.T_max": Key(
            "nothing where `total_steps` is set over it, else refused unless they are equal: a "
            "schedule ends with the run",
            _period,
            (RL,),
        ),
        "scheduler.kwargs.eta_min": to("{model}.optimizer.end_lr", RL),
        "method.name": never("weft quickstart ppo is PPO", "ppoconfig", "PPOConfig", modes=(RL,)),
        "method.num_rollouts": Key(
            "`dataset.train_bs_n_seqs`, times data-parallel ranks", _sizes, (RL,)
        ),
        "method.chunk_size": anyway(
            "the number of completions sampled at a time depends on memory", RL
        ),
        "method.ppo_epochs": to("{algorithm}.ppo_epochs", RL),
        "method.init_kl_coef": to("{algorithm}.kl_ctl", RL),
        "method.target": Key(
            "`ppo.use_adaptive_kl_ctl` and `ppo.adaptive_kl_target`", _adaptive, (RL,)
        ),
        "method.horizon": to("{algorithm}.adaptive_kl_horizon", RL),
        "method.gamma": to("{algorithm}.discount", RL),
        "method.lam": to("{algorithm}.gae_lambda", RL),
        "method.cliprange": to("{algorithm}.eps_clip", RL),
        "method.cliprange_value": to("{algorithm}.value_eps_clip", RL),
        "method.vf_coef": never(
            "the critic is a network with an optimizer of its own; write 1", 1, modes=(RL,)
        ),
        "method.scale_reward": never(
            "rewards are not rescaled while training; write ppo.reward_output_scaling",
            False,
            modes=(RL,),
        ),
        "method.ref_mean": to("{algorithm}.reward_output_bias", RL),
        "method.ref_std": Key("`ppo.reward_output_scaling`, 1 over it", _deviation, (RL,)),
        "method.cliprange_reward": to("{algorithm}.max_reward_clip", RL),
        **{f"method.gen_kwargs.{name}": _generation(name) for name in GENERATION},
        "method.gen_kwargs.do_sample": Key("`GEN.greedy`, the other way round", _sample, (RL,)),
    }.items()
} | {"implied": Key("", _implied, (RL,))}

KEYS: dict[str, Key] = {
    "batch_size": Key("`ppo.mini_batch_size`, times data-parallel ranks", _sizes, (RL,)),
    "chunk_size": anyway("the number of completions sampled at a time depends on memory", RL),
    "num_rollouts": Key("`dataset.train_bs_n_seqs`, times data-parallel ranks", _sizes, (RL,)),
    "total_steps": Key("`max_steps`, counted in rounds of rollouts", _total, (RL,)),
    "reward_model_batch_size": anyway(
        "micro-batches are counted in tokens, max_tokens_per_microbatch"
    ),
    "num_eval_prompts": Key("`max_valid` of every source", lambda done, value: None, (RL,)),
    "rank_config": Key("the reward model: `rew.path`, `rew.pooling`, `rew.dtype`", _rank, (RL,)),
    "sft_config": Key("the policy: `actor.*`, and `ref.path`", _policy, (RL,)),
    "rank_model": _path("rew.path"),
    "sft_model": _path("actor.path", "ref.path"),
    "triton_host_rm": _server("rew"),
    "triton_host_sft": _server("ref"),
    "debug": Key("refused where it is true: sizes say it better", _debug, (RL,)),
}
