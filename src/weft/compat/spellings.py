"""Option names of other programs, beyond those of `weft.cli.aliases`.

The first part has spellings of Hugging Face's Trainer, TRL and others. The second part translates
ReaL's option names: `exp_ctrl.*`, `{model}.type._class`, `{call}.parallel.*`, and devices given by
node name. `translate_real_options` runs before the other spellings are translated. It renames only
options that do not exist in weft, and adds a note for each. An option that exists in both programs
keeps its meaning in weft.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.cli.aliases import OverrideTranslation, ValueTranslator
from weft.cli.overrides import Override
from weft.errors import ConfigError
from weft.experiments.common import RunConfig
from weft.options import to_plain

# Spelling -> option, with the placeholders of `weft.cli.aliases.RENAMED`. Each outer key of this
# table and of `VALUE_TRANSLATORS` is a spelling in that module, after which docs/options.md lists
# the entries.
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
        "eval_on_start": "eval_at_start",
    },
    "eval_freq": {"rng_seed": "seed", "benchmark_steps": "max_steps"},
}
MODEL_SPELLINGS = {"parallel.use_sequence_parallel": "sequence_parallel"}  # names after `MODEL.`
# spellings whose option depends on their value -> the most common option
VALUE_DEPENDENT_SPELLINGS = {
    "bf16": "{model}.dtype",
    "use_cpu": "device",
    "use_peft": "{model}.lora.r",
    "save_strategy": "save_freq_epochs",
    "eval_strategy": "eval_freq_epochs",
    "report_to": "logger.wandb.mode",
    "metric_for_best_model": "save_best",
    "greater_is_better": "save_best_mode",
}
DEFAULT_STEP_INTERVAL = 500  # Hugging Face's default interval, in steps, of the strategy "steps"
LORA_RANK = 16  # default LoRA rank of TRL's use_peft


def _translate_half_precision(
    translation: OverrideTranslation, override: Override, values: dict[str, Any]
) -> None:
    """Set the dtype of all trained roles to bfloat16 for bf16=true, or to float16 for fp16=true."""
    if _read_bool(override, values):
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[override.name]
        translation.add_assignments(
            [f"{role}.dtype" for role in translation.trained_roles], override, dtype
        )


def _translate_use_cpu(
    translation: OverrideTranslation, override: Override, values: dict[str, Any]
) -> None:
    """Set `device=cpu` for use_cpu=true."""
    if _read_bool(override, values):
        translation.add_assignments(["device"], override, "cpu")


def _translate_use_peft(
    translation: OverrideTranslation, override: Override, values: dict[str, Any]
) -> None:
    """Set the LoRA rank of all trained roles to 16, TRL's default, if `use_peft` is true.

    Does nothing if the user also sets `lora_r` (another rank) or `num_virtual_tokens` (prefix
    tuning).
    """
    if _read_bool(override, values) and not {"lora_r", "num_virtual_tokens"} & values.keys():
        translation.add_assignments(
            [f"{role}.lora.r" for role in translation.trained_roles], override, LORA_RANK
        )


def _translate_strategy(
    translation: OverrideTranslation, override: Override, values: dict[str, Any]
) -> None:
    """Translate Hugging Face's save_strategy or eval_strategy to weft's options.

    For save_strategy, the value "steps" sets `save_freq_steps` to 500, Hugging Face's default,
    unless the user sets the interval. The value "epoch" sets `save_freq_epochs` to 1, and "no" sets
    nothing. For eval_strategy, `eval_freq_steps` and `eval_freq_epochs` are set in the same way.
    """
    kind = override.name.split("_")[0].replace("evaluation", "eval")
    value = values[override.name]
    if value not in ("no", "steps", "epoch"):
        raise ConfigError(f"{override.name}={value!r}: must be no, steps or epoch")
    if value == "epoch":
        translation.add_assignments([f"{kind}_freq_epochs"], override, 1)
    elif value == "steps" and not {f"{kind}_steps", f"{kind}_freq_steps"} & values.keys():
        translation.add_assignments([f"{kind}_freq_steps"], override, DEFAULT_STEP_INTERVAL)


def _translate_best_metric(
    translation: OverrideTranslation, override: Override, values: dict[str, Any]
) -> None:
    """Set `save_best` to `eval/NAME`, where the value is Hugging Face's NAME or eval_NAME."""
    name = str(values[override.name]).removeprefix("eval_").removeprefix("eval/")
    translation.add_assignments(["save_best"], override, f"eval/{name}")


def _translate_greater_is_better(
    translation: OverrideTranslation, override: Override, values: dict[str, Any]
) -> None:
    """Set `save_best_mode` to max or min."""
    mode = "max" if _read_bool(override, values) else "min"
    translation.add_assignments(["save_best_mode"], override, mode)


