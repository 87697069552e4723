"""Translate a DeepSpeed configuration into weft's options.

Each key is mapped to an option, ignored because it only tunes DeepSpeed, or refused with a reason.
DeepSpeed itself is not needed. The known keys are those of its documentation page "DeepSpeed
Configuration JSON". A key with the value `auto`, which Hugging Face's Trainer fills in from its own
options, is treated as not set: weft's command line or defaults apply.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.errors import find_nearest

AUTO = "auto"
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "fusedadam": "adamw",
    "deepspeedcpuadam": "adamw",
    "sgd": "sgd",
    "lion": "lion",
    "fusedlion": "lion",
    "deepspeedcpulion": "lion",
}
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
# Keys for DeepSpeed's communication, logging and profiling; they do not affect results.
TUNING = frozenset(
    (
        "steps_per_print",
        "wall_clock_breakdown",
        "dump_state",
        "zero_allow_untested_optimizer",
        "memory_breakdown",
        "zero_force_ds_cpu_optimizer",
        "disable_allgather",
        "flops_profiler",
        "comms_logger",
        "csv_monitor",
        "aio",
        "checkpoint",
        "use_node_local_storage",
        "nebula",
        "compile",
    )
)
ZERO_TUNING = frozenset(
    (
        "contiguous_gradients",
        "overlap_comm",
        "reduce_scatter",
        "reduce_bucket_size",
        "allgather_partitions",
        "allgather_bucket_size",
        "sub_group_size",
        "round_robin_gradients",
        "load_from_fp32_weights",
        "elastic_checkpoint",
        "ignore_unused_parameters",
        "memory_efficient_linear",
        "legacy_stage1",
        "use_multi_rank_bucket_allreduce",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        "prefetch_bucket_size",
        "gather_16bit_weights_on_model_save",
        "gather_fp16_weights_on_model_save",
        "module_granularity_threshold",
    )
)
OFFLOAD_TUNING = frozenset(
    (
        "device",
        "pin_memory",
        "buffer_count",
        "buffer_size",
        "fast_init",
        "max_in_cpu",
        "pipeline_read",
        "pipeline_write",
        "nvme_path",
    )
)
LOSS_SCALING = frozenset(
    (
        "enabled",
        "auto_cast",
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "min_loss_scale",
        "consecutive_hysteresis",
    )
)
# Keys that are refused if they are switched on, each with a remedy.
REFUSED = {
    "amp": "NVIDIA's apex is not used; write bf16",
    "sparse_gradients": "gradients are dense here; leave it out",
    "prescale_gradients": "gradients are summed in float32; leave it out",
    "elasticity": "batch sizes are fixed by the options; leave it out",
    "autotuning": "leave it out",
    "sparse_attention": "attention is exact; leave it out",
    "progressive_layer_drop": "every layer is trained; leave it out",
    "curriculum_learning": "rows come in the dataset's order; leave it out",
    "data_efficiency": "rows come in the dataset's order; leave it out",
    "compression_training": "weights are not compressed; leave it out",
    "quantize_training": "weights are not quantized; leave it out",
    "eigenvalue": "leave it out",
    "hybrid_engine": "generation has its own layout: actor_gen.layout",
    "pipeline": "pipeline parallelism is the p of a layout: layout=d2p2",
    "tensor_parallel": "tensor parallelism is the t of a layout: layout=d2t2",
    "sequence_parallel_size": "context parallelism is the c of a layout: layout=d2c2",
}


@dataclass
class MappedDeepSpeedConfig:
    """Result of translating a DeepSpeed configuration.

    `options` maps the names of weft's options to values. `notes` are lines to show to the user.
    `tuning` lists the DeepSpeed keys that are ignored because they do not affect results, and
    `refused` lists the keys that weft does not support, with the reasons.
    """

    roles: tuple[str, ...]  # trained roles
    max_seqlen: int | None  # maximum tokens per row, if known
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tuning: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    batch: dict[str, int] = field(default_factory=dict)  # batch sizes that the file sets

    def set_option(self, name: str, value: Any) -> None:
        """Set an option of the run, or of each trained role if the name begins with a dot."""
        for option in self.list_names(name):
            self.options[option] = value

    def list_names(self, name: str) -> tuple[str, ...]:
        """Return the full names of the option `name`.

        A name that begins with a dot, such as ".dtype", is expanded to one name per trained role,
        such as "actor.dtype". Other names are returned unchanged.
        """
        if name.startswith("."):
            return tuple(f"{role}{name}" for role in self.roles)
        return (name,)

    def refuse(self, key: str, value: Any, reason: str) -> None:
        """Record that weft does not support a key with this value."""
        self.refused.append(f"{key}={value!r}: {reason}")

    def refuse_unknown(self, prefix: str, group: Mapping[str, Any], known: frozenset[str]) -> None:
        """Call `refuse` for every key of the group `prefix` that is set but not in `known`."""
        for key, value in group.items():
            if key not in known and not _is_off(value):
                close = find_nearest(key, known, 1)
                self.refuse(
                    f"{prefix}.{key}",
                    value,
                    f"unknown{f'; did you mean {close[0]}?' if close else ''}",
                )


def map_config(
    config: Mapping[str, Any], roles: Sequence[str], max_seqlen: int | None = None
) -> MappedDeepSpeedConfig:
    """Translate a DeepSpeed configuration into options of the run and its trained roles.

    `roles` are the names of these roles. `max_seqlen` is the maximum number of tokens per row, if
    it is known.
    """
    mapped = MappedDeepSpeedConfig(tuple(roles), max_seqlen)
    config = _with_numbers(config)
    for key, value in config.items():
        if key in RULES:
            if value not in (None, AUTO):
                RULES[key](mapped, value)
        elif key in TUNING:
            mapped.tuning.append(key)
        elif key not in REFUSED:
            close = find_nearest(key, [*RULES, *TUNING, *REFUSED], 1)
            mapped.refuse(key, value, f"unknown{f'; did you mean {close[0]}?' if close else ''}")
        elif not _is_off(value) and (value is True or value != 1):
            mapped.refuse(key, value, REFUSED[key])
    _map_batch(mapped, config)
    return mapped


def _with_numbers(value: Any) -> Any:
    """Return `value` with strings such as "1e-5" and "true" converted to numbers and Booleans.

    Mappings and lists are converted recursively. Such strings occur in Open-Assistant's files, for
    example.
    """
    if isinstance(value, Mapping):
        return {key: _with_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_numbers(each) for each in value]
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if isinstance(value, str) and NUMBER.fullmatch(value.strip()):
        return int(value) if value.strip().lstrip("+-").isdigit() else float(value)
    return value


def _is_off(value: Any) -> bool:
    """Return whether a key with this value leaves its DeepSpeed feature disabled.

    Such values are None, "auto", "none", False, 0, empty values, and groups that are not enabled.
    """
    if isinstance(value, Mapping):
        return value.get("enabled", bool(value)) in (False, AUTO)
    return value in (None, AUTO, False, 0, "none", [], "")


def _check_number(
    mapped: MappedDeepSpeedConfig, key: str, value: Any, minimum: float = 0.0
) -> bool:
    """Return whether the value is a number of at least `minimum`.

    Also returns False for None and "auto", which mean that the key is not set. Any other value is
    invalid and is recorded in `mapped.refused`.
    """
    if value in (None, AUTO):
        return False
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < minimum:
        mapped.refuse(key, value, f"must be a number, at least {minimum:g}, or auto")
        return False
    return True


def _read_group(mapped: MappedDeepSpeedConfig, key: str, value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    mapped.refuse(key, value, "must be a group of keys")
    return {}


# -- batches


def _map_batch(mapped: MappedDeepSpeedConfig, config: Mapping[str, Any]) -> None:
    """Map the batch sizes of the file to weft's options.

    The global batch size becomes a number of rows per batch. If it is not set, the micro-batch size
    per device becomes the batch size per device. The micro-batch size also limits the tokens per
    micro-batch, if the maximum length of a row is known.
    """
    # Find the sizes that the file sets.
    micro, accumulation = (
        config.get(k) for k in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    total = config.get("train_batch_size")
    sizes = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    is_set = {key: _check_number(mapped, key, value, 1) for key, value in sizes.items()}
    for key, size in sizes.items():
        if is_set[key] and size is not None:
            mapped.batch[key] = int(size)
    # Set the batch size, either in total or per device.
    if is_set["train_batch_size"]:
        mapped.set_option("dataset.train_bs_n_seqs", total)
        if is_set["gradient_accumulation_steps"]:
            mapped.tuning.append("gradient_accumulation_steps")
    elif is_set["train_micro_batch_size_per_gpu"]:
        mapped.set_option("per_device_train_batch_size", micro)
        if is_set["gradient_accumulation_steps"]:
            mapped.set_option("gradient_accumulation_steps", accumulation)
    # Set the number of tokens of a micro-batch.
    if is_set["train_micro_batch_size_per_gpu"] and micro is not None:
        if mapped.max_seqlen is not None:
            mapped.set_option("max_tokens_per_microbatch", micro * mapped.max_seqlen)
        else:
            mapped.notes.append(
                "train_micro_batch_size_per_gpu: weft packs rows into micro-batches of at most "
                "max_tokens_per_microbatch tokens"
            )


# -- optimizer, schedule and dtype


def _map_optimizer(mapped: MappedDeepSpeedConfig, value: Any) -> None:
    group = _read_group(mapped, "optimizer", value)
    name = str(group.get("type", AUTO))
    params = group.get("params") or {}
    # Map the type.
    kind = OPTIMIZERS.get(name.lower())
    if name != AUTO:
        if kind is None:
            mapped.refuse("optimizer.type", name, "weft has AdamW, SGD and Lion")
            return
        mapped.set_option(".optimizer.type", kind)
    if params.get("adam_w_mode", True) is False:
        mapped.refuse(
            "optimizer.params.adam_w_mode", False, "weight decay is decoupled here; leave it out"
        )
    # Map the parameters.
    for key, option in (("lr", "lr"), ("eps", "eps"), ("weight_decay", "weight_decay")):
        if _check_number(mapped, f"optimizer.params.{key}", params.get(key)):
            mapped.set_option(f".optimizer.{option}", params[key])
    betas = params.get("betas", AUTO)
    if isinstance(betas, Sequence) and not isinstance(betas, str) and len(betas) == 2:
        for index, beta in enumerate(betas):
            if _check_number(mapped, f"optimizer.params.betas[{index}]", beta):
                mapped.set_option(f".optimizer.beta{index + 1}", beta)
    elif betas != AUTO:
        mapped.refuse("optimizer.params.betas", betas, "must be two numbers, or auto")
    if kind == "sgd" and _check_number(
        mapped, "optimizer.params.momentum", params.get("momentum", 0.0)
    ):
        mapped.set_option(".optimizer.beta1", params.get("momentum", 0.0))
    # Refuse all other keys.
    known = {
        "lr",
        "eps",
        "weight_decay",
        "betas",
        "adam_w_mode",
        "torch_adam",
        "bias_correction",
        "fused",
    }
    mapped.refuse_unknown(
        "optimizer.params", params, frozenset(known | ({"momentum"} if kind == "sgd" else set()))
    )
    mapped.refuse_unknown("optimizer", group, frozenset({"type", "params", "legacy_fusion"}))


def _map_scheduler(mapped: MappedDeepSpeedConfig, value: Any) -> None:
    group = _read_group(mapped, "scheduler", value)
    name = str(group.get("type", AUTO))
    params = group.get("params") or {}
    # Map the type.
    if name != AUTO:
        if name not in SCHEDULES:
            mapped.refuse("scheduler.type", name, f"weft has {', '.join(SCHEDULES)}")
            return
        mapped.set_option(".optimizer.lr_scheduler_type", SCHEDULES[name])
    # Map the parameters.
    peak = params.get("warmup_max_lr")
    if _check_number(mapped, "scheduler.params.warmup_max_lr", peak):
        if mapped.roles:
            lr = mapped.options.get(f"{mapped.roles[0]}.optimizer.lr")
        else:
            lr = None
        if lr not in (None, peak):
            mapped.refuse(
                "scheduler.params.warmup_max_lr",
                peak,
                f"optimizer.params.lr is {lr}; set only one of them",
            )
        mapped.set_option(".optimizer.lr", peak)
    if _check_number(mapped, "scheduler.params.warmup_num_steps", params.get("warmup_num_steps")):
        mapped.set_option(".optimizer.warmup_steps", params["warmup_num_steps"])
    if _check_number(mapped, "scheduler.params.cos_min_ratio", params.get("cos_min_ratio")):
        mapped.set_option(".optimizer.min_lr_ratio", params["cos_min_ratio"])
    # Refuse parameters that weft's schedules do not have.
    for key in ("warmup_min_lr", "warmup_min_ratio"):
        if not _is_off(params.get(key)):
            mapped.refuse(
                f"scheduler.params.{key}", params[key], "the learning rate warms up from 0"
            )
    if params.get("warmup_type", "linear") not in ("linear", AUTO):
        mapped.refuse(
            "scheduler.params.warmup_type",
            params["warmup_type"],
            "the learning rate warms up linearly",
        )
    if not _is_off(params.get("total_num_steps")):
        mapped.refuse(
            "scheduler.params.total_num_steps",
            params["total_num_steps"],
            "a schedule ends with the run; write auto, and max_steps=N to end it earlier",
        )
    mapped.refuse_unknown(
        "scheduler.params",
        params,
        frozenset(
            (
                "warmup_max_lr",
                "warmup_num_steps",
                "cos_min_ratio",
                "warmup_min_lr",
                "warmup_min_ratio",
                "warmup_type",
                "total_num_steps",
                "last_batch_iteration",
            )
        ),
    )
    mapped.refuse_unknown("scheduler", group, frozenset({"type", "params"}))


def _build_dtype_rule(key: str, dtype: str) -> Callable[[MappedDeepSpeedConfig, Any], None]:
    def map_dtype(mapped: MappedDeepSpeedConfig, value: Any) -> None:
        group = _read_group(mapped, key, value)
        if group.get("enabled") is True:
            other = mapped.options.get(f"{mapped.roles[0]}.dtype") if mapped.roles else None
            if other is not None:
                mapped.refuse(
                    f"{key}.enabled", True, f"{other} is enabled too; enable only one of them"
                )
            mapped.set_option(".dtype", dtype)
            scaled = sorted(
                name
                for name in group
                if name in LOSS_SCALING - {"enabled"} and not _is_off(group[name])
            )
            for name in scaled:
                mapped.tuning.append(f"{key}.{name}")
        mapped.refuse_unknown(key, group, LOSS_SCALING)

    return map_dtype


def _map_clipping(mapped: MappedDeepSpeedConfig, value: Any) -> None:
    if _check_number(mapped, "gradient_clipping", value):
        mapped.set_option(".optimizer.max_grad_norm", value)


# -- sharding, offloading and communication


def _map_zero(mapped: MappedDeepSpeedConfig, value: Any) -> None:
    group = _read_group(mapped, "zero_optimization", value)
    # Map the stage and the offloading.
    stage = group.get("stage", 0)
    if stage in (0, 1, 2, 3) and not isinstance(stage, bool):
        mapped.set_option(".zero_stage", stage)
    elif stage != AUTO:
        mapped.refuse("zero_optimization.stage", stage, "must be 0, 1, 2 or 3")
    if group.get("cpu_offload") is True:  # spelling in older files
        mapped.set_option(".optimizer.offload", True)
    for key, option in (("offload_optimizer", ".optimizer.offload"), ("offload_param", ".offload")):
        _map_offload(mapped, f"zero_optimization.{key}", group.get(key), option)
    tuning = {key for key in group if key.removeprefix("stage3_") in ZERO_TUNING}
    for key in group:
        if key in tuning:
            mapped.tuning.append(f"zero_optimization.{key}")
    # Refuse sharding groups, which are part of a layout, and unknown keys.
    if group.get("zero_hpz_partition_size", 1) not in (1, AUTO):
        size = group["zero_hpz_partition_size"]
        mapped.refuse(
            "zero_optimization.zero_hpz_partition_size",
            size,
            f"sharding within a node is the f of a layout: d16f{size}",
        )
    if group.get("mics_shard_size", -1) not in (-1, AUTO):
        size = group["mics_shard_size"]
        mapped.refuse(
            "zero_optimization.mics_shard_size",
            size,
            f"sharding within a group is the f of a layout: d16f{size}",
        )
    known = {
        "stage",
        "cpu_offload",
        "offload_optimizer",
        "offload_param",
        "zero_hpz_partition_size",
        "mics_shard_size",
    }
    mapped.refuse_unknown("zero_optimization", group, ZERO_TUNING | known | tuning)


def _map_offload(mapped: MappedDeepSpeedConfig, key: str, value: Any, option: str) -> None:
    if value in (None, AUTO):
        return
    group = _read_group(mapped, key, value)
    device = group.get("device", "none")
    if device == "cpu":
        mapped.set_option(option, True)
    elif device not in ("none", AUTO):
        mapped.refuse(f"{key}.device", device, "weft offloads to host memory; write cpu")
    if not _is_off(group.get("ratio")) and group["ratio"] != 1:
        mapped.refuse(f"{key}.ratio", group["ratio"], "weft offloads all of it; leave it out")
    mapped.refuse_unknown(key, group, OFFLOAD_TUNING | {"ratio"})


def _map_activations(mapped: MappedDeepSpeedConfig, value: Any) -> None:
    group = _read_group(mapped, "activation_checkpointing", value)
    for key, each in group.items():
        if key in ("partition_activations", "cpu_checkpointing") and each is True:
            mapped.refuse(
                f"activation_checkpointing.{key}",
                each,
                "write MODEL.gradient_checkpointing=true instead",
            )
        else:
            mapped.tuning.append(f"activation_checkpointing.{key}")


def _map_predivide_factor(mapped: MappedDeepSpeedConfig, value: Any) -> None:
    if value != 1:
        mapped.refuse(
            "gradient_predivide_factor", value, "gradients are summed in float32; leave it out"
        )


def _map_communication(mapped: MappedDeepSpeedConfig, value: Any) -> None:
    if value not in ("fp32", "torch.float32"):
        mapped.refuse(
            "communication_data_type", value, "gradients are summed in float32; write fp32"
        )


# -- loggers


def _map_tensorboard(mapped: MappedDeepSpeedConfig, value: Any) -> None:
    if _read_group(mapped, "tensorboard", value).get("enabled") is True:
        mapped.set_option("logger.tensorboard", True)


def _map_wandb(mapped: MappedDeepSpeedConfig, value: Any) -> None:
    group = _read_group(mapped, "wandb", value)
    if group.get("enabled") is True:
        mapped.set_option("logger.wandb.mode", "online")
        for key, option in (("team", "entity"), ("project", "project")):
            if not _is_off(group.get(key)):
                mapped.set_option(f"logger.wandb.{option}", group[key])
        mapped.refuse_unknown("wandb", group, frozenset({"enabled", "team", "project"}))


RULES: dict[str, Callable[[MappedDeepSpeedConfig, Any], None]] = {
    # `_map_batch` maps the three batch sizes together.
    "train_batch_size": lambda mapped, value: None,
    "train_micro_batch_size_per_gpu": lambda mapped, value: None,
    "gradient_accumulation_steps": lambda mapped, value: None,
    "optimizer": _map_optimizer,
    "scheduler": _map_scheduler,
    "fp16": _build_dtype_rule("fp16", "float16"),
    "bf16": _build_dtype_rule("bf16", "bfloat16"),
    "bfloat16": _build_dtype_rule("bfloat16", "bfloat16"),
    "gradient_clipping": _map_clipping,
    "zero_optimization": _map_zero,
    "activation_checkpointing": _map_activations,
    "gradient_predivide_factor": _map_predivide_factor,
    "communication_data_type": _map_communication,
    "tensorboard": _map_tensorboard,
    "wandb": _map_wandb,
}
