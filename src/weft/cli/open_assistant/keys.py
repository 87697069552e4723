"""Mapping of every key of Open-Assistant's SFT and reward-model configs to weft's options.

RL keys are in `rl`.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any

from weft.cli.aliases import RENAMED, SPECIAL
from weft.cli.open_assistant import datasets
from weft.cli.open_assistant.mapped import IMPLIED, RL, RM, SFT, Key, Mapped, anyway, never, to
from weft.cli.open_assistant.rl import KEYS as RL_KEYS
from weft.cli.open_assistant.rl import TRLX

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
OFF_LOSSES = ("cross_entropy", "ranking")
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
MIXING = 0.4  # probability that samples_mixing joins two short samples
# tokens that mark the turns of a dialogue
TOKENS = ["<|prompter|>", "<|assistant|>", "<|system|>", "<|prefix_begin|>", "<|prefix_end|>"]
# For tokenizers without an end token: part of the model's name -> (padding, end).
UNNAMED_END = {"galactica": ("<pad>", "</s>")}
PROJECTS = {SFT: "supervised-finetuning", RM: "reward-model", RL: "rlhf"}


def _dtype(done: Mapped, value: Any) -> None:
    if value not in DTYPES:
        done.refuse(value, f"must be one of {', '.join(DTYPES)}")
        return
    done.put("{model}.dtype", DTYPES[value])


def _epochs(done: Mapped, value: Any) -> None:
    if not done.number(value):
        return
    if value > 1 and value != int(value):
        done.refuse(
            value,
            f"epochs are whole above 1; write {math.floor(value)} or {math.ceil(value)}, or set "
            f"max_steps",
        )
    else:
        done.put("total_train_epochs", max(1, int(value)))
    if value <= 0:
        done.refuse(value, "must be above 0")


def _saving(done: Mapped, value: Any) -> None:
    """Map save_strategy and save_steps."""
    strategy = done.get("save_strategy", "steps")
    steps = done.get("save_steps")
    if strategy not in ("no", "steps", "epoch"):
        done.under("save_strategy").refuse(strategy, "must be no, steps or epoch")
    elif strategy == "epoch":
        done.under("save_strategy").put("save_freq_epochs", 1)
    elif strategy == "steps" and steps is not None:
        later = max(("save_steps", "save_strategy"), key=lambda key: done.ranks.get(key, -1))
        done.under(later).put("save_freq_steps", steps)


def _datasets(done: Mapped, value: Any) -> None:
    """Map datasets followed by datasets_extra.

    Validation sets are limited to eval_size, and in RL to num_eval_prompts.
    """
    entries = []
    for key in ("datasets", "datasets_extra"):
        if not done.get(key):
            continue
        try:
            entries += datasets.sources(done.get(key))
        except datasets.BadEntry as bad:
            place = key if bad.index < 0 else f"{key}[{bad.index}]"
            done.refused.append((place, f"{place}: {bad}"))
    limits = [
        done.get(key) for key in ("eval_size", *(("num_eval_prompts",) if done.mode == RL else ()))
    ]
    for key, limit in zip(("eval_size", "num_eval_prompts"), limits, strict=False):
        if limit is not None and done.under(key).number(limit) and limit:
            entries = datasets.at_most(entries, int(limit))
    share = done.get("num_train_epochs", 1)
    if done.mode != RL and isinstance(share, float) and 0 < share < 1:
        try:
            entries = datasets.shrunk(entries, share)
        except datasets.BadEntry as bad:
            done.refused.append(
                (
                    f"datasets[{bad.index}]",
                    f"num_train_epochs={share} of datasets[{bad.index}]: {bad}",
                )
            )
    if entries:
        later = max(("datasets", "datasets_extra"), key=lambda key: done.ranks.get(key, -1))
        done.under(later).put("dataset.sources", entries)


def _loss(done: Mapped, value: Any) -> None:
    found = LOSSES.get((done.mode, value))
    if found is None:
        known = [name for mode, name in LOSSES if mode == done.mode]
        if any(name == value for _, name in LOSSES) and done.ranks.get("loss_fn", -1) >= 0:
            done.refuse(
                value,
                f"is not a loss of weft quickstart {done.config.algorithm}; write "
                f"{' or '.join(known)}",
            )
        else:
            done.refuse(value, f"must be one of {', '.join(name for _, name in LOSSES)}")
    elif done.config.algorithm in ("sft", "rw"):
        done.put(found[0], found[1], off=found[1] if found[1] in OFF_LOSSES else None)
    else:
        done.note(f"the loss is that of {done.config.algorithm}")


def _poly_eps(done: Mapped, value: Any) -> None:
    if done.number(value) and done.get("loss_fn") in ("PolyLoss", "Poly"):
        done.put("sft.poly_eps", value)


def _wandb(done: Mapped, value: Any) -> None:
    if not done.truth(value):
        return
    if importlib.util.find_spec("wandb") is None:
        done.note(
            "wandb is not installed, so metrics are only in the run's files; pip install "
            "wandb, or log_wandb=false"
        )
        return
    done.put("logger.wandb.mode", "online")
    done.put("logger.wandb.project", PROJECTS[done.mode])


def _system_prefix(done: Mapped, value: Any) -> None:
    if done.truth(value):
        if done.get("system_prefix"):
            done.put("dataset.system_prefix", done.get("system_prefix"))
        else:
            done.refuse(value, "needs a system_prefix")


def _mixing(done: Mapped, value: Any) -> None:
    done.put("dataset.sample_mixing", MIXING if done.truth(value) else 0.0, off=0.0)


def _reward_model(done: Mapped, value: Any) -> None:
    if done.truth(value) and done.mode == SFT:
        done.refuse(value, "weft quickstart sft trains no reward model; write weft quickstart rw")


def _quantization(done: Mapped, value: Any) -> None:
    done.put(
        "{model}.optimizer.state_dtype", "8bit" if done.truth(value) else "float32", off="float32"
    )


def _int8(done: Mapped, value: Any) -> None:
    if done.truth(value):
        done.put("{model}.quantize", "8bit")


def _freeze(done: Mapped, value: Any) -> None:
    if done.number(value):
        done.put("{first}.freeze_layers", value or None, off=None)


def _lima(done: Mapped, value: Any) -> None:
    if done.truth(value) and done.get("residual_dropout"):
        done.put("{model}.residual_dropout_lima", True)


def _peft(done: Mapped, value: Any) -> None:
    """Map peft_model, peft_type and peft_config."""
    if not done.truth(value):
        return
    settings = done.get("peft_config", {})
    if not isinstance(settings, Mapping):
        done.under("peft_config").refuse(settings, "must be a group of keys")
        return
    kind = _peft_type(done)
    if kind == PREFIX:
        _prefix(done, settings)
        return
    if kind != "lora":
        done.under("peft_type").refuse(
            kind, f"weft trains low-rank adapters and prefixes; write lora or {PREFIX}"
        )
        return
    for key, (name, default) in LORA.items():
        at = done.under(f"peft_config.{key}") if key in settings else done
        at.put(f"{{model}}.lora.{name}", settings.get(key, default))
    _targets(done.under("peft_config"), settings)
    known = {*LORA, "peft_type", "target_modules", "bias", "task_type", "modules_to_save"}
    for key in settings:
        if key not in known:
            done.refused.append(
                (
                    f"peft_config.{key}",
                    f"peft_config.{key}={settings[key]!r}: weft's {kind} has no such setting",
                )
            )


def _peft_type(done: Mapped) -> Any:
    """Return the type of adapter, or None without an adapter."""
    settings = done.get("peft_config", {})
    inner = settings.get("peft_type") if isinstance(settings, Mapping) else None
    if done.truth(done.get("peft_model") or False):
        return inner or done.get("peft_type", "lora")
    return None


def _prefix(done: Mapped, settings: Mapping[str, Any]) -> None:
    """Map a prefix; its default number of tokens is Open-Assistant's."""
    if "num_virtual_tokens" in settings:
        at = done.under("peft_config.num_virtual_tokens")
    else:
        at = done
    at.put("{model}.prefix.num_tokens", settings.get("num_virtual_tokens", PREFIX_TOKENS))
    done.under("peft_type").note(PROJECTION)
    for key in settings.keys() - {
        "num_virtual_tokens",
        "prefix_projection",
        "encoder_hidden_size",
        "peft_type",
        "task_type",
    }:
        done.under(f"peft_config.{key}").refuse(
            settings[key], f"weft's {PREFIX} has no such setting"
        )


