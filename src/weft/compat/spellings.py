"""Option names of Hugging Face's Trainer, TRL, Open-Assistant and others, beyond those of `weft.cli.aliases`.

Each table is divided by the spelling in `weft.cli.aliases` after which docs/options.md lists its
entries.
"""

from __future__ import annotations

from typing import Any

from weft.cli.aliases import OverrideTranslation, ValueTranslator
from weft.cli.overrides import Override
from weft.errors import ConfigError

# Spelling -> option; for the marks in braces see `weft.cli.aliases.RENAMED`.
RENAMED: dict[str, dict[str, str]] = {
    "model_name_or_path": {
        "model_name": "{first}.path",
        "tokenizer_name": "{first}.tokenizer.path",
    },
    "trust_remote_code": {"torch_dtype": "{model}.dtype"},
    "gradient_checkpointing": {"activation_checkpointing": "{model}.gradient_checkpointing"},
    "sequence_parallel": {
        "use_sequence_parallel": "{model}.sequence_parallel",
        "lora_r": "{model}.lora.r",
        "lora_alpha": "{model}.lora.alpha",
        "lora_dropout": "{model}.lora.dropout",
        "lora_target_modules": "{model}.lora.targets",
        "num_virtual_tokens": "{model}.prefix.num_tokens",
    },
    "weight_decay": {
        "adam_beta1": "{model}.optimizer.beta1",
        "adam_beta2": "{model}.optimizer.beta2",
        "adam_epsilon": "{model}.optimizer.eps",
    },
    "lr_scheduler_type": {"warmup_ratio": "{model}.optimizer.warmup_steps_proportion"},
    "num_train_epochs": {
        "per_device_eval_batch_size": "dataset.valid_bs_n_seqs",
        "train_file": "dataset.train_path",
        "validation_file": "dataset.valid_path",
    },
    "max_length": {
        "max_seq_length": "dataset.max_seqlen",
        "max_prompt_length": "dataset.max_prompt_len",
    },
    "remove_truncated_samples": {"max_completion_length": "{gen}.max_new_tokens"},
    "min_p": {
        "output_dir": "fileroot",
        "run_name": "logger.wandb.name",
        "logging_steps": "log_freq_steps",
        "save_steps": "save_freq_steps",
        "eval_steps": "eval_freq_steps",
    },
    "eval_freq": {"rng_seed": "seed", "benchmark_steps": "max_steps"},
}
MODEL_SPELLINGS = {"parallel.use_sequence_parallel": "sequence_parallel"}  # names after `MODEL.`
VALUE_DEPENDENT_SPELLINGS = {  # spellings whose option depends on their value -> the most common option
    "bf16": "{model}.dtype",
    "use_cpu": "device",
    "use_peft": "{model}.lora.r",
    "save_strategy": "save_freq_epochs",
    "eval_strategy": "eval_freq_epochs",
    "report_to": "logger.wandb.mode",
}
DEFAULT_STEP_INTERVAL = 500  # Hugging Face's default interval, in steps, of the strategy "steps"
LORA_RANK = 16  # default LoRA rank of TRL's use_peft


def _translate_half_precision(
    done: OverrideTranslation, override: Override, given: dict[str, Any]
) -> None:
    """Set the dtype of all trained roles to bfloat16 for bf16=true, or to float16 for fp16=true."""
    if _read_bool(override, given):
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[override.name]
        done.add_assignments([f"{role}.dtype" for role in done.trained_roles], override, dtype)


def _translate_use_cpu(
    done: OverrideTranslation, override: Override, given: dict[str, Any]
) -> None:
    """Set `device=cpu` for use_cpu=true."""
    if _read_bool(override, given):
        done.add_assignments(["device"], override, "cpu")


def _translate_use_peft(
    done: OverrideTranslation, override: Override, given: dict[str, Any]
) -> None:
    """Set the LoRA rank of all trained roles to 16, TRL's default, if `use_peft` is true.

    Does nothing if the user also sets `lora_r` (another rank) or `num_virtual_tokens` (prefix
    tuning).
    """
    if _read_bool(override, given) and not {"lora_r", "num_virtual_tokens"} & given.keys():
        done.add_assignments([f"{role}.lora.r" for role in done.trained_roles], override, LORA_RANK)


def _translate_strategy(
    done: OverrideTranslation, override: Override, given: dict[str, Any]
) -> None:
    """Translate Hugging Face's save_strategy or eval_strategy to weft's options.

    For save_strategy, the value "steps" sets `save_freq_steps` to 500, Hugging Face's default,
    unless the user sets the interval. The value "epoch" sets `save_freq_epochs` to 1, and "no" sets
    nothing. For eval_strategy, `eval_freq_steps` and `eval_freq_epochs` are set in the same way.
    """
    kind = override.name.split("_")[0].replace("evaluation", "eval")
    value = given[override.name]
    if value not in ("no", "steps", "epoch"):
        raise ConfigError(f"{override.name}={value!r}: must be no, steps or epoch")
    if value == "epoch":
        done.add_assignments([f"{kind}_freq_epochs"], override, 1)
    elif value == "steps" and not {f"{kind}_steps", f"{kind}_freq_steps"} & given.keys():
        done.add_assignments([f"{kind}_freq_steps"], override, DEFAULT_STEP_INTERVAL)


def _translate_report_to(
    done: OverrideTranslation, override: Override, given: dict[str, Any]
) -> None:
    """Enable each logger that the value names, by setting the logger's option.

    The options are `logger.tensorboard=true`, `logger.wandb.mode=online` and
    `logger.trackio.project`. The value "none" enables no logger.
    """
    value = given[override.name]
    for name in value if isinstance(value, list) else [value]:
        settings = {
            "tensorboard": ("logger.tensorboard", True),
            "wandb": ("logger.wandb.mode", "online"),
            "trackio": ("logger.trackio.project", given.get("experiment_name")),
        }
        if name in settings:
            done.add_assignments([settings[name][0]], override, settings[name][1])
        elif name != "none":
            raise ConfigError(f"report_to={name!r}: must be none, tensorboard, wandb or trackio")


def _read_bool(override: Override, given: dict[str, Any]) -> bool:
    value = given[override.name]
    if not isinstance(value, bool):
        raise ConfigError(f"{override.name}={value!r}: must be true or false")
    return value


VALUE_TRANSLATORS: dict[str, dict[str, ValueTranslator]] = {
    "warmup_steps": {
        "bf16": _translate_half_precision,
        "fp16": _translate_half_precision,
        "use_cpu": _translate_use_cpu,
        "use_peft": _translate_use_peft,
        "save_strategy": _translate_strategy,
        "eval_strategy": _translate_strategy,
        "evaluation_strategy": _translate_strategy,
        "report_to": _translate_report_to,
    },
}
