"""Mapping of all keys of Open-Assistant's SFT and reward-model configs to weft's options.

The keys for RL are in `rl`.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any

from weft.cli.aliases import collect_renamed, collect_translators
from weft.compat.open_assistant.key_mapping import (
    IMPLIED,
    RL,
    RM,
    SFT,
    VALID_SPLIT,
    InvalidDatasetEntry,
    KeyMapping,
    KeyRule,
    convert_entries,
    ignore_with_note,
    limit_validation,
    map_to_option,
    reject_unless,
    scale_entries,
)
from weft.compat.open_assistant.rl import KEYS as RL_KEYS
from weft.compat.open_assistant.rl import TRLX

DTYPES = {
    "fp16": "float16",
    "float16": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp32": "float32",
    "float32": "float32",
}
LOSSES = {
    (SFT, "CrossEntropyLoss"): ("sft.loss_type", "cross_entropy"),
    (SFT, "PolyLoss"): ("sft.loss_type", "poly"),
    (SFT, "Poly"): ("sft.loss_type", "poly"),
    (RM, "RMLoss"): ("rw.loss_type", "ranking"),
    (RM, "RMCLSLoss"): ("rw.loss_type", "classification"),
}
DEFAULT_LOSSES = ("cross_entropy", "ranking")
METRICS = ("accuracy", "kendalltau", "spearmanr")
PREFIX = "prefix-tuning"
PREFIX_TOKENS = 30
WORDS = (
    "a prefix leaves the model as it is, without added tokens, so dialogues have zephyr's form, "
    "in words; for a model that has "
    "Open-Assistant's tokens write model.tokenizer.chat_template=oasst"
)
PROJECTION = "the prefix's keys and values are trained themselves, without a projection"
LORA = {"r": ("r", 16), "lora_alpha": ("alpha", 32), "lora_dropout": ("dropout", 0.05)}
TASKS = ("CAUSAL_LM", "SEQ_CLS")
LINEAR = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
MIXING_PROBABILITY = 0.4  # probability that samples_mixing joins two short samples
# tokens that mark the turns of a dialogue
TOKENS = ["<|prompter|>", "<|assistant|>", "<|system|>", "<|prefix_begin|>", "<|prefix_end|>"]
# For tokenizers without an end token: part of the model's name -> (padding, end).
UNNAMED_END = {"galactica": ("<pad>", "</s>")}
PROJECTS = {SFT: "supervised-finetuning", RM: "reward-model", RL: "rlhf"}


def _map_dtype(done: KeyMapping, value: Any) -> None:
    if value not in DTYPES:
        done.reject(value, f"must be one of {', '.join(DTYPES)}")
        return
    done.set_option("{model}.dtype", DTYPES[value])


def _map_epochs(done: KeyMapping, value: Any) -> None:
    if not done.is_valid_number(value):
        return
    if value > 1 and value != int(value):
        done.reject(
            value,
            f"epochs are whole above 1; write {math.floor(value)} or {math.ceil(value)}, or set "
            f"max_steps",
        )
    else:
        done.set_option("total_train_epochs", max(1, int(value)))
    if value <= 0:
        done.reject(value, "must be above 0")


def _map_saving(done: KeyMapping, value: Any) -> None:
    """Map save_strategy and save_steps to the interval between checkpoints."""
    strategy = done.get("save_strategy", "steps")
    steps = done.get("save_steps")
    if strategy not in ("no", "steps", "epoch"):
        done.with_key("save_strategy").reject(strategy, "must be no, steps or epoch")
    elif strategy == "epoch":
        done.with_key("save_strategy").set_option("save_freq_epochs", 1)
    elif strategy == "steps" and steps is not None:
        later = max(("save_steps", "save_strategy"), key=lambda key: done.ranks.get(key, -1))
        done.with_key(later).set_option("save_freq_steps", steps)


def _map_datasets(done: KeyMapping, value: Any) -> None:
    """Map the keys `datasets` and `datasets_extra`, in this order, to `dataset.sources`.

    Validation sets are limited to `eval_size` rows and, in RL, also to `num_eval_prompts` rows. If
    `num_train_epochs` is below 1, an epoch uses only this fraction of the rows (except in RL).
    """
    entries = []
    for key in ("datasets", "datasets_extra"):
        if not done.get(key):
            continue
        try:
            entries += convert_entries(done.get(key))
        except InvalidDatasetEntry as bad:
            place = key if bad.index < 0 else f"{key}[{bad.index}]"
            done.rejections.append((place, f"{place}: {bad}"))
    limits = [
        done.get(key) for key in ("eval_size", *(("num_eval_prompts",) if done.mode == RL else ()))
    ]
    for key, limit in zip(("eval_size", "num_eval_prompts"), limits, strict=False):
        if limit is not None and done.with_key(key).is_valid_number(limit) and limit:
            entries = limit_validation(entries, int(limit))
    share = done.get("num_train_epochs", 1)
    if done.mode != RL and isinstance(share, float) and 0 < share < 1:
        try:
            entries = scale_entries(entries, share)
        except InvalidDatasetEntry as bad:
            done.rejections.append(
                (
                    f"datasets[{bad.index}]",
                    f"num_train_epochs={share} of datasets[{bad.index}]: {bad}",
                )
            )
    if entries:
        later = max(("datasets", "datasets_extra"), key=lambda key: done.ranks.get(key, -1))
        done.with_key(later).set_option("dataset.sources", entries)


def _map_loss(done: KeyMapping, value: Any) -> None:
    loss = LOSSES.get((done.mode, value))
    if loss is None:
        known = [name for mode, name in LOSSES if mode == done.mode]
        if any(name == value for _, name in LOSSES) and done.ranks.get("loss_fn", -1) >= 0:
            done.reject(
                value,
                f"is not a loss of weft quickstart {done.config.algorithm}; write "
                f"{' or '.join(known)}",
            )
        else:
            done.reject(value, f"must be one of {', '.join(name for _, name in LOSSES)}")
    elif done.config.algorithm in ("sft", "rw"):
        done.set_option(loss[0], loss[1], off=loss[1] if loss[1] in DEFAULT_LOSSES else None)
    else:
        done.add_note(f"the loss is that of {done.config.algorithm}")


def _map_poly_eps(done: KeyMapping, value: Any) -> None:
    if done.is_valid_number(value) and done.get("loss_fn") in ("PolyLoss", "Poly"):
        done.set_option("sft.poly_eps", value)


def _map_wandb(done: KeyMapping, value: Any) -> None:
    if not done.check_boolean(value):
        return
    if importlib.util.find_spec("wandb") is None:
        done.add_note(
            "wandb is not installed, so metrics are only in the run's files; pip install "
            "wandb, or log_wandb=false"
        )
        return
    done.set_option("logger.wandb.mode", "online")
    done.set_option("logger.wandb.project", PROJECTS[done.mode])


def _map_system_prefix(done: KeyMapping, value: Any) -> None:
    if done.check_boolean(value):
        if done.get("system_prefix"):
            done.set_option("dataset.system_prefix", done.get("system_prefix"))
        else:
            done.reject(value, "needs a system_prefix")


def _map_mixing(done: KeyMapping, value: Any) -> None:
    done.set_option(
        "dataset.sample_mixing", MIXING_PROBABILITY if done.check_boolean(value) else 0.0, off=0.0
    )


def _map_reward_model(done: KeyMapping, value: Any) -> None:
    if done.check_boolean(value) and done.mode == SFT:
        done.reject(value, "weft quickstart sft trains no reward model; write weft quickstart rw")


def _map_quantization(done: KeyMapping, value: Any) -> None:
    done.set_option(
        "{model}.optimizer.state_dtype",
        "8bit" if done.check_boolean(value) else "float32",
        off="float32",
    )


def _map_int8(done: KeyMapping, value: Any) -> None:
    if done.check_boolean(value):
        done.set_option("{model}.quantize", "8bit")


def _freeze(done: KeyMapping, value: Any) -> None:
    if done.is_valid_number(value):
        done.set_option("{first}.freeze_layers", value or None, off=None)


def _map_lima(done: KeyMapping, value: Any) -> None:
    if done.check_boolean(value) and done.get("residual_dropout"):
        done.set_option("{model}.residual_dropout_lima", True)


def _map_peft(done: KeyMapping, value: Any) -> None:
    """Map peft_model, peft_type and peft_config to the options of LoRA or prefix tuning."""
    if not done.check_boolean(value):
        return
    settings = done.get("peft_config", {})
    if not isinstance(settings, Mapping):
        done.with_key("peft_config").reject(settings, "must be a group of keys")
        return
    kind = _get_peft_type(done)
    if kind == PREFIX:
        _map_prefix(done, settings)
        return
    if kind != "lora":
        done.with_key("peft_type").reject(
            kind, f"weft trains low-rank adapters and prefixes; write lora or {PREFIX}"
        )
        return
    for key, (name, default) in LORA.items():
        at = done.with_key(f"peft_config.{key}") if key in settings else done
        at.set_option(f"{{model}}.lora.{name}", settings.get(key, default))
    _map_targets(done.with_key("peft_config"), settings)
    known = {*LORA, "peft_type", "target_modules", "bias", "task_type", "modules_to_save"}
    for key in settings:
        if key not in known:
            done.rejections.append(
                (
                    f"peft_config.{key}",
                    f"peft_config.{key}={settings[key]!r}: weft's {kind} has no such setting",
                )
            )


def _get_peft_type(done: KeyMapping) -> Any:
    """Return the adapter type, by default "lora", or None if peft_model is disabled."""
    settings = done.get("peft_config", {})
    inner = settings.get("peft_type") if isinstance(settings, Mapping) else None
    if done.check_boolean(done.get("peft_model") or False):
        return inner or done.get("peft_type", "lora")
    return None


def _map_prefix(done: KeyMapping, settings: Mapping[str, Any]) -> None:
    """Map the settings of prefix tuning.

    If the number of prefix tokens is not set, Open-Assistant's default is used.
    """
    if "num_virtual_tokens" in settings:
        at = done.with_key("peft_config.num_virtual_tokens")
    else:
        at = done
    at.set_option("{model}.prefix.num_tokens", settings.get("num_virtual_tokens", PREFIX_TOKENS))
    done.with_key("peft_type").add_note(PROJECTION)
    for key in settings.keys() - {
        "num_virtual_tokens",
        "prefix_projection",
        "encoder_hidden_size",
        "peft_type",
        "task_type",
    }:
        done.with_key(f"peft_config.{key}").reject(
            settings[key], f"weft's {PREFIX} has no such setting"
        )


def _map_targets(done: KeyMapping, settings: Mapping[str, Any]) -> None:
    targets = settings.get("target_modules", "all")
    if targets != "all":
        names = [targets] if isinstance(targets, str) else list(targets)
        done.set_option(
            "{model}.lora.targets", [LINEAR.get(str(name), str(name)) for name in names]
        )
    if settings.get("bias", "none") != "none":
        done.rejections.append(
            (
                "peft_config.bias",
                f"peft_config.bias={settings['bias']}: biases stay as they are; write none",
            )
        )
    if settings.get("task_type", TASKS[0]) not in TASKS:
        done.rejections.append(
            (
                "peft_config.task_type",
                f"peft_config.task_type={settings['task_type']}: must be {TASKS[0]}",
            )
        )
    if "modules_to_save" in settings:
        done.add_note("modules_to_save: what new tokens need is trained and saved with the adapter")


def _map_rope(done: KeyMapping, value: Any) -> None:
    """Map superhot and superhot_config to `rope_scaling`."""
    if not done.check_boolean(value):
        return
    settings = done.get("superhot_config")
    if not isinstance(settings, Mapping) or settings.get("type") not in (
        "linear",
        "dynamic",
        "ntk",
    ):
        done.reject(
            value,
            "needs superhot_config: {type: linear|dynamic, scaling_factor: N} or {type: ntk, "
            "alpha: N}",
        )
        return
    named = {"scaling_factor": "factor"}
    scaling = {named.get(key, key): each for key, each in settings.items()}
    done.with_key("superhot_config").set_option("{model}.rope_scaling", scaling)


def _map_metrics(done: KeyMapping, value: Any) -> None:
    unknown = []
    for name in value if isinstance(value, list) else [value]:
        if name not in METRICS:
            unknown.append(name)
    if unknown:
        done.reject(value, f"weft measures {' and '.join(METRICS[:2])} of rankings")
    elif "spearmanr" in (value if isinstance(value, list) else [value]):
        done.add_note("spearmanr: a ranking is measured by kendalltau")
    else:
        done.add_note("accuracy and kendalltau are always measured")


def _map_valid_length(done: KeyMapping, value: Any) -> None:
    if value != done.get("max_length") and done.is_valid_number(value, 2):
        done.set_option("dataset.valid_max_seqlen", value)


def _read_with(other: str, *modes: str) -> KeyRule:
    return KeyRule(f"read with `{other}`", lambda done, value: None, modes or (SFT, RM))


SFT_AND_RM = (SFT, RM)
OPTIMIZER = {
    "learning_rate": "lr",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps",
    "weight_decay": "weight_decay",
    "max_grad_norm": "max_grad_norm",
}
KEYS: dict[str, KeyRule] = {
    **{name: map_to_option("{model}.optimizer." + option) for name, option in OPTIMIZER.items()},
    "warmup_steps": map_to_option("warmup_steps"),
    "rng_seed": map_to_option("seed", *SFT_AND_RM, RL),
    "model_name": map_to_option("{first}.path"),
    "gradient_checkpointing": map_to_option("{model}.gradient_checkpointing"),
    "gradient_accumulation_steps": KeyRule(
        "`dataset.train_bs_n_seqs`, times `per_device_train_batch_size` and data-parallel ranks",
        lambda done, value: done.set_option("gradient_accumulation_steps", value),
    ),
    "per_device_train_batch_size": KeyRule(
        "`dataset.train_bs_n_seqs`, times `gradient_accumulation_steps` and data-parallel ranks",
        lambda done, value: done.set_option("per_device_train_batch_size", value),
    ),
    "per_device_eval_batch_size": map_to_option("dataset.valid_bs_n_seqs"),
    "dtype": KeyRule(
        "`MODEL.dtype`: fp16 is float16, bf16 bfloat16, fp32 float32", _map_dtype, (*SFT_AND_RM, RL)
    ),
    "max_length": map_to_option("dataset.max_seqlen"),
    "val_max_length": KeyRule(
        "`dataset.valid_max_seqlen`, unless it is `max_length`", _map_valid_length
    ),
    "num_train_epochs": KeyRule(
        "`total_train_epochs`; below 1: a random share of every dataset", _map_epochs
    ),
    "logging_steps": map_to_option("log_freq_steps"),
    "eval_steps": map_to_option("eval_freq_steps"),
    "save_steps": KeyRule("`save_freq_steps`, with save_strategy steps", _map_saving),
    "save_strategy": KeyRule(
        "steps: `save_freq_steps`; epoch: `save_freq_epochs=1`; no: neither", _map_saving
    ),
    "save_total_limit": map_to_option("save_total_limit"),
    "output_dir": map_to_option("fileroot", *SFT_AND_RM, RL),
    "datasets": KeyRule("`dataset.sources`, by name", _map_datasets, (*SFT_AND_RM, RL)),
    "datasets_extra": KeyRule(
        "more of `dataset.sources`, behind `datasets`", _map_datasets, (*SFT_AND_RM, RL)
    ),
    "eval_size": KeyRule(
        "`max_valid` of every source", lambda done, value: None, (*SFT_AND_RM, RL)
    ),
    "loss_fn": KeyRule(
        "CrossEntropyLoss, PolyLoss: `sft.loss_type`; RMLoss, RMCLSLoss: `rw.loss_type`", _map_loss
    ),
    "poly_eps": KeyRule("`sft.poly_eps`, with PolyLoss", _map_poly_eps, (SFT,)),
    "score_l2_reg": map_to_option("rw.score_l2", RM, off=0.0),
    "max_replies": map_to_option("dataset.args.max_replies", RM),
    "pooling": map_to_option("{first}.pooling", RM, off="last"),
    "metrics": KeyRule(
        "ignored if they are accuracy and kendalltau, which are always measured",
        _map_metrics,
        (RM,),
    ),
    "is_reward_model": KeyRule(
        "ignored, because the quickstart determines it; rejected for sft if it is true",
        _map_reward_model,
        (*SFT_AND_RM, RL),
    ),
    "freeze_layer": KeyRule("`MODEL.freeze_layers`", _freeze),
    "quantization": KeyRule("`MODEL.optimizer.state_dtype=8bit`", _map_quantization),
    "int8_training": KeyRule("`MODEL.quantize=8bit`, with adapters (peft_model)", _map_int8),
    "residual_dropout": map_to_option("{model}.residual_dropout", off=0.0),
    "residual_dropout_lima": KeyRule(
        "`MODEL.residual_dropout_lima`, with residual_dropout above 0", _map_lima
    ),
    "random_offset_probability": map_to_option("dataset.random_window", SFT, off=0.0),
    "label_masking": map_to_option("dataset.label_masking", SFT, off=True),
    "samples_mixing": KeyRule(f"`dataset.sample_mixing={MIXING_PROBABILITY}`", _map_mixing, (SFT,)),
    "sort_by_length": map_to_option("dataset.sort_by_length", off=False),
    "use_system_prefix": KeyRule(
        "`dataset.system_prefix`, the text of system_prefix", _map_system_prefix, (SFT,)
    ),
    "system_prefix": _read_with("use_system_prefix", SFT),
    "use_system_tag": map_to_option("dataset.system_tags", off=False),
    "system_property_dropout": map_to_option("dataset.system_tag_dropout", off=0.5),
    "system_add_length": map_to_option("dataset.system_tag_length", off=False),
    "per_digit_tokens": map_to_option("{first}.tokenizer.per_digit_tokens", off=False),
    "peft_model": KeyRule(
        "`MODEL.lora.*`: LoRA of rank 16, alpha 32, dropout 0.05 on every linear layer; or "
        "`MODEL.prefix.num_tokens`",
        _map_peft,
    ),
    "peft_type": _read_with("peft_model"),
    "peft_config": _read_with("peft_model"),
    "superhot": KeyRule("`MODEL.rope_scaling`, of superhot_config", _map_rope),
    "superhot_config": _read_with("superhot"),
    "deepspeed_config": ignore_with_note("a DeepSpeed file is read with --deepspeed"),
    "log_wandb": KeyRule(
        "`logger.wandb.mode=online` where wandb is installed", _map_wandb, (*SFT_AND_RM, RL)
    ),
    "seq2seqmodel": reject_unless("weft trains decoders; leave it out", False),
    "cache_dir": ignore_with_note("downloads are in the cache of Hugging Face, HF_HOME"),
    "fuse_gelu": ignore_with_note("kernels are chosen for the machine"),
    "use_flash_attention": ignore_with_note("kernels are chosen for the machine"),
    "use_custom_sampler": ignore_with_note(
        "fraction and size draw other rows every epoch, for every run"
    ),
    "eval_accumulation_steps": ignore_with_note("nothing is held back while evaluating"),
    "log_dir": ignore_with_note("a run's files are in fileroot/experiment_name/trial_name"),
    "auto_find_batch_size": ignore_with_note(
        "micro-batches are counted in tokens, max_tokens_per_microbatch"
    ),
    "verbose": ignore_with_note(
        "counts of every dataset are in the run's log; weft quickstart --verbose prints them"
    ),
    **RL_KEYS,
}
# Keys that only Open-Assistant has: with one of them, a stack is meant for its trainer, and the
# trainer's fixed settings are added (`_set_implied_options`).
OWN = (
    frozenset(KEYS)
    - collect_renamed().keys()
    - collect_translators().keys()
    - {"residual_dropout", "residual_dropout_lima"}
)


def map_keys(done: KeyMapping) -> KeyMapping:
    """Map all keys in `done` to options, and return `done`.

    The resulting options, notes and errors are added to `done`.
    """
    if done.mode == RL and any(key in TRLX for key in done.values):
        TRLX["implied"].rule(done, None)
    if OWN & done.values.keys():
        _set_implied_options(done)
    for key, value in done.values.items():
        rule = KEYS.get(key) or TRLX[key]
        if done.mode in rule.modes:
            rule.rule(done.with_key(key), value)
        elif done.mode == RL and key in KEYS:
            done.with_key(key).add_note(
                "Open-Assistant's RL does not read it; set options of the roles as actor.*, "
                "critic.*, rew.*"
            )
        else:
            names = {SFT: "sft", RM: "rw", RL: "ppo"}
            done.with_key(key).add_note(
                f"only weft quickstart {' and '.join(names[mode] for mode in rule.modes)} reads it"
            )
    return done


def _set_implied_options(done: KeyMapping) -> None:
    """Set the options whose values are fixed in the code of Open-Assistant's trainers.

    These are the dialogue format, its special tokens, the validation share and, outside RL, the
    learning-rate schedule.
    """
    at = done.with_key(IMPLIED)
    if done.mode != RL:
        at.set_option("{model}.optimizer.lr_scheduler_type", "linear")
    if not (done.get("datasets") or done.get("datasets_extra")):
        return
    at.set_option("dataset.valid_split", VALID_SPLIT)
    at.set_option(
        "{first}.tokenizer.chat_template", "oasst_v25" if done.get("use_system_tag") else "oasst"
    )
    if done.mode == RL:  # the policy and the reward model were trained with these tokens
        if done.get("rank_config") or done.get("rank_model"):
            at.set_option("rew.tokenizer.chat_template", "oasst")
        return
    if _get_peft_type(done) == PREFIX:
        at.set_option("{first}.tokenizer.chat_template", "zephyr")
        done.with_key("peft_type").add_note(WORDS)
    else:
        at.set_option("{first}.tokenizer.add_tokens", list(TOKENS))
    for part, (padding, end) in UNNAMED_END.items():
        if part in str(done.get("model_name", "")):
            at.set_option("{first}.tokenizer.pad_token", padding)
            at.set_option("{first}.tokenizer.eos_token", end)