def _targets(done: Mapped, settings: Mapping[str, Any]) -> None:
    targets = settings.get("target_modules", "all")
    if targets != "all":
        names = [targets] if isinstance(targets, str) else list(targets)
        done.put("{model}.lora.targets", [LINEAR.get(str(name), str(name)) for name in names])
    if settings.get("bias", "none") != "none":
        done.refused.append(
            (
                "peft_config.bias",
                f"peft_config.bias={settings['bias']}: biases stay as they are; write none",
            )
        )
    if settings.get("task_type", TASKS[0]) not in TASKS:
        done.refused.append(
            (
                "peft_config.task_type",
                f"peft_config.task_type={settings['task_type']}: must be {TASKS[0]}",
            )
        )
    if "modules_to_save" in settings:
        done.note("modules_to_save: what new tokens need is trained and saved with the adapter")


def _rope(done: Mapped, value: Any) -> None:
    """Map superhot and superhot_config."""
    if not done.truth(value):
        return
    settings = done.get("superhot_config")
    if not isinstance(settings, Mapping) or settings.get("type") not in (
        "linear",
        "dynamic",
        "ntk",
    ):
        done.refuse(
            value,
            "needs superhot_config: {type: linear|dynamic, scaling_factor: N} or {type: ntk, "
            "alpha: N}",
        )
        return
    named = {"scaling_factor": "factor"}
    scaling = {named.get(key, key): each for key, each in settings.items()}
    done.under("superhot_config").put("{model}.rope_scaling", scaling)


