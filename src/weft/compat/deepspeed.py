"""`--deepspeed [FILE]`: convert a DeepSpeed JSON file to assignments of weft's options.

Assignments on the command line override those from the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from weft.cli.aliases import build_translation, count_data_ranks
from weft.cli.help import format_value
from weft.cli.overrides import Override
from weft.compat.deepspeed_keys import AUTO, MappedDeepSpeedConfig, map_config
from weft.errors import ConfigError
from weft.experiments.common import RunConfig
from weft.observe.configuration import flatten_options
from weft.options import to_mapping, to_plain
from weft.planner.placement import SEARCH
from weft.reading import read_json

# Configuration for `--deepspeed` without a file, as in other programs that accept this.
BARE_FLAG_CONFIG = {"zero_optimization": {"stage": 2}}
_CPU = {"device": "cpu"}
# Files that Open-Assistant's sections name -> zero_optimization to use if there is no such file.
KNOWN_FILES: dict[str, dict[str, object]] = {
    "zero_config.json": {"stage": 2},
    "zero_config_pretrain.json": {"stage": 2},
    "zero_config_sft_65b.json": {"stage": 3, "offload_optimizer": _CPU, "offload_param": _CPU},
    "zero3_config.json": {"stage": 3},
    "zero3_config_sft.json": {"stage": 3},
    "zero3_config_pretrain.json": {"stage": 3},
    "zero3_config_falcon.json": {"stage": 3, "offload_optimizer": _CPU, "offload_param": _CPU},
    "deepspeed_rl.json": {"stage": 2, "offload_optimizer": _CPU},
}
# Keys that may be "auto", which Hugging Face's Trainer replaces by its own options -> options of
# weft that set the value. An option with a leading dot belongs to each trained role. A key without
# options is always 0 in weft.
AUTO_OPTIONS: dict[str, tuple[str, ...]] = {
    "train_batch_size": ("dataset.train_bs_n_seqs",),
    "train_micro_batch_size_per_gpu": ("max_tokens_per_microbatch",),
    "gradient_accumulation_steps": ("max_tokens_per_microbatch",),
    "gradient_clipping": (".optimizer.max_grad_norm",),
    "optimizer.type": (".optimizer.type",),
    "optimizer.params.lr": (".optimizer.lr",),
    "optimizer.params.betas": (".optimizer.beta1", ".optimizer.beta2"),
    "optimizer.params.momentum": (".optimizer.beta1",),
    "optimizer.params.eps": (".optimizer.eps",),
    "optimizer.params.weight_decay": (".optimizer.weight_decay",),
    "scheduler.type": (".optimizer.lr_scheduler_type",),
    "scheduler.params.warmup_max_lr": (".optimizer.lr",),
    "scheduler.params.warmup_min_lr": (),
    "scheduler.params.warmup_min_ratio": (),
    "scheduler.params.warmup_num_steps": (
        ".optimizer.warmup_steps",
        ".optimizer.warmup_steps_proportion",
    ),
    "scheduler.params.cos_min_ratio": (".optimizer.min_lr_ratio",),
    "scheduler.params.total_num_steps": ("total_train_epochs", "max_steps"),
    "fp16.enabled": (".dtype",),
    "bf16.enabled": (".dtype",),
    "bfloat16.enabled": (".dtype",),
    "zero_optimization.stage": (".zero_stage",),
    "zero_optimization.offload_optimizer.device": (".optimizer.offload",),
    "zero_optimization.offload_param.device": (".offload",),
}
BATCH_OPTION = "dataset.train_bs_n_seqs"
LENGTH_OPTIONS = ("dataset.max_seqlen", "max_seqlen", "max_length", "max_seq_length")


@dataclass(frozen=True)
class DeepSpeedOverrides:
    """Values of weft's options that are derived from a DeepSpeed configuration file.

    `assignments` set the options, unless the command line overrides them. `notes` explain to the
    user how the file was interpreted.
    """

    place: ClassVar[str] = "--deepspeed"  # where the options are set, for messages
    flag: str  # the flag as the user wrote it
    mapped_config: MappedDeepSpeedConfig
    assignments: list[Override]
    notes: list[str]
    autos: Sequence[str]  # keys with the value "auto", set by weft's options
    batch: Mapping[str, int]  # batch sizes that must be consistent

    def describe_autos(self, config: RunConfig) -> list[str]:
        """Return a note on the values that weft uses for keys set to "auto" in the DeepSpeed file.

        The result is a list with this note, or an empty list if there are no such keys. Raises
        `ConfigError` if the file's batch sizes do not fit the number of data-parallel ranks.
        """
        values = dict(flatten_options(to_mapping(config)))
        if self.batch and config.allocation_mode != SEARCH:  # the search determines the ranks later
            problem = _find_batch_problem(
                self.batch, count_data_ranks(build_translation((), config), values)
            )
            if problem:
                raise ConfigError(f"{self.flag}: {problem}")
        options = {}
        for key in self.autos:
            options[key] = [
                option
                for name in AUTO_OPTIONS[key]
                for option in self.mapped_config.list_names(name)
            ]
        descriptions = [
            f"{key} is {_format_values(names, values)}" for key, names in options.items()
        ]
        return [f"{self.flag}: what is auto: {'; '.join(descriptions)}"] if descriptions else []


def read_overrides(
    file: str, base: RunConfig, user_overrides: Sequence[Override]
) -> DeepSpeedOverrides:
    """Convert a DeepSpeed file to overrides of weft's options.

    `file` is "" if `--deepspeed` is used without a file. `user_overrides` are the assignments on
    the command line and in config sections, which take precedence over the file. Raises a
    `ConfigError` that lists every key that weft does not support.
    """
    if file and not Path(file).is_file():
        known = KNOWN_FILES.get(Path(file).name)
    else:
        known = None
    if known:
        config: Mapping[str, object] = {"zero_optimization": known}
    elif file:
        config = _read_config(Path(file))
    else:
        config = BARE_FLAG_CONFIG
    if not base.trained_roles:
        raise ConfigError("--deepspeed: no role is trained here; leave it out")
    # Map its keys. The longest sequence determines the tokens per micro-batch.
    lengths = []
    for each in user_overrides:
        if each.name in LENGTH_OPTIONS:
            lengths.append(to_plain(each.value))
    longest = lengths[-1] if lengths and isinstance(lengths[-1], int) else None
    mapped = map_config(config, base.trained_roles, longest)
    if mapped.refused:
        raise ConfigError(f"--deepspeed {file}: {'; '.join(mapped.refused)}")
    # Note which values are used, and which the command line overrides.
    flag = f"--deepspeed{f' {file}' if file else ''}"
    overriding = {}
    for each in user_overrides:
        if each.name in mapped.options and not each.removed:
            overriding[each.name] = to_plain(each.value)
    used = {}
    for name, value in mapped.options.items():
        if name not in overriding:
            used[name] = value
    notes = [f"{flag} is read as {_format_options(used) or 'nothing'}", *mapped.notes]
    differing = {}
    for name, value in overriding.items():
        if value != mapped.options[name]:
            differing[name] = value
    if differing:
        file_values = _format_options({name: mapped.options[name] for name in differing})
        notes.append(
            f"{flag}: {file_values} of the file is overridden by {_format_options(differing)}"
        )
    if mapped.tuning:
        notes.append(f"--deepspeed: these keys only tune DeepSpeed: {', '.join(mapped.tuning)}")
    assignments = [Override(name, value) for name, value in mapped.options.items()]
    autos = [key for key in AUTO_OPTIONS if _get_value(config, key) == AUTO]
    return DeepSpeedOverrides(
        flag, mapped, assignments, notes, autos, {} if BATCH_OPTION in overriding else mapped.batch
    )


def _get_value(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key in the nested `config`, or None if it is missing."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _find_batch_problem(batch: Mapping[str, int], ranks: int) -> str | None:
    """Return why the batch sizes do not fit `ranks` data-parallel ranks, or None if they fit.

    DeepSpeed requires: global batch = micro-batch per device x accumulation steps x ranks.
    """
    total = batch.get("train_batch_size")
    parts = {k: v for k, v in batch.items() if k != "train_batch_size"}
    if total is None or not parts:
        return None
    product = ranks * prod(parts.values())
    if total == product or (len(parts) == 1 and total % product == 0):
        return None
    rank_count = f"{ranks} data-parallel rank{'' if ranks == 1 else 's'}"
    formula = " x ".join([*(f"{key}={value}" for key, value in parts.items()), rank_count])
    if len(parts) > 1:
        mismatch = f"is not {formula} = {product}"
    else:
        mismatch = f"is not a multiple of {formula} = {product}"
    return (
        f"train_batch_size={total} {mismatch}, and DeepSpeed refuses that; correct one of them, or "
        f"set {BATCH_OPTION}=N"
    )


def _format_values(names: Sequence[str], values: Mapping[str, object]) -> str:
    """Format the values that weft uses for a DeepSpeed key whose value is "auto".

    `names` are weft's options that correspond to the key, and `values` maps option names to values.
    If none of these options has a value, the text says that weft chooses the value. A key without
    corresponding options, such as warmup_min_lr, is always 0 in weft.
    """
    if not names:
        return "0"
    option_values = {}
    for name in names:
        if values.get(name) is not None:
            option_values[name] = values[name]
    return _format_options(option_values) if option_values else f"{names[0]}, which weft chooses"


def _format_options(options: Mapping[str, object]) -> str:
    return " ".join(f"{name}={format_value(value)}" for name, value in options.items())


def _read_config(path: Path) -> dict[str, object]:
    config = read_json(path, f"--deepspeed {path}", ConfigError)
    if not isinstance(config, dict):
        raise ConfigError(
            f"--deepspeed {path}: must contain a JSON object, but contains {type(config).__name__}"
        )
    return config