def _translate_report_to(
    translation: OverrideTranslation, override: Override, values: dict[str, Any]
) -> None:
    """Enable each logger that the value names, by setting the logger's option.

    The options are `logger.tensorboard=true`, `logger.wandb.mode=online` and
    `logger.trackio.project`. The value "none" enables no logger.
    """
    value = values[override.name]
    for name in value if isinstance(value, list) else [value]:
        settings = {
            "tensorboard": ("logger.tensorboard", True),
            "wandb": ("logger.wandb.mode", "online"),
            "trackio": ("logger.trackio.project", values.get("experiment_name")),
        }
        if name in settings:
            translation.add_assignments([settings[name][0]], override, settings[name][1])
        elif name != "none":
            raise ConfigError(f"report_to={name!r}: must be none, tensorboard, wandb or trackio")


def _read_bool(override: Override, values: dict[str, Any]) -> bool:
    value = values[override.name]
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
        "metric_for_best_model": _translate_best_metric,
        "greater_is_better": _translate_greater_is_better,
    },
}


# -- ReaL


GPUS_PER_NODE = 8  # ReaL's default of n_gpus_per_node
DEGREES = {"data_parallel_size": "d", "model_parallel_size": "t", "pipeline_parallel_size": "p"}
DEGREE_PATTERN = re.compile(rf"(?P<call>\w+)\.parallel\.(?P<degree>{'|'.join(DEGREES)})")
SEQUENCE_PARALLEL_PATTERN = re.compile(r"(?P<call>\w+)\.parallel\.use_sequence_parallel")
TYPE_PATTERN = re.compile(r"(?P<role>\w+)\.type\.(?P<part>_class|is_critic|size)")
HALF_PRECISION_PATTERN = re.compile(r"(?P<role>\w+)\.enable_(?P<kind>bf16|fp16)")
SPANS = r"\d{1,6}(?:-\d{1,6})?(?:,\d{1,6}(?:-\d{1,6})?)*"
NODE_PATTERN = re.compile(
    rf"(?P<name>[A-Za-z][\w.-]*?)(?:\[(?P<numbers>{SPANS})\])?(?::(?P<devices>{SPANS}))?"
)

REAL_RENAMED = {
    "partition": "slurm.partition",
    "image_name": "slurm.container",
    "wandb_mode": "logger.wandb.mode",
    "dataset.max_pairs_per_prompt": "dataset.args.max_pairs_per_prompt",
}
# Options that have no effect in weft, by last or full name -> reason.
IGNORED_OPTIONS = {
    "use_cuda_graph": "weft decides when a GPU replays captured graphs",
    "force_cudagraph_recapture": "weft decides when a GPU replays captured graphs",
    "force_no_logits_mask": (
        "weft computes log-probs under the distribution that tokens were sampled from, without "
        "a mask"
    ),
    "pad_to_max_length": "weft never pads",
    "n_mbs": "weft counts micro-batches in tokens; set max_tokens_per_microbatch to change it",
    "debug": "weft always checks",
    "ignore_worker_error": (
        "weft replaces processes that die and continues from the last recovery point"
    ),
    "recover_retries": "weft restarts as long as the run makes progress",
    "cache_clear_freq": "weft has no cache to clear",
    "allocation_use_cache": "weft searches every time, which takes seconds",
}
ALLOCATIONS = {"pipe_model": "heuristic", "pipe_data": "heuristic"}


