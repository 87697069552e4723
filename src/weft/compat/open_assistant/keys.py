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
PREFIX_FORMAT_NOTE = (
    "a prefix leaves the model as it is, without added tokens, so dialogues have zephyr's form, "
    "in words; for a model that has "
    "Open-Assistant's tokens write model.tokenizer.chat_template=oasst"
)
PREFIX_PROJECTION_NOTE = "the prefix's keys and values are trained themselves, without a projection"
# key of peft_config -> (option of weft, Open-Assistant's default)
LORA_OPTIONS = {"r": ("r", 16), "lora_alpha": ("alpha", 32), "lora_dropout": ("dropout", 0.05)}
TASKS = ("CAUSAL_LM", "SEQ_CLS")
# layer names in target_modules -> names of weft
LORA_TARGETS = {
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
TURN_TOKENS = ["<|prompter|>", "<|assistant|>", "<|system|>", "<|prefix_begin|>", "<|prefix_end|>"]
# For tokenizers without an end token: part of the model's name -> (padding, end).
UNNAMED_END = {"galactica": ("<pad>", "</s>")}
PROJECTS = {SFT: "supervised-finetuning", RM: "reward-model", RL: "rlhf"}


def _map_dtype(mapping: KeyMapping, value: Any) -> None:
    if value not in DTYPES:
        mapping.reject(value, f"must be one of {', '.join(DTYPES)}")
        return
    mapping.set_option("{model}.dtype", DTYPES[value])


def _map_epochs(mapping: KeyMapping, value: Any) -> None:
    if not mapping.is_valid_number(value):
        return
    if value > 1 and value != int(value):
        mapping.reject(
            value,
            f"epochs are whole above 1; write {math.floor(value)} or {math.ceil(value)}, or set "
            f"max_steps",
        )
    else:
        mapping.set_option("total_train_epochs", max(1, int(value)))
    if value <= 0:
        mapping.reject(value, "must be above 0")


def _map_saving(mapping: KeyMapping, value: Any) -> None:
    """Map save_strategy and save_steps to the interval between checkpoints."""
    strategy = mapping.get("save_strategy", "steps")
    steps = mapping.get("save_steps")
    if strategy not in ("no", "steps", "epoch"):
        mapping.with_key("save_strategy").reject(strategy, "must be no, steps or epoch")
    elif strategy == "epoch":
        mapping.with_key("save_strategy").set_option("save_freq_epochs", 1)
    elif strategy == "steps" and steps is not None:
        later = max(("save_steps", "save_strategy"), key=lambda key: mapping.ranks.get(key, -1))
        mapping.with_key(later).set_option("save_freq_steps", steps)


def _map_datasets(mapping: KeyMapping, value: Any) -> None:
    """Map the keys `datasets` and `datasets_extra`, in this order, to `dataset.sources`.

    Validation sets are limited to `eval_size` rows and, in RL, also to `num_eval_prompts` rows. If
    `num_train_epochs` is below 1, an epoch uses only this fraction of the rows (except in RL).
    """
    entries = []
    for key in ("datasets", "datasets_extra"):
        if not mapping.get(key):
            continue
        try:
            entries += convert_entries(mapping.get(key))
        except InvalidDatasetEntry as bad:
            place = key if bad.index < 0 else f"{key}[{bad.index}]"
            mapping.rejections.append((place, f"{place}: {bad}"))
    limits = [
        mapping.get(key)
        for key in ("eval_size", *(("num_eval_prompts",) if mapping.mode == RL else ()))
    ]
    for key, limit in zip(("eval_size", "num_eval_prompts"), limits, strict=False):
        if limit is not None and mapping.with_key(key).is_valid_number(limit) and limit:
            entries = limit_validation(entries, int(limit))
    share = mapping.get("num_train_epochs", 1)
    if mapping.mode != RL and isinstance(share, float) and 0 < share < 1:
        try:
            entries = scale_entries(entries, share)
        except InvalidDatasetEntry as bad:
            mapping.rejections.append(
                (
                    f"datasets[{bad.index}]",
                    f"num_train_epochs={share} of datasets[{bad.index}]: {bad}",
                )
            )
    if entries:
        later = max(("datasets", "datasets_extra"), key=lambda key: mapping.ranks.get(key, -1))
        mapping.with_key(later).set_option("dataset.sources", entries)


def _map_loss(mapping: KeyMapping, value: Any) -> None:
    loss = LOSSES.get((mapping.mode, value))
    if loss is None:
        known = [name for mode, name in LOSSES if mode == mapping.mode]
        if any(name == value for _, name in LOSSES) and mapping.ranks.get("loss_fn", -1) >= 0:
            mapping.reject(
                value,
                f"is not a loss of weft quickstart {mapping.config.algorithm}; write "
                f"{' or '.join(known)}",
            )
        else:
            mapping.reject(value, f"must be one of {', '.join(name for _, name in LOSSES)}")
    elif mapping.config.algorithm in ("sft", "rw"):
        mapping.set_option(loss[0], loss[1], off=loss[1] if loss[1] in DEFAULT_LOSSES else None)
    else:
        mapping.add_note(f"the loss is that of {mapping.config.algorithm}")


def _map_poly_eps(mapping: KeyMapping, value: Any) -> None:
    if mapping.is_valid_number(value) and mapping.get("loss_fn") in ("PolyLoss", "Poly"):
        mapping.set_option("sft.poly_eps", value)


def _map_wandb(mapping: KeyMapping, value: Any) -> None:
    if not mapping.check_boolean(value):
        return
    if importlib.util.find_spec("wandb") is None:
        mapping.add_note(
            "wandb is not installed, so metrics are only in the run's files; pip install "
            "wandb, or log_wandb=false"
        )
        return
    mapping.set_option("logger.wandb.mode", "online")
    mapping.set_option("logger.wandb.project", PROJECTS[mapping.mode])


def _map_system_prefix(mapping: KeyMapping, value: Any) -> None:
    if mapping.check_boolean(value):
        if mapping.get("system_prefix"):
            mapping.set_option("dataset.system_prefix", mapping.get("system_prefix"))
        else:
            mapping.reject(value, "needs a system_prefix")


def _map_mixing(mapping: KeyMapping, value: Any) -> None:
    mapping.set_option(
        "dataset.sample_mixing",
        MIXING_PROBABILITY if mapping.check_boolean(value) else 0.0,
        off=0.0,
    )


def _map_reward_model(mapping: KeyMapping, value: Any) -> None:
    if mapping.check_boolean(value) and mapping.mode == SFT:
        mapping.reject(
            value, "weft quickstart sft trains no reward model; write weft quickstart rw"
        )


def _map_quantization(mapping: KeyMapping, value: Any) -> None:
    mapping.set_option(
        "{model}.optimizer.state_dtype",
        "8bit" if mapping.check_boolean(value) else "float32",
        off="float32",
    )


def _map_int8(mapping: KeyMapping, value: Any) -> None:
    if mapping.check_boolean(value):
        mapping.set_option("{model}.quantize", "8bit")


def _map_freeze_layer(mapping: KeyMapping, value: Any) -> None:
    if mapping.is_valid_number(value):
        mapping.set_option("{first}.freeze_layers", value or None, off=None)


def _map_lima(mapping: KeyMapping, value: Any) -> None:
    if mapping.check_boolean(value) and mapping.get("residual_dropout"):
        mapping.set_option("{model}.residual_dropout_lima", True)


def _map_peft(mapping: KeyMapping, value: Any) -> None:
    """Map peft_model, peft_type and peft_config to the options of LoRA or prefix tuning."""
    if not mapping.check_boolean(value):
        return
    settings = mapping.get("peft_config", {})
    if not isinstance(settings, Mapping):
        mapping.with_key("peft_config").reject(settings, "must be a group of keys")
        return
    kind = _get_peft_type(mapping)
    if kind == PREFIX:
        _map_prefix(mapping, settings)
        return
    if kind != "lora":
        mapping.with_key("peft_type").reject(
            kind, f"weft trains low-rank adapters and prefixes; write lora or {PREFIX}"
        )
        return
    for key, (name, default) in LORA_OPTIONS.items():
        keyed = mapping.with_key(f"peft_config.{key}") if key in settings else mapping
        keyed.set_option(f"{{model}}.lora.{name}", settings.get(key, default))
    _map_targets(mapping.with_key("peft_config"), settings)
    known = {*LORA_OPTIONS, "peft_type", "target_modules", "bias", "task_type", "modules_to_save"}
    for key in settings:
        if key not in known:
            mapping.rejections.append(
                (
                    f"peft_config.{key}",
                    f"peft_config.{key}={settings[key]!r}: weft's {kind} has no such setting",
                )
            )


def _get_peft_type(mapping: KeyMapping) -> Any:
    """Return the adapter type, by default "lora", or None if peft_model is disabled."""
    settings = mapping.get("peft_config", {})
    inner = settings.get("peft_type") if isinstance(settings, Mapping) else None
    if mapping.check_boolean(mapping.get("peft_model") or False):
        return inner or mapping.get("peft_type", "lora")
    return None


def _map_prefix(mapping: KeyMapping, settings: Mapping[str, Any]) -> None:
    """Map the settings of prefix tuning.

    If the number of prefix tokens is not set, Open-Assistant's default is used.
    """
    if "num_virtual_tokens" in settings:
        keyed = mapping.with_key("peft_config.num_virtual_tokens")
    else:
        keyed = mapping
    keyed.set_option("{model}.prefix.num_tokens", settings.get("num_virtual_tokens", PREFIX_TOKENS))
    mapping.with_key("peft_type").add_note(PREFIX_PROJECTION_NOTE)
    for key in settings.keys() - {
        "num_virtual_tokens",
        "prefix_projection",
        "encoder_hidden_size",
        "peft_type",
        "task_type",
    }:
        mapping.with_key(f"peft_config.{key}").reject(
            settings[key], f"weft's {PREFIX} has no such setting"
        )


def _map_targets(mapping: KeyMapping, settings: Mapping[str, Any]) -> None:
    targets = settings.get("target_modules", "all")
    if targets != "all":
        names = [targets] if isinstance(targets, str) else list(targets)
        mapping.set_option(
            "{model}.lora.targets", [LORA_TARGETS.get(str(name), str(name)) for name in names]
        )
    if settings.get("bias", "none") != "none":
        mapping.rejections.append(
            (
                "peft_config.bias",
                f"peft_config.bias={settings['bias']}: biases stay as they are; write none",
            )
        )
    if settings.get("task_type", TASKS[0]) not in TASKS:
        mapping.rejections.append(
            (
                "peft_config.task_type",
                f"peft_config.task_type={settings['task_type']}: must be {TASKS[0]}",
            )
        )
    if "modules_to_save" in settings:
        mapping.add_note(
            "modules_to_save: what new tokens need is trained and saved with the adapter"
        )


def _map_rope(mapping: KeyMapping, value: Any) -> None:
    """Map superhot and superhot_config to `rope_scaling`."""
    if not mapping.check_boolean(value):
        return
    settings = mapping.get("superhot_config")
    if not isinstance(settings, Mapping) or settings.get("type") not in (
        "linear",
        "dynamic",
        "ntk",
    ):
        mapping.reject(
            value,
            "needs superhot_config: {type: linear|dynamic, scaling_factor: N} or {type: ntk, "
            "alpha: N}",
        )
        return
    named = {"scaling_factor": "factor"}
    scaling = {named.get(key, key): each for key, each in settings.items()}
    mapping.with_key("superhot_config").set_option("{model}.rope_scaling", scaling)


def _map_metrics(mapping: KeyMapping, value: Any) -> None:
    unknown = []
    for name in value if isinstance(value, list) else [value]:
        if name not in METRICS:
            unknown.append(name)
    if unknown:
        mapping.reject(value, f"weft measures {' and '.join(METRICS[:2])} of rankings")
    elif "spearmanr" in (value if isinstance(value, list) else [value]):
        mapping.add_note("spearmanr: a ranking is measured by kendalltau")
    else:
        mapping.add_note("accuracy and kendalltau are always measured")


def _map_valid_length(mapping: KeyMapping, value: Any) -> None:
    if value != mapping.get("max_length") and mapping.is_valid_number(value, 2):
        mapping.set_option("dataset.valid_max_seqlen", value)


def _read_with(other: str, *modes: str) -> KeyRule:
    return KeyRule(f"read with `{other}`", lambda mapping, value: None, modes or (SFT, RM))


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
        lambda mapping, value: mapping.set_option("gradient_accumulation_steps", value),
    ),
    "per_device_train_batch_size": KeyRule(
        "`dataset.train_bs_n_seqs`, times `gradient_accumulation_steps` and data-parallel ranks",
        lambda mapping, value: mapping.set_option("per_device_train_batch_size", value),
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
        "`max_valid` of every source", lambda mapping, value: None, (*SFT_AND_RM, RL)
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
    "freeze_layer": KeyRule("`MODEL.freeze_layers`", _map_freeze_layer),
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
# Keys that only Open-Assistant has. If one of them is set, the sections are meant for its trainer,
# whose fixed settings are added (`_set_implied_options`).
OPEN_ASSISTANT_KEYS = (
    frozenset(KEYS)
    - collect_renamed().keys()
    - collect_translators().keys()
    - {"residual_dropout", "residual_dropout_lima"}
)


def map_keys(mapping: KeyMapping) -> KeyMapping:
    """Map all keys in `mapping` to options, and return `mapping`.

    The resulting options, notes and errors are added to `mapping`.
    """
    if mapping.mode == RL and any(key in TRLX for key in mapping.values):
        TRLX["implied"].rule(mapping, None)
    if OPEN_ASSISTANT_KEYS & mapping.values.keys():
        _set_implied_options(mapping)
    for key, value in mapping.values.items():
        rule = KEYS.get(key) or TRLX[key]
        if mapping.mode in rule.modes:
            rule.rule(mapping.with_key(key), value)
        elif mapping.mode == RL and key in KEYS:
            mapping.with_key(key).add_note(
                "Open-Assistant's RL does not read it; set options of the roles as actor.*, "
                "critic.*, rew.*"
            )
        else:
            names = {SFT: "sft", RM: "rw", RL: "ppo"}
            mapping.with_key(key).add_note(
                f"only weft quickstart {' and '.join(names[mode] for mode in rule.modes)} reads it"
            )
    return mapping


def _set_implied_options(mapping: KeyMapping) -> None:
    """Set the options whose values are fixed in the code of Open-Assistant's trainers.

    These are the dialogue format, its special tokens, the validation share and, outside RL, the
    learning-rate schedule.
    """
    keyed = mapping.with_key(IMPLIED)
    if mapping.mode != RL:
        keyed.set_option("{model}.optimizer.lr_scheduler_type", "linear")
    if not (mapping.get("datasets") or mapping.get("datasets_extra")):
        return
    keyed.set_option("dataset.valid_split", VALID_SPLIT)
    keyed.set_option(
        "{first}.tokenizer.chat_template", "oasst_v25" if mapping.get("use_system_tag") else "oasst"
    )
    if mapping.mode == RL:  # the policy and the reward model were trained with these tokens
        if mapping.get("rank_config") or mapping.get("rank_model"):
            keyed.set_option("rew.tokenizer.chat_template", "oasst")
        return
    if _get_peft_type(mapping) == PREFIX:
        keyed.set_option("{first}.tokenizer.chat_template", "zephyr")
        mapping.with_key("peft_type").add_note(PREFIX_FORMAT_NOTE)
    else:
        keyed.set_option("{first}.tokenizer.add_tokens", list(TURN_TOKENS))
    for part, (padding, end) in UNNAMED_END.items():
        if part in str(mapping.get("model_name", "")):
            keyed.set_option("{first}.tokenizer.pad_token", padding)
            keyed.set_option("{first}.tokenizer.eos_token", end)
