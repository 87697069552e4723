"""Alternative spellings of options: short names, and names in Hugging Face and older programs.

Each spelling is translated to weft's option, and a note tells the user the name of that option.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, TypeVar

from weft.cli import dialects
from weft.cli.overrides import Override, flatten
from weft.errors import ConfigError
from weft.experiments.common import MFCOptions, RunConfig
from weft.options import iterate_options, to_plain
from weft.planner.placement import HEURISTIC, is_plan_path
from weft.planner.plan_file import read_plan
from weft.topology import Layout

# Spelling -> option. {first} is the main role, {model} every trained role, {gen} the group of
# sampling options. Spellings for a single algorithm (`beta`, `num_generations`) are in `spellings`
# of its configuration class. The dialect `spellings` has more spellings of other programs.
RENAMED = {
    "model_name_or_path": "{first}.path",
    "trust_remote_code": "{first}.trust_remote_code",
    "dtype": "{model}.dtype",
    "zero_stage": "{model}.zero_stage",
    "gradient_checkpointing": "{model}.gradient_checkpointing",
    "sequence_parallel": "{model}.sequence_parallel",
    "learning_rate": "{model}.optimizer.lr",
    "weight_decay": "{model}.optimizer.weight_decay",
    "max_grad_norm": "{model}.optimizer.max_grad_norm",
    "lr_scheduler_type": "{model}.optimizer.lr_scheduler_type",
    "num_train_epochs": "total_train_epochs",
    "max_length": "dataset.max_seqlen",
    "max_seqlen": "dataset.max_seqlen",
    "valid_max_seqlen": "dataset.valid_max_seqlen",
    "max_prompt_len": "dataset.max_prompt_len",
    "train_bs_n_seqs": "dataset.train_bs_n_seqs",
    "valid_bs_n_seqs": "dataset.valid_bs_n_seqs",
    "train_tokens_per_batch": "dataset.train_tokens_per_batch",
    "valid_tokens_per_batch": "dataset.valid_tokens_per_batch",
    "remove_truncated_samples": "dataset.remove_truncated_samples",
    "temperature": "{gen}.temperature",
    "top_p": "{gen}.top_p",
    "top_k": "{gen}.top_k",
    "min_p": "{gen}.min_p",
    "save_freq": "save_freq_steps",
    "eval_freq": "eval_freq_epochs",
}
# Options that only model function calls have. `args` is left out: `reward.args` belongs to the
# option `reward` of a run.
CALL_OPTIONS = tuple(spec.name for spec in fields(MFCOptions) if spec.name != "args")
MAX_SHOWN_SPELLINGS = 2  # maximum number of spellings per option in help pages
# spelling whose option depends on its value -> the usual option
VALUE_DEPENDENT_SPELLINGS = {
    "per_device_train_batch_size": "dataset.train_bs_n_seqs",
    "resume_from_checkpoint": "resume_from",
}
BATCH_SPELLINGS = ("per_device_train_batch_size", "gradient_accumulation_steps")
Value = TypeVar("Value")
LAYOUT_PATTERN = re.compile(r"([a-z]\d+)+")


@dataclass
class OverrideTranslation:
    """Translation of the user's option assignments, which may use alternative option names.

    `overrides` are the resulting assignments to weft's own options. `notes` tell the user how each
    alternative name was read.
    """

    config: RunConfig
    known_options: frozenset[str]
    overrides: list[Override] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    user_spellings: dict[str, str] = field(default_factory=dict)  # option -> how the user wrote it
    # spelling -> rank of the assignment, which is the position of its config section; 0 if missing
    ranks: Mapping[str, int] = field(default_factory=dict)

    def add_assignment(self, target: str, override: Override, value: Any) -> None:
        """Assign `value` to the option `target`, which the user wrote as `override.name`.

        If several spellings set the same option, the one with the highest rank is used. Raises
        `ConfigError` if two spellings with the same rank set the option.
        """
        previous = self.user_spellings.setdefault(target, override.name)
        if previous != override.name:
            older = self.ranks.get(previous, 0)
            newer = self.ranks.get(override.name, 0)
            if older == newer:
                raise ConfigError(
                    f"{previous} and {override.name} are the same option, {target}; set one of them"
                )
            if older > newer:
                return
            self.user_spellings[target] = override.name
            self.overrides = [each for each in self.overrides if each.name != target]
        self.overrides.append(replace(override, name=target, value=value))

    def add_assignments(self, targets: Sequence[str], override: Override, value: Any) -> None:
        """Assign `value` to each option in `targets`, and add a note that lists these options."""
        for target in targets:
            self.add_assignment(target, override, value)
        assignments = [
            target if value is override.value else f"{target}={value}" for target in targets
        ]
        self.notes.append(f"{override.name} is read as {' and '.join(assignments)}")

    @property
    def trained_roles(self) -> tuple[str, ...]:
        return self.config.trained_roles or (self.config.main_role,)


# Function that translates one spelling; its last argument maps all names that the user has set to
# their values.
ValueTranslator = Callable[[OverrideTranslation, Override, dict[str, Any]], None]


@cache
def collect_renamed() -> Mapping[str, str]:
    """Return `RENAMED` and the spellings of other programs, in the order of docs/options.md."""
    return _merge_tables(RENAMED, _read_foreign("RENAMED"))


@cache
def collect_translators() -> Mapping[str, ValueTranslator]:
    """Return `VALUE_TRANSLATORS` and the translators for spellings of other programs."""
    return _merge_tables(VALUE_TRANSLATORS, _read_foreign("VALUE_TRANSLATORS"))


def _read_foreign(table: str) -> Mapping[str, Any]:
    """Return a table of the dialect `spellings`, or an empty table if it is not installed."""
    foreign = dialects.find("spellings")
    return {} if foreign is None else vars(foreign)[table]


def _merge_tables(
    table: Mapping[str, Value], insertions: Mapping[str, Mapping[str, Value]]
) -> dict[str, Value]:
    """Return `table` with the entries of `insertions[name]` inserted after each entry `name`."""
    merged: dict[str, Value] = {}
    for name, value in table.items():
        merged[name] = value
        merged |= insertions.get(name, {})
    return merged


def translate(overrides: Iterable[Override], config: RunConfig) -> tuple[list[Override], list[str]]:
    """Translate overrides from alternative spellings to weft's option names.

    Returns the translated overrides, and a note for the user about each alternative spelling.
    Unknown names are returned unchanged; `options.read` raises an error for them later.
    """
    translation = build_translation(overrides, config)
    return translation.overrides, translation.notes


def build_translation(
    overrides: Iterable[Override], config: RunConfig, ranks: Mapping[str, int] | None = None
) -> OverrideTranslation:
    """Translate overrides to weft's option names, and record how the user spelled each option.

    `ranks` maps a name, as the user spelled it, to the position of the config section that sets it;
    the command line comes last. Of several spellings of an option, the highest rank is used.
    """
    translation = OverrideTranslation(
        config, frozenset(leaf.name for leaf in iterate_options(config)), ranks=ranks or {}
    )
    split_overrides = [
        part for override in overrides for part in _split_group(override, translation.known_options)
    ]
    foreign = dialects.find("spellings")
    if foreign is not None:
        split_overrides, translation.notes = foreign.translate_real_options(
            split_overrides, config, translation.known_options
        )
    values = {override.name: to_plain(override.value) for override in split_overrides}
    for override in split_overrides:
        _check_node(override.name, config)
        translate_value = collect_translators().get(override.name)
        if translate_value is not None and override.name not in translation.known_options:
            translate_value(translation, override, values)
        elif targets := _find_targets(override.name, translation):
            translation.add_assignments(targets, override, override.value)
        else:
            translation.add_assignment(override.name, override, override.value)
    return translation


def list_spellings(config: RunConfig) -> list[str]:
    """Return all alternative spellings that this configuration accepts."""
    return [*collect_renamed(), *collect_translators(), *config.spellings]


def map_spellings(config: RunConfig) -> dict[str, list[str]]:
    """Return up to `MAX_SHOWN_SPELLINGS` alternative spellings of each option, for help pages.

    Spellings that equal the last part of the option's name are left out, and so are options without
    other spellings.
    """
    translation = OverrideTranslation(
        config, frozenset(leaf.name for leaf in iterate_options(config))
    )
    spellings_by_option: dict[str, list[str]] = {}
    for spelling in (*collect_renamed(), *config.spellings):
        for target in _find_targets(spelling, translation):
            spellings_by_option.setdefault(target, []).append(spelling)
    dependent = {**VALUE_DEPENDENT_SPELLINGS, **_read_foreign("VALUE_DEPENDENT_SPELLINGS")}
    for spelling, option in dependent.items():
        for role in translation.trained_roles:
            target = option.replace("{model}", role)
            if target in translation.known_options:
                spellings = spellings_by_option.setdefault(target, [])
                if spelling not in spellings:
                    spellings.append(spelling)
    listed = {}
    for target, spellings in spellings_by_option.items():
        short_name = target.rsplit(".", 1)[-1]
        others = [spelling for spelling in spellings if spelling != short_name]
        if others:
            listed[target] = others[:MAX_SHOWN_SPELLINGS]
    return listed


def is_spelling(name: str, config: RunConfig) -> bool:
    """Return whether a user can write `name` for an option or a group of options.

    `name` can be weft's own name, an alternative spelling, or a key of an option that is a mapping.
    """
    translation = OverrideTranslation(
        config, frozenset(leaf.name for leaf in iterate_options(config))
    )
    if name in collect_translators() or any(
        option == name or option.startswith(f"{name}.") for option in translation.known_options
    ):
        return True
    is_mapping_key = any(name.startswith(f"{option}.") for option in translation.known_options)
    return is_mapping_key or name.startswith("optimizer.") or bool(_find_targets(name, translation))


def _check_node(name: str, config: RunConfig) -> None:
    """Raise `ConfigError` if the option `name` is for model calls, but its node is a host function.

    Host functions are graph nodes that run plain Python code instead of calling a model.
    """
    node, _, option = name.partition(".")
    if node in config.host_nodes and (option in CALL_OPTIONS or option == "hooks"):
        raise ConfigError(
            f"{name}: {node!r} is a host function; only model calls have "
            f"{', '.join(CALL_OPTIONS)}. Leave it out, or change the node in code: "
            f"experiment.with_mfc({node!r}, args={{..}})"
        )


def _split_group(override: Override, known_options: frozenset[str]) -> Iterable[Override]:
    """Split an override such as `group={a: 1, b: 2}` into `group.a=1` and `group.b=2`.

    `known_options` are the names of weft's options. The override is returned unchanged if its name
    is one of them, if its value is empty, or if its value is not a mapping.
    """
    if (
        isinstance(override.value, Mapping)
        and override.value
        and override.name not in known_options
    ):
        return flatten(override.value, f"{override.name}.")
    return [override]


def _find_targets(name: str, translation: OverrideTranslation) -> list[str]:
    """Return the options for which `name` is an alternative spelling.

    The list is empty if `name` is itself an option or is unknown.
    """
    config = translation.config
    if name in translation.known_options:
        return []
    group, _, short_name = name.rpartition(".")
    if short_name in config.spellings and group in ("", config.algorithm):
        return [config.spellings[short_name]]
    if f"{group}.gen.{short_name}" in translation.known_options:
        return [f"{group}.gen.{short_name}"]
    for spelling, option in _read_foreign("MODEL_SPELLINGS").items():
        target = name.removesuffix(spelling) + option
        if name.endswith(f".{spelling}") and target in translation.known_options:
            return [target]
    if name.startswith("optimizer."):
        return [_map_to_trained_role(config, name)]
    target = collect_renamed().get(name, "")
    if "{model}" in target:
        return [target.replace("{model}", role) for role in translation.trained_roles]
    option = target.replace("{first}", config.main_role).replace("{gen}", config.generation)
    return [option] if option in translation.known_options else []


def _map_to_trained_role(config: RunConfig, option: str) -> str:
    """Return the full option name, such as `actor.optimizer.lr`, for `optimizer.lr`.

    The role is the only trained role. Raises `ConfigError` if several roles are trained, or none.
    """
    if len(config.trained_roles) == 1:
        return f"{config.trained_roles[0]}.{option}"
    if not config.trained_roles:
        raise ConfigError(f"{option}: no role is trained here; leave it out")
    choices = " or ".join(f"{role}.{option}" for role in config.trained_roles)
    raise ConfigError(f"{option}: several roles are trained; write {choices}")


# -- spellings that depend on their value


def _translate_batch(
    translation: OverrideTranslation, override: Override, values: dict[str, Any]
) -> None:
    """Set `dataset.train_bs_n_seqs`, the global batch size, from the batch size per device.

    The global batch size is the batch size per device times the accumulation steps times the number
    of data-parallel ranks. The batch size per device must be set.
    """
    if BATCH_SPELLINGS[0] not in values:
        raise ConfigError(
            f"{BATCH_SPELLINGS[1]}: multiplies {BATCH_SPELLINGS[0]}, which is not set; write "
            f"dataset.train_bs_n_seqs=N instead"
        )
    if override.name == BATCH_SPELLINGS[1]:
        return  # included when per_device_train_batch_size is translated
    product = 1
    for name, factor in (
        *((spelling, values.get(spelling, 1)) for spelling in BATCH_SPELLINGS),
        ("data_parallel_size", count_data_ranks(translation, values)),
    ):
        if not isinstance(factor, int) or isinstance(factor, bool) or factor < 1:
            raise ConfigError(f"{name}={factor!r}: must be a whole number, at least 1")
        product *= factor
    translation.add_assignment("dataset.train_bs_n_seqs", override, product)
    translation.notes.append(
        f"{BATCH_SPELLINGS[0]} x {BATCH_SPELLINGS[1]} x data-parallel ranks is read as "
        f"dataset.train_bs_n_seqs={product}"
    )


def count_data_ranks(translation: OverrideTranslation, values: dict[str, Any]) -> Any:
    """Return the data-parallel degree that the first trained role uses in training.

    `values` maps the options that the user set to their values. The degree is taken from the first
    of these options that contains a layout: the training call's `layout`, the role's `layout`, and
    `allocation_mode`. With the value "heuristic", every device is a data-parallel rank. A plan file
    has the layout of the training call. If no option contains a layout, the role's
    `data_parallel_size` is returned, which is 1 by default. The values are not checked.
    """
    role = translation.trained_roles[0]
    call = next(
        (
            name
            for name in (f"{role}_train", "train")
            if f"{name}.layout" in translation.known_options
        ),
        role,
    )
    for name in (f"{call}.layout", f"{role}.layout", "allocation_mode"):
        layout = values.get(name)
        if isinstance(layout, str) and LAYOUT_PATTERN.fullmatch(layout):
            return Layout.parse(layout).data
        if isinstance(layout, str) and name == "allocation_mode" and is_plan_path(layout):
            planned = read_plan(layout, name).calls.get(call)
            if planned is not None:
                return Layout.parse(planned.layout).data
        if layout == HEURISTIC:
            return values.get("n_nodes", 1) * values.get("n_gpus_per_node", 1)
    return values.get(f"{role}.parallel.data_parallel_size", 1)


def _translate_warmup(
    translation: OverrideTranslation, override: Override, values: dict[str, Any]
) -> None:
    """Set `warmup_steps` in the optimizer options of every trained role.

    A fraction such as 0.1 sets `warmup_steps_proportion` instead.
    """
    value = values[override.name]
    is_proportion = isinstance(value, float) and 0 < value < 1
    name = "warmup_steps_proportion" if is_proportion else "warmup_steps"
    translation.add_assignments(
        [f"{role}.optimizer.{name}" for role in translation.trained_roles], override, override.value
    )


def _translate_resume(
    translation: OverrideTranslation, override: Override, values: dict[str, Any]
) -> None:
    """Set `recover_mode=resume` if the value is true or "latest", or `resume_from` if it is a path.

    A flag that is given without a value counts as true.
    """
    value = values[override.name]
    if value in (True, "latest", "true"):
        translation.add_assignments(["recover_mode"], override, "resume")
    elif isinstance(value, str):
        translation.add_assignments(["resume_from"], override, value)
    elif value:
        raise ConfigError(f"{override.name}={value!r}: must be true, latest or a path")


VALUE_TRANSLATORS: dict[str, ValueTranslator] = {
    "per_device_train_batch_size": _translate_batch,
    "gradient_accumulation_steps": _translate_batch,
    "warmup_steps": _translate_warmup,
    "resume_from_checkpoint": _translate_resume,
}