@dataclass
class _ReaLTranslation:
    """Translator of a command line from ReaL's option names to weft's.

    `known` has the options of the configuration, and `values` the values of the command line by
    option. `layouts` maps each model call to the parallel degrees that the command line sets for
    it, from which the call's layout is built.
    """

    config: RunConfig
    known: frozenset[str]
    values: Mapping[str, Any]
    translated: list[Override] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    layouts: dict[str, dict[str, int]] = field(default_factory=dict)  # call -> degree -> size

    def add_renamed(self, override: Override, name: str, value: Any) -> None:
        """Store an assignment of `value` to weft's option `name`, and add a note for the user."""
        assignment = name if value is override.value else f"{name}={value}"
        self.notes.append(f"{override.name} is read as {assignment}")
        self.translated.append(replace(override, name=name, value=value))

    def note_ignored(self, override: Override, reason: str) -> None:
        self.notes.append(f"{override.name} is left out: {reason}")

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes in `nodelist`, in order, or an empty list if `nodelist` is not set."""
        return _expand_node_names(str(self.values.get("nodelist") or ""))


def translate_real_options(
    overrides: Iterable[Override], config: RunConfig, known: frozenset[str]
) -> tuple[list[Override], list[str]]:
    """Return the assignments with ReaL's names replaced, and a note for each replacement.

    `known` has the names of weft's options for this configuration. Raises `ConfigError` for values
    that cannot be translated.
    """
    overrides = list(overrides)
    translation = _ReaLTranslation(
        config, known, {each.name: to_plain(each.value) for each in overrides}
    )
    for override in overrides:
        _translate_option(translation, override)
    for call, sizes in translation.layouts.items():
        degrees = [f"{degree}{sizes[degree]}" for degree in "dtp" if sizes.get(degree, 1) > 1]
        layout = "".join(degrees) or "d1"
        translation.notes.append(f"{call}.parallel.* is read as {call}.layout={layout}")
        translation.translated.append(Override(f"{call}.layout", layout))
    return translation.translated, translation.notes


def _translate_option(translation: _ReaLTranslation, override: Override) -> None:
    name = _strip_group(translation, override.name)
    if name != override.name:
        translation.notes.append(f"{override.name} is read as {name}")
        override = replace(override, name=name)
    last = name.rpartition(".")[2]
    if name in translation.known:
        _change_value(translation, override, last)
    elif match := TYPE_PATTERN.fullmatch(name):
        _read_type(translation, override, match["role"], match["part"])
    elif match := DEGREE_PATTERN.fullmatch(name):
        _collect_degree(translation, override, match["call"], DEGREES[match["degree"]])
    elif (
        match := SEQUENCE_PARALLEL_PATTERN.fullmatch(name)
    ) and f"{match['call']}.layout" in translation.known:
        _read_sequence_parallel(translation, override, match["call"])
    elif match := HALF_PRECISION_PATTERN.fullmatch(name):
        _read_half(translation, override, match["role"], match["kind"])
    elif name == "nodelist":
        _read_nodes(translation, override)
    elif any(name.startswith(f"{option}.") for option in translation.known):
        translation.translated.append(override)  # an entry of a mapping with user-defined keys
    elif name in REAL_RENAMED:
        translation.add_renamed(override, REAL_RENAMED[name], override.value)
    elif last == "init_critic_from_actor":
        translation.add_renamed(
            override, "ppo.critic_init", "actor" if to_plain(override.value) else None
        )
    elif last in IGNORED_OPTIONS:
        translation.note_ignored(override, IGNORED_OPTIONS[last])
    else:
        translation.translated.append(override)


def _strip_group(translation: _ReaLTranslation, name: str) -> str:
    """Return an option's name without ReaL's prefix `exp_ctrl.`.

    The prefix `allocation.` is replaced by the name of the main role.
    """
    if name.startswith("exp_ctrl."):
        return name.removeprefix("exp_ctrl.")
    if name.startswith("allocation."):
        return f"{translation.config.main_role}.{name.removeprefix('allocation.')}"
    return name


def _change_value(translation: _ReaLTranslation, override: Override, last: str) -> None:
    """Translate the value of an option whose name is the same in ReaL and in weft.

    `last` is the last part of the name. Values that weft also accepts are not changed.
    """
    value = to_plain(override.value)
    if override.name.endswith("optimizer.type") and value == "adam":
        translation.add_renamed(override, override.name, "adamw")
    elif override.name == "allocation_mode" and value in ALLOCATIONS:
        translation.add_renamed(override, override.name, ALLOCATIONS[value])
    elif override.name == "recover_mode" and value == "save":
        translation.add_renamed(override, override.name, "auto")
    elif last == "device_mesh" and isinstance(value, str) and NODE_PATTERN.match(value):
        translation.add_renamed(
            override, override.name, _convert_devices(translation, override.name, value)
        )
    else:
        translation.translated.append(override)


def _read_type(translation: _ReaLTranslation, override: Override, role: str, part: str) -> None:
    """Translate an option `ROLE.type.*`; `part` is the last part of its name.

    `_class` becomes weft's option `ROLE.type`. `size` and `is_critic` are dropped with a note.
    Raises `ConfigError` if `is_critic` contradicts the role.
    """
    if part == "_class":
        translation.add_renamed(override, f"{role}.type", override.value)
        return
    if part == "size":
        translation.note_ignored(override, "weft reads sizes from config.json")
        return
    is_critic = role in ("critic", "rew") or translation.config.algorithm == "rw"
    if to_plain(override.value) is not is_critic:
        if is_critic:
            kind = "gives each sequence or token one value"
        else:
            kind = "is a language model"
        raise ConfigError(
            f"{override.name}={to_plain(override.value)!r}: {role!r} {kind} in this experiment; "
            f"leave the option out"
        )
    translation.note_ignored(override, "the role says it")


def _collect_degree(
    translation: _ReaLTranslation, override: Override, call: str, degree: str
) -> None:
    """Store one of ReaL's parallel degrees, such as `data_parallel_size`, for the layout of `call`.

    If weft has no option `layout` for `call`, or if the user also sets that option, the assignment
    is left untranslated. Raises `ConfigError` for an invalid size.
    """
    if f"{call}.layout" not in translation.known or f"{call}.layout" in translation.values:
        translation.translated.append(override)
        return
    size = to_plain(override.value)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"{override.name}={size!r}: must be a whole number, at least 1")
    translation.layouts.setdefault(call, {})[degree] = size


def _read_sequence_parallel(translation: _ReaLTranslation, override: Override, call: str) -> None:
    """Translate a call's `use_sequence_parallel` to the option `sequence_parallel` of its model.

    The value true is dropped with a note, because it is weft's default.
    """
    role = call.partition("_")[0]
    if f"{role}.path" not in translation.known:
        role = translation.config.main_role
    target = f"{role}.sequence_parallel"
    if to_plain(override.value) is True:
        translation.note_ignored(override, f"{target} is true by default")
    elif not any(each.name == target for each in translation.translated):
        translation.add_renamed(override, target, override.value)


def _read_half(translation: _ReaLTranslation, override: Override, role: str, kind: str) -> None:
    if to_plain(override.value) is True:
        translation.add_renamed(
            override, f"{role}.dtype", {"bf16": "bfloat16", "fp16": "float16"}[kind]
        )
    else:
        translation.note_ignored(override, f"{role}.dtype says it")


def _read_nodes(translation: _ReaLTranslation, override: Override) -> None:
    """Translate `nodelist` to `slurm.nodelist` if the run has `mode=slurm`.

    In other modes, `nodelist` only determines how the devices in `device_mesh` are numbered.
    """
    _expand_node_names(str(to_plain(override.value)))  # raises if `nodelist` is not a list of nodes
    if translation.values.get("mode") == "slurm":
        translation.add_renamed(override, "slurm.nodelist", override.value)
    else:
        translation.note_ignored(
            override, "without mode=slurm its names only number the devices of device_mesh"
        )


def _convert_devices(translation: _ReaLTranslation, name: str, text: str) -> str:
    """Convert devices such as `NODE01:0,1` to device indices, separated by commas.

    The devices are numbered consecutively across the nodes in `nodelist`. A node name without
    device numbers means all devices of the node. Raises `ConfigError` for a node that is not in
    `nodelist` and for a device that the node does not have.
    """
    size = translation.values.get("n_gpus_per_node")
    if not isinstance(size, int) or size < 1:  # missing, or rejected by its own check
        size = GPUS_PER_NODE
    devices: list[int] = []
    match = NODE_PATTERN.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{name}={text!r}: must be devices such as 0-7, or ReaL's NODE01:0,1 or NODE[01-02]"
        )
    for node in _expand_node_names(text.partition(":")[0]):
        number = _find_node_index(translation, name, node)
        indices = _expand_ranges(match["devices"]) if match["devices"] else range(size)
        missing = [device for device in indices if device >= size]
        if missing:
            raise ConfigError(
                f"{name}={text!r}: a node has {size} devices, numbered from 0, so there is no "
                f"{missing[0]}; set n_gpus_per_node"
            )
        for device in indices:
            devices.append(number * size + device)
    return ",".join(map(str, sorted(devices)))


def _find_node_index(translation: _ReaLTranslation, name: str, node: str) -> int:
    """Return the index of `node` in `nodelist`.

    In a single-node run without `nodelist`, the index is 0. Raises `ConfigError` for an unknown
    node.
    """
    if node in translation.nodes:
        return translation.nodes.index(node)
    if not translation.nodes and translation.values.get("n_nodes", 1) == 1:
        return 0
    if translation.nodes:
        listed = f"nodelist has {', '.join(translation.nodes)}"
    else:
        listed = "nodelist is not set"
    raise ConfigError(
        f"{name}: there is no node {node!r}; {listed}. Write the devices' numbers, such as 8-15"
    )


def _expand_node_names(text: str) -> list[str]:
    """Expand node names in Slurm's notation: `n[01-03],m1` becomes n01, n02, n03 and m1."""
    names = []
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?", text):
        match = NODE_PATTERN.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"nodelist={text!r}: must be names of nodes such as NODE01 or NODE[01-02]"
            )
        if match["numbers"] is None:
            names.append(match["name"])
            continue
        for span in match["numbers"].split(","):
            first, _, last = span.partition("-")
            numbers: Sequence[int] = range(int(first), int(last or first) + 1)
            for number in numbers:
                names.append(f"{match['name']}{number:0{len(first)}}")
    return names


def _expand_ranges(text: str) -> list[int]:
    """Expand ranges of numbers: `0,2-3` becomes 0, 2 and 3."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