def _metrics(done: Mapped, value: Any) -> None:
    unknown = []
    for name in value if isinstance(value, list) else [value]:
        if name not in METRICS:
            unknown.append(name)
    if unknown:
        done.refuse(value, f"weft measures {' and '.join(METRICS[:2])} of rankings")
    elif "spearmanr" in (value if isinstance(value, list) else [value]):
        done.note("spearmanr: a ranking is measured by kendalltau")
    else:
        done.note("accuracy and kendalltau are always measured")


def _valid_length(done: Mapped, value: Any) -> None:
    if value != done.get("max_length") and done.number(value, 2):
        done.put("dataset.valid_max_seqlen", value)


def _read_with(other: str, *modes: str) -> Key:
    return Key(f"read with `{other}`", lambda done, value: None, modes or (SFT, RM))


BOTH = (SFT, RM)
OPTIMIZER = {
    "learning_rate": "lr",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps",
    "weight_decay": "weight_decay",
    "max_grad_norm": "max_grad_norm",
}
KEYS: dict[str, Key] = {
    **{name: to("{model}.optimizer." + option) for name, option in OPTIMIZER.items()},
    "warmup_steps": to("warmup_steps"),
    "rng_seed": to("seed", *BOTH, RL),
    "model_name": to("{first}.path"),
    "gradient_checkpointing": to("{model}.gradient_checkpointing"),
    "gradient_accumulation_steps": Key(
        "`dataset.train_bs_n_seqs`, times `per_device_train_batch_size` and data-parallel ranks",
        lambda done, value: done.put("gradient_accumulation_steps", value),
    ),
    "per_device_train_batch_size": Key(
        "`dataset.train_bs_n_seqs`, times `gradient_accumulation_steps` and data-parallel ranks",
        lambda done, value: done.put("per_device_train_batch_size", value),
    ),
    "per_device_eval_batch_size": to("dataset.valid_bs_n_seqs"),
    "dtype": Key(
        "`MODEL.dtype`: fp16 is float16, bf16 bfloat16, fp32 float32", _dtype, (*BOTH, RL)
    ),
    "max_length": to("dataset.max_seqlen"),
    "val_max_length": Key("`dataset.valid_max_seqlen`, unless it is `max_length`", _valid_length),
    "num_train_epochs": Key(
        "`total_train_epochs`; below 1: a random share of every dataset", _epochs
    ),
    "logging_steps": to("log_freq_steps"),
    "eval_steps": to("eval_freq_steps"),
    "save_steps": Key("`save_freq_steps`, with save_strategy steps", _saving),
    "save_strategy": Key(
        "steps: `save_freq_steps`; epoch: `save_freq_epochs=1`; no: neither", _saving
    ),
    "save_total_limit": to("save_total_limit"),
    "output_dir": to("fileroot", *BOTH, RL),
    "datasets": Key("`dataset.sources`, by name", _datasets, (*BOTH, RL)),
    "datasets_extra": Key("more of `dataset.sources`, behind `datasets`", _datasets, (*BOTH, RL)),
    "eval_size": Key("`max_valid` of every source", lambda done, value: None, (*BOTH, RL)),
    "loss_fn": Key(
        "CrossEntropyLoss, PolyLoss: `sft.loss_type`; RMLoss, RMCLSLoss: `rw.loss_type`", _loss
    ),
    "poly_eps": Key("`sft.poly_eps`, with PolyLoss", _poly_eps, (SFT,)),
    "score_l2_reg": to("rw.score_l2", RM, off=0.0),
    "max_replies": to("dataset.args.max_replies", RM),
    "pooling": to("{first}.pooling", RM, off="last"),
    "metrics": Key(
        "nothing where they are accuracy and kendalltau, which are always measured", _metrics, (RM,)
    ),
    "is_reward_model": Key(
        "nothing: the quickstart says it; refused for sft where it is true",
        _reward_model,
        (*BOTH, RL),
    ),
    "freeze_layer": Key("`MODEL.freeze_layers`", _freeze),
    "quantization": Key("`MODEL.optimizer.state_dtype=8bit`", _quantization),
    "int8_training": Key("`MODEL.quantize=8bit`, with adapters (peft_model)", _int8),
    "residual_dropout": to("{model}.residual_dropout", off=0.0),
    "residual_dropout_lima": Key(
        "`MODEL.residual_dropout_lima`, with residual_dropout above 0", _lima
    ),
    "random_offset_probability": to("dataset.random_window", SFT, off=0.0),
    "label_masking": to("dataset.label_masking", SFT, off=True),
    "samples_mixing": Key(f"`dataset.sample_mixing={MIXING}`", _mixing, (SFT,)),
    "sort_by_length": to("dataset.sort_by_length", off=False),
    "use_system_prefix": Key(
        "`dataset.system_prefix`, the text of system_prefix", _system_prefix, (SFT,)
    ),
    "system_prefix": _read_with("use_system_prefix", SFT),
    "use_system_tag": to("dataset.system_tags", off=False),
    "system_property_dropout": to("dataset.system_tag_dropout", off=0.5),
    "system_add_length": to("dataset.system_tag_length", off=False),
    "per_digit_tokens": to("{first}.tokenizer.per_digit_tokens", off=False),
    "peft_model": Key(
        "`MODEL.lora.*`: LoRA of rank 16, alpha 32, dropout 0.05 on every linear layer; or "
        "`MODEL.prefix.num_tokens`",
        _peft,
    ),
    "peft_type": _read_with("peft_model"),
    "peft_config": _read_with("peft_model"),
    "superhot": Key("`MODEL.rope_scaling`, of superhot_config", _rope),
    "superhot_config": _read_with("superhot"),
    "deepspeed_config": anyway("a DeepSpeed file is read with --deepspeed"),
    "log_wandb": Key("`logger.wandb.mode=online` where wandb is installed", _wandb, (*BOTH, RL)),
    "seq2seqmodel": never("weft trains decoders; leave it out", False),
    "cache_dir": anyway("downloads are in the cache of Hugging Face, HF_HOME"),
    "fuse_gelu": anyway("kernels are chosen for the machine"),
    "use_flash_attention": anyway("kernels are chosen for the machine"),
    "use_custom_sampler": anyway("fraction and size draw other rows every epoch, for every run"),
    "eval_accumulation_steps": anyway("nothing is held back while evaluating"),
    "log_dir": anyway("a run's files are in fileroot/experiment_name/trial_name"),
    "auto_find_batch_size": anyway(
        "micro-batches are counted in tokens, max_tokens_per_microbatch"
    ),
    "verbose": anyway(
        "counts of every dataset are in the run's log; weft quickstart --verbose prints them"
    ),
    **RL_KEYS,
}
# Keys that only Open-Assistant has: with one of them, a stack is meant for its trainer, and the
# trainer's fixed settings are added (`_implied`).
OWN = (
    frozenset(KEYS)
    - RENAMED.keys()
    - SPECIAL.keys()
    - {"residual_dropout", "residual_dropout_lima"}
)


