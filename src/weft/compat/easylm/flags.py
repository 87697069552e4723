"""Tables of EasyLM's flags: the default of each flag, and its treatment in weft.

The value of a flag is either copied to options of weft, or used by
`weft.compat.easylm.translation` to compute options. Flags without effect in weft lead to a note if
they are set, and others are refused with a reason. The tables have the flags of EasyLM's last
version, and flags of its guide that this version lacks. The page docs/coming-from/easylm.md has one
row for each flag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.compat.easylm.flag_rules import (
    COUNT,
    DECAY,
    LENGTH,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    FlagRule,
    NumberRange,
    compute,
    copy,
    ignore,
    refuse,
)

NO_STREAM_STATE = "rerun the same command: a run resumes exactly, data included"
CONNECTED = "sets WEFT_JAX_COORDINATOR and the like, as weft launch tpu start does"
NO_PADDING = "rows are packed, not padded"
ENDS_WITH_RUN = "a schedule ends with the run"

RUN: Mapping[str, FlagRule] = {
    "seed": copy(42, "seed", limits=NOT_NEGATIVE),
    "mesh_dim": compute(
        "1,-1,1",
        "{roles}.layout",
        note="dp,fsdp,mp; the product is the number of devices; backend=torch: as a layout",
    ),
    "dtype": compute("fp32", "{roles}.dtype", note="fp32, bf16 or fp16; trained weights: float32"),
    "load_dataset_state": refuse("", NO_STREAM_STATE),
    "log_all_worker": ignore(False, "the logs of all workers are in the run's folder"),
    "jax_distributed.initialize_jax_distributed": compute(False, note=CONNECTED),
    "jax_distributed.coordinator_address": compute("", note=f"absent: auto; {CONNECTED}"),
    "jax_distributed.num_processes": compute("", note=CONNECTED, kind=int, limits=COUNT),
    "jax_distributed.process_id": compute("", note=CONNECTED, kind=int, limits=NOT_NEGATIVE),
    "jax_distributed.local_device_ids": refuse("", "a process has all devices of its host"),
    "checkpointer.float_dtype": ignore("bf16", "checkpoints have the dtype of the role"),
    "checkpointer.save_optimizer_state": ignore(
        False, "recovery points hold the optimizer's state, checkpoints never do"
    ),
    "save_model_freq": compute(
        0,
        "save_freq_steps",
        "save_total_limit",
        "save_milestone_freq_epochs",
        note="only the newest is kept, and one of each epoch, with PPO always; the last step is always saved",
        limits=NOT_NEGATIVE,
    ),
    "save_milestone_freq": compute(
        0, "save_milestone_freq_steps", note="0: none", limits=NOT_NEGATIVE
    ),
    "backend": compute("", "{roles}.backend", note="weft's own: jax (if installed) or torch"),
    "easylm_compat": compute(False, note="weft's own: reproduce EasyLM's PPO, see below"),
}

LOGGER: Mapping[str, FlagRule] = {
    "logger.online": compute(False, "logger.wandb.mode", note="false with other flags: offline"),
    "logger.entity": compute("", "logger.wandb.entity"),
    "logger.project": compute("", "logger.wandb.project"),
    "logger.prefix": compute(
        "", "logger.wandb.project", "trial_name", note="of the project, or of the id"
    ),
    "logger.prefix_to_id": compute(False, "trial_name", note="the prefix begins the run's name"),
    "logger.experiment_id": compute("", "trial_name"),
    "logger.output_dir": compute("", "fileroot"),
    "logger.wandb_dir": compute("", "logger.wandb.dir"),
    "logger.random_delay": refuse(0.0, "runs start without delay", float),
    "logger.anonymous": refuse("", "write logger.wandb.entity"),
    "logger.notes": refuse("", "write notes on the page of the run at W&B"),
}

TOKENIZER: Mapping[str, FlagRule] = {
    "tokenizer": compute("", "{roles}.tokenizer.path"),
    "tokenizer.vocab_file": compute("", "{roles}.tokenizer.path", note="of the guide"),
    "tokenizer.add_bos_token": compute(
        "",
        "{roles}.tokenizer.add_bos_token",
        note="of the guide; absent: every sequence begins with it once, prompts of PPO too",
        kind=bool,
    ),
    "tokenizer.add_eos_token": ignore(False, "every answer ends with it"),
    "tokenizer_pad_token_id": ignore(128255, NO_PADDING),
}

OPTIMIZER: Mapping[str, FlagRule] = {
    "optimizer.type": compute(
        "adamw", "{trained}.optimizer.type", note="adamw, palm (not of llama_train_ppo) or lion"
    ),
    "optimizer.adamw_optimizer.b1": copy(0.9, "{trained}.optimizer.beta1", limits=DECAY),
    "optimizer.adamw_optimizer.b2": copy(0.95, "{trained}.optimizer.beta2", limits=DECAY),
    "optimizer.adamw_optimizer.clip_gradient": copy(
        1.0, "{trained}.optimizer.max_grad_norm", limits=NOT_NEGATIVE
    ),
    "optimizer.adamw_optimizer.weight_decay": copy(
        1e-4,
        "{trained}.optimizer.weight_decay",
        note="not of embeddings and norms",
        limits=NOT_NEGATIVE,
    ),
    "optimizer.adamw_optimizer.bf16_momentum": compute(
        False, "{trained}.optimizer.state_dtype", note="of both moments; backend=torch"
    ),
    "optimizer.adamw_optimizer.multiply_by_parameter_scale": refuse(
        False, "weft has no Adafactor; leave it out"
    ),
    "optimizer.palm_optimizer.lr": compute(
        0.01,
        "{trained}.optimizer.lr",
        note="100 lr / sqrt(lr_warmup_steps), the rate of warm-up",
        limits=NOT_NEGATIVE,
    ),
    "optimizer.palm_optimizer.lr_warmup_steps": compute(
        10000,
        "{trained}.optimizer.warmup_steps",
        note="of a constant rate, before 1 / sqrt(step)",
        limits=NOT_NEGATIVE,
    ),
    "optimizer.palm_optimizer.b1": compute(0.9, "{trained}.optimizer.beta1", limits=DECAY),
    "optimizer.palm_optimizer.b2": compute(0.99, "{trained}.optimizer.beta2", limits=DECAY),
    "optimizer.palm_optimizer.clip_gradient": compute(
        1.0, "{trained}.optimizer.max_grad_norm", limits=NOT_NEGATIVE
    ),
    "optimizer.palm_optimizer.weight_decay": compute(
        1e-4,
        "{trained}.optimizer.weight_decay",
        note="times 10,000 and the squared rate",
        limits=NOT_NEGATIVE,
    ),
    "optimizer.palm_optimizer.bf16_momentum": refuse(False, "moments of palm are float32"),
}

ADAMW_SCHEDULE: Mapping[str, FlagRule] = {
    "optimizer.accumulate_gradient_steps": compute(
        1, "dataset.train_bs_n_seqs", note="times the batch size; exact for tokens", limits=COUNT
    ),
    "optimizer.adamw_optimizer.init_lr": refuse(0.0, "warm-up begins at 0"),
    "optimizer.adamw_optimizer.lr": copy(0.01, "{trained}.optimizer.lr", limits=NOT_NEGATIVE),
    "optimizer.adamw_optimizer.end_lr": copy(
        0.001, "{trained}.optimizer.end_lr", limits=NOT_NEGATIVE
    ),
    "optimizer.adamw_optimizer.lr_freeze_steps": refuse(0, "weights are trained from the start"),
    "optimizer.adamw_optimizer.lr_warmup_steps": compute(
        2000,
        "{trained}.optimizer.warmup_steps",
        note="unless warmup_ratio is above 0; see What differs",
        limits=NOT_NEGATIVE,
    ),
    "optimizer.adamw_optimizer.warmup_ratio": compute(
        0.0,
        "{trained}.optimizer.warmup_steps_proportion",
        note="with total_steps as warmup_steps; see What differs",
        limits=SHARE,
    ),
    "optimizer.adamw_optimizer.lr_decay_steps": ignore(500000, ENDS_WITH_RUN),
}

# PPO and online DPO override the learning rates of `optimizer.adamw_optimizer`.
CONSTANT_RATE: Mapping[str, FlagRule] = {
    "optimizer.accumulate_gradient_steps": compute(
        1, "{algorithm}.mini_batch_size", note="times mini_batch_size", limits=COUNT
    ),
    **{
        f"optimizer.adamw_optimizer.{name}": refuse(value, reason)
        for name, value, reason in (
            ("init_lr", 0.0, "warm-up begins at 0"),
            ("lr", 0.01, "EasyLM overwrites it here; write --lr"),
            ("end_lr", 0.001, "the rate is constant after warm-up"),
            ("lr_freeze_steps", 0, "PPO has policy_freeze_epochs"),
            ("lr_warmup_steps", 2000, "EasyLM overwrites it here; write --warmup_epochs"),
            ("warmup_ratio", 0.0, "write --warmup_epochs"),
            ("lr_decay_steps", 500000, "the rate is constant after warm-up"),
        )
    },
}

ARCHITECTURE: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": "",
    "max_sequence_length": 2048,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "rope_theta": 10000,
    "use_hf_rotary_emb": False,
    "use_scaled_rope": False,
}
UNLIMITED_NUMBERS = ("initializer_range", "bos_token_id", "eos_token_id")
NO_BLOCKS = "memory only: attention is computed in blocks by itself"
REMAT = "of the three, what recomputes most; with backend=torch gradient_checkpointing=true"

LLAMA: Mapping[str, FlagRule] = {
    **{
        f"llama.{name}": compute(
            value,
            note="of the model that a stream is converted to",
            kind=int if name == "num_key_value_heads" else None,
            limits=None if name in UNLIMITED_NUMBERS else POSITIVE,
        )
        for name, value in ARCHITECTURE.items()
    },
    "llama.use_cache": ignore(True, "sampling always has a cache"),
    "llama.resid_pdrop": compute(
        0.0, "{trained}.residual_dropout", note="backend=torch", limits=DECAY
    ),
    "llama.embd_pdrop": refuse(0.0, "weft has no dropout of embeddings alone"),
    "llama.attn_pdrop": compute(
        0.0, note="of the model that a stream is converted to; backend=torch", limits=DECAY
    ),
    **{
        f"llama.{name}": compute("", "{trained}.recompute_policy", note=REMAT)
        for name in ("remat_block", "remat_attention", "remat_mlp")
    },
    "llama.scan_attention": ignore(False, NO_BLOCKS),
    "llama.scan_mlp": ignore(False, NO_BLOCKS),
    **{
        f"llama.{name}": ignore(1024, NO_BLOCKS)
        for name in ("scan_query_chunk_size", "scan_key_chunk_size", "scan_mlp_chunk_size")
    },
    "llama.fcm_min_ratio": refuse(0.0, "weft has no forgetful causal mask"),
    "llama.fcm_max_ratio": refuse(0.0, "weft has no forgetful causal mask"),
}

TEXT_FIELDS: Mapping[str, Any] = {
    "fields_from_example": "",
    "fields": "[prompt],completion",
    "subfield_separator": " ",
    "add_bos_token": True,
    "add_eos_token": True,
    "prepend_text": "",
    "base64_token_dtype": "i4",
}
JSON_TORCH = {
    "path": compute("", "dataset.train_path", note="a file or gs://"),
    "hf_name": compute("", "dataset.sources", note="a dataset of the hub"),
    "hf_split": compute("train", "dataset.sources", may_be_empty=True),
    "seq_length": compute(1024, "dataset.max_seqlen", limits=LENGTH),
    "batch_size": compute(8, "dataset.train_bs_n_seqs", limits=COUNT),
    "num_workers": compute(
        8, "dataset.num_workers", note="absent: as many as the file needs", limits=NOT_NEGATIVE
    ),
    "remove_truncated_samples": copy(False, "dataset.remove_truncated_samples"),
}
HF_PROMPT = {
    "path": compute("openbmb/UltraFeedback", "dataset.sources"),
    "name": compute("", "dataset.sources", note="a folder of the dataset", may_be_empty=True),
    "split": compute("train", "dataset.sources", may_be_empty=True),
    "streaming": ignore(False, "rows are read before the first step"),
    "seq_length": compute(1024, "dataset.max_prompt_len", limits=COUNT),
    "num_workers": compute(
        8, "dataset.num_workers", note="absent: as many as the file needs", limits=NOT_NEGATIVE
    ),
    "batch_size": compute(8, "dataset.train_bs_n_seqs", limits=COUNT),
    "policy_prefix_tokens": compute("<|user|>\n", "dataset.args", may_be_empty=True),
    "policy_suffix_tokens": compute("\n<|assistant|>\n", "dataset.args", may_be_empty=True),
    "reward_prefix_tokens": compute("<|user|>\n", "rew.prompt_prefix", may_be_empty=True),
    "reward_suffix_tokens": compute("\n<|assistant|>\n", "rew.prompt_suffix", may_be_empty=True),
}
HUGGINGFACE = {
    "path": compute("c4", "dataset.sources", note="c4 is allenai/c4"),
    "name": compute("en", "dataset.sources", note="a folder of the dataset", may_be_empty=True),
    "split": compute("train", "dataset.sources", may_be_empty=True),
    "streaming": ignore(False, "large sets are tokenized during training"),
    "seq_length": compute(1024, "dataset.max_seqlen", limits=LENGTH),
    "batch_size": compute(8, "dataset.train_bs_n_seqs", limits=COUNT),
    "always_start_with_bos": refuse(False, "rows are not cut across sequences"),
    "batch_token_dtype": ignore("i4", "ids are 64-bit integers"),
}
JSON_DATASET = {
    "path": compute("", "dataset.train_path"),
    "seq_length": compute(1024, "dataset.max_seqlen", limits=LENGTH),
    "batch_size": compute(8, "dataset.train_bs_n_seqs", limits=COUNT),
    "always_start_with_bos": refuse(False, "rows are not cut across sequences"),
    "start_seek_loc": refuse(0, NO_STREAM_STATE),
    "example_index_at_start": refuse(0, NO_STREAM_STATE),
    "tokens_count_at_start": refuse(0, NO_STREAM_STATE),
    "tokenizer_processes": compute(
        1, "dataset.num_workers", note="absent: as many as needed", limits=COUNT
    ),
    "tokenizer_parallel_chunk_size": ignore(32, "chunks are chosen by themselves"),
    "tokenizer_parallel_batch_size": ignore(1024, "chunks are chosen by themselves"),
    "throughput_average_window_size": ignore(200, "the live view shows the pace"),
}
GROUPS: Mapping[str, Mapping[str, FlagRule]] = {
    "text_processor": {
        name: compute(value, "dataset.args", may_be_empty=isinstance(value, str))
        for name, value in TEXT_FIELDS.items()
    },
    "huggingface_dataset": HUGGINGFACE,
    "json_dataset": JSON_DATASET,
    "json_torch_dataset": JSON_TORCH,
    "tulu_prompt_dataset": {
        **JSON_TORCH,
        "seq_length": compute(1024, "dataset.max_prompt_len", limits=COUNT),
    },
    "hf_prompt_dataset": HF_PROMPT,
}
# dataset type -> (group of its flags, weft's dataset type)
DATASET_TYPES: Mapping[str, tuple[str, str]] = {
    "huggingface": ("huggingface_dataset", "text_fields"),
    "json": ("json_dataset", "text_fields"),
    "json_torch": ("json_torch_dataset", "prompt_answer"),
    "tulu_json_torch": ("json_torch_dataset", "chat"),
    "preference_json_torch": ("json_torch_dataset", "preference_json_torch"),
    "hf_prompt": ("hf_prompt_dataset", "hf_prompt"),
    "tulu_prompt": ("tulu_prompt_dataset", "tulu_prompt"),
}
TEXT_TYPES = ("tulu_json_torch", "json_torch", "json", "huggingface")
PAIR_TYPES = ("preference_json_torch",)
PROMPT_TYPES = ("tulu_prompt", "hf_prompt")
TRAIN_TYPE = compute("huggingface", "dataset.type", note="as in docs/datasets.md, or below")
VALIDATION = {
    "path": compute("", "dataset.valid_path"),
    "seq_length": compute("", "dataset.valid_max_seqlen", kind=int, limits=LENGTH),
    "batch_size": compute("", "dataset.valid_bs_n_seqs", kind=int, limits=COUNT),
}


def list_dataset_flags(types: Sequence[str]) -> dict[str, FlagRule]:
    """Return the flags of `train_dataset` and `eval_dataset` for a command that reads `types`.

    Flags of other dataset types are refused. Of `eval_dataset`, only the flags for path, lengths
    and batch size are accepted, because validation rows are read in the same way as training rows.
    Commands that sample read no validation rows.
    """
    prompts = types == PROMPT_TYPES
    read = {DATASET_TYPES[name][0] for name in types} | {"json_torch_dataset"}
    if not prompts:
        read.add("text_processor")
    type_names = ", ".join(types)
    flags = {"train_dataset.type": TRAIN_TYPE}
    for group, rules in GROUPS.items():
        for name, rule in rules.items():
            if group not in read:
                rule = refuse(
                    rule.default, f"not for this command, which reads {type_names}", rule.kind
                )
            elif prompts and group == "json_torch_dataset" and name == "seq_length":
                rule = GROUPS["tulu_prompt_dataset"][name]
            flags[f"train_dataset.{group}.{name}"] = rule
    if prompts:
        reason = "EasyLM evaluates nothing here; write dataset.valid_path=FILE"
    else:
        reason = "rows are read as those of train_dataset; name them by path"
    flags["eval_dataset.type"] = compute("", "dataset.valid_path", note="that of train_dataset")
    for group, rules in GROUPS.items():
        for name, rule in rules.items():
            evaluated = name in VALIDATION and group in read and "json" in group
            if evaluated and not prompts:
                flags[f"eval_dataset.{group}.{name}"] = VALIDATION[name]
            else:
                flags[f"eval_dataset.{group}.{name}"] = refuse(rule.default, reason, rule.kind)
    if prompts:
        flags["eval_dataset.type"] = refuse("", reason)
    return flags


ONE_MODEL: Mapping[str, FlagRule] = {
    "initialize_jax_distributed": compute(False, note=CONNECTED),
    "total_steps": compute(10000, "max_steps", note="if num_epochs is 0", limits=NOT_NEGATIVE),
    "num_epochs": compute(0, "total_train_epochs", note="0: total_steps", limits=NOT_NEGATIVE),
    "log_freq": compute(50, "log_freq_steps", limits=COUNT),
    "eval_steps": compute(
        0,
        "eval_freq_steps",
        note="above 0: every log_freq, and sets are evaluated whole",
        limits=NOT_NEGATIVE,
    ),
    "load_llama_config": compute("", "{model}.path", note="of a stream: a name, or json::FILE"),
    "update_llama_config": compute("", "{model}.path", note="a literal, not evaluated code"),
    "load_checkpoint": compute(
        "", "{model}.path", note="a stream such as params::FILE, or a Hugging Face directory"
    ),
}

SAMPLED: Mapping[str, FlagRule] = {
    "log_freq": copy(1, "log_freq_steps", limits=COUNT),
    "num_epochs": copy(1, "total_train_epochs", limits=COUNT),
    "load_llama_config_policy": compute("", "actor.path", note="of a stream"),
    "load_llama_config_reward": compute("", "rew.path", note="of a stream"),
    "update_llama_config_policy": compute("", "actor.path", note="a literal"),
    "update_llama_config_reward": compute("", "rew.path", note="a literal"),
    "load_checkpoint_policy": compute("", "actor.path", note="also the reference's"),
    "load_checkpoint_reward": compute("", "rew.path", note="also the critic's first weights"),
    "max_continuation_len": copy(16, "{algorithm}.gen.max_new_tokens", limits=COUNT),
    "mini_batch_size": compute(
        1,
        "{algorithm}.mini_batch_size",
        note="divides the completions of a step; a multiple of dp x fsdp",
        limits=COUNT,
    ),
    "forward_mini_batch_size": ignore(
        "", "passes are limited by max_tokens_per_microbatch", kind=int, limits=COUNT
    ),
    "backward_mini_batch_size": compute(
        "",
        "{algorithm}.mini_batch_size",
        note="of the guide, as mini_batch_size",
        kind=int,
        limits=COUNT,
    ),
    "use_tpu": ignore(False, "jax takes the best devices there are; device chooses others"),
    "ppo_epochs": copy(4, "{algorithm}.ppo_epochs", limits=NumberRange(1, at_most=10_000)),
    "warmup_epochs": copy(0.0, "{trained}.optimizer.warmup_epochs", limits=NOT_NEGATIVE),
    "reward_gain": compute(1.0, "{algorithm}.reward_output_scaling", note="see What differs"),
    "reward_bias": compute(0.0, "{algorithm}.reward_output_bias", note="see What differs"),
    "temperature": copy(0.7, "{algorithm}.gen.temperature", limits=NOT_NEGATIVE),
    "max_steps_per_epoch": compute(
        0, "dataset.sources", note="size: so many batches", limits=NOT_NEGATIVE
    ),
    "generate_only": refuse(False, "weft quickstart gen samples completions"),
}

PPO: Mapping[str, FlagRule] = {
    "rollouts_per_prompt": copy(1, "ppo.samples_per_prompt", limits=NumberRange(1, at_most=65_536)),
    "policy_freeze_epochs": copy(0.0, "ppo.critic_warmup_epochs", limits=NOT_NEGATIVE),
    "lr": copy(1e-5, "{trained}.optimizer.lr", limits=NOT_NEGATIVE),
    "kl_coef": copy(0.2, "ppo.kl_ctl", limits=NOT_NEGATIVE),
    "whiten_rewards": copy(False, "ppo.whiten_rewards", note="over the whole batch"),
    "gamma": copy(1.0, "ppo.discount", limits=SHARE),
    "lam": copy(0.95, "ppo.gae_lambda", limits=SHARE),
    "cliprange": copy(0.2, "ppo.eps_clip", limits=SHARE),
    "cliprange_value": copy(0.2, "ppo.value_eps_clip", limits=POSITIVE),
    "vf_coef": copy(0.1, "ppo.vf_coef"),
}
DPO: Mapping[str, FlagRule] = {
    "load_reference_checkpoint": compute("", "ref.path", note="absent: the policy's"),
    "dpo_beta": copy(0.1, "dpo.beta", limits=POSITIVE),
    "dpo_label_smoothing": compute(
        0.0, "dpo.label_smoothing", note="without use_ipo", limits=NumberRange(0, below=0.5)
    ),
    "use_ipo": compute(False, "dpo.loss_type", note="true: ipo_sum; ipo has means over tokens"),
    "precalculate_reference_logps": copy(False, "dpo.cache_ref_logprobs"),
}
REWARD_MODEL: Mapping[str, FlagRule] = {
    "load_from_causal_lm": compute(
        True, "model.path", note="false: the stream has a score head, which is kept"
    ),
    "use_margin": compute(False, "dataset.args", note="of preference_json_torch"),
}
ONLINE_DPO: Mapping[str, FlagRule] = {
    "lr": copy(5e-7, "actor.optimizer.lr", limits=NOT_NEGATIVE),
    "beta": copy(0.1, "online_dpo.beta", limits=POSITIVE),
}


@dataclass(frozen=True)
class TrainingCommand:
    """One of EasyLM's training scripts.

    Attributes:
        quickstart: weft's quickstart that replaces the script
        summary: what the script does
        model: role whose checkpoint the script trains
        trained: trained roles
        roles: all roles
        flags: rule of each flag
        types: dataset types that the script reads
        changed: defaults of flags that differ from those in `flags`
    """

    quickstart: str
    summary: str
    model: str
    trained: tuple[str, ...]
    roles: tuple[str, ...]
    flags: Mapping[str, FlagRule]
    types: tuple[str, ...]
    changed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> bool:
        """True if the script samples completions during training."""
        return "max_continuation_len" in self.flags

    def expand(self, option: str) -> list[str]:
        """Return the names of weft's options for a name with a placeholder such as {roles}."""
        for word, roles in (
            ("{model}", (self.model,)),
            ("{trained}", self.trained),
            ("{roles}", self.roles),
            ("{algorithm}", (self.quickstart,)),
        ):
            if word in option:
                return [option.replace(word, role) for role in roles]
        return [option]

    def get_default(self, name: str) -> Any:
        """Return EasyLM's default of a flag of this script."""
        return self.changed.get(name, self.flags[name].default)