def map_keys(done: Mapped) -> Mapped:
    """Map all keys of `done` to options, notes and rejections, added to `done`; return `done`."""
    if done.mode == RL and any(key in TRLX for key in done.values):
        TRLX["implied"].rule(done, None)
    if OWN & done.values.keys():
        _implied(done)
    for key, value in done.values.items():
        rule = KEYS.get(key) or TRLX[key]
        if done.mode in rule.modes:
            rule.rule(done.under(key), value)
        elif done.mode == RL and key in KEYS:
            done.under(key).note(
                "Open-Assistant's RL does not read it; set options of the roles as actor.*, "
                "critic.*, rew.*"
            )
        else:
            names = {SFT: "sft", RM: "rw", RL: "ppo"}
            done.under(key).note(
                f"only weft quickstart {' and '.join(names[mode] for mode in rule.modes)} reads it"
            )
    return done


def _implied(done: Mapped) -> None:
    """Set what Open-Assistant's trainers always do: dialogue format and learning-rate schedule."""
    at = done.under(IMPLIED)
    if done.mode != RL:
        at.put("{model}.optimizer.lr_scheduler_type", "linear")
    if not (done.get("datasets") or done.get("datasets_extra")):
        return
    at.put("dataset.valid_split", datasets.VALID_SPLIT)
    at.put(
        "{first}.tokenizer.chat_template", "oasst_v25" if done.get("use_system_tag") else "oasst"
    )
    if done.mode == RL:  # the policy and the reward model were trained with these tokens
        if done.get("rank_config") or done.get("rank_model"):
            at.put("rew.tokenizer.chat_template", "oasst")
        return
    if _peft_type(done) == PREFIX:
        at.put("{first}.tokenizer.chat_template", "zephyr")
        done.under("peft_type").note(WORDS)
    else:
        at.put("{first}.tokenizer.add_tokens", list(TOKENS))
    for part, (padding, end) in UNNAMED_END.items():
        if part in str(done.get("model_name", "")):
            at.put("{first}.tokenizer.pad_token", padding)
            at.put("{first}.tokenizer.eos_token", end)


def table() -> str:
    """Return a Markdown table of the keys and their mapping.

    docs/open-assistant.md contains it, and a test compares them.
    """
    names = {SFT: "sft", RM: "rw", RL: "ppo"}
    lines = ["| key | read by | in weft |", "|---|---|---|"]
    for name, key in {**KEYS, **TRLX}.items():
        if name != "implied":
            says = key.says.replace("|", "\\|")
            lines.append(
                f"| `{name.removeprefix('trlx.')}` | "
                f"{', '.join(names[mode] for mode in key.modes)} | {says} |"
            )
    return "\n".join(lines) + "\n"