EVERYWHERE = {**RUN, **LOGGER, **TOKENIZER, **OPTIMIZER, **LLAMA}
TRAINED_ON_PAIRS = {
    **EVERYWHERE,
    **ADAMW_SCHEDULE,
    **ONE_MODEL,
    **list_dataset_flags(PAIR_TYPES),
}
TRAINED_ON_SAMPLES = {
    **EVERYWHERE,
    **CONSTANT_RATE,
    **SAMPLED,
    **list_dataset_flags(PROMPT_TYPES),
}

TRAINING: Mapping[str, TrainingCommand] = {
    "llama_train": TrainingCommand(
        "sft",
        "supervised fine-tuning",
        "model",
        ("model",),
        ("model",),
        {**EVERYWHERE, **ADAMW_SCHEDULE, **ONE_MODEL, **list_dataset_flags(TEXT_TYPES)},
        TEXT_TYPES,
    ),
    "llama_train_dpo": TrainingCommand(
        "dpo",
        "DPO and IPO on pairs of conversations",
        "actor",
        ("actor",),
        ("actor", "ref"),
        {**TRAINED_ON_PAIRS, **DPO},
        PAIR_TYPES,
    ),
    "llama_train_rm": TrainingCommand(
        "rw",
        "a reward model on pairs of conversations",
        "model",
        ("model",),
        ("model",),
        {**TRAINED_ON_PAIRS, **REWARD_MODEL},
        PAIR_TYPES,
    ),
    "llama_train_ppo": TrainingCommand(
        "ppo",
        "PPO with a reward model",
        "actor",
        ("actor", "critic"),
        ("actor", "critic", "ref", "rew"),
        {**TRAINED_ON_SAMPLES, **PPO},
        PROMPT_TYPES,
        {"dtype": "bf16"},
    ),
    "llama_train_online_dpo": TrainingCommand(
        "online_dpo",
        "DPO on sampled pairs that a reward model ranks",
        "actor",
        ("actor",),
        ("actor", "ref", "rew"),
        {**TRAINED_ON_SAMPLES, **ONLINE_DPO},
        PROMPT_TYPES,
        {"dtype": "bf16"},
    ),
}
CONVERTERS = (
    "convert_easylm_to_hf",
    "convert_hf_to_easylm",
    "convert_torch_to_easylm",
    "convert_checkpoint",
    "diff_checkpoint",
)
