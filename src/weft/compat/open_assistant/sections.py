"""Open-Assistant's keys in config sections, on the command line, and in lists of datasets.

The counterpart of `weft.cli.stack`, `weft.cli.sections` and `weft.cli.stacked_data`, which know
only weft's options and use this module if it is installed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from weft.cli.aliases import is_spelling
from weft.cli.overrides import Override, flatten
from weft.cli.sections import ConfigSection, SectionLibrary
from weft.cli.stack import COMMAND_LINE, ForeignOption, ForeignOptions, OptionReader, StackedValue
from weft.compat.open_assistant.key_mapping import (
    IMPLIED,
    PARAMETERS,
    RL,
    RM,
    SHARES,
    TRLX_PREFIX,
    InvalidDatasetEntry,
    KeyMapping,
    convert_entries,
)
from weft.compat.open_assistant.keys import KEYS, TRLX, map_keys
from weft.data.spec import SourceSpec
from weft.errors import ConfigError, find_nearest
from weft.options import coerce, iterate_options, to_plain

# Folder of the shipped sections, which are those of Open-Assistant.
RECIPES = Path(__file__).parents[1] / "recipes"
PPO_CONFIG = "ppo_config"  # section that Open-Assistant's RL trainer always reads
# top-level groups in files of trlX's configuration
TRLX_GROUPS = ("train", "model", "tokenizer", "optimizer", "scheduler", "method")
# sections that together make a run, for examples in help texts: settings, data, model
EXAMPLE_SECTIONS = ("defaults", "oasst_export_eu", "pythia-1b")
# keys that decide what data are read
DATA_KEYS = ("datasets", "datasets_extra", "eval_size", "num_eval_prompts", "num_train_epochs")


def is_trlx_file(values: Mapping[str, Any]) -> bool:
    """Return whether the top-level keys of a YAML file are those of a trlX configuration."""
    return set(values) <= set(TRLX_GROUPS) and "method" in values


class OpenAssistantReader:
    """Reader that collects Open-Assistant's keys, and passes weft's options to the reader `own`."""

    def __init__(self, own: OptionReader) -> None:
        self.own = own
        self.mode = KeyMapping(own.base, {}, {}).mode
        self.values: dict[str, StackedValue] = {}
        # keys of a group that the command line sets individually, by full name
        self.group_values: dict[str, StackedValue] = {}
        # names that may be suggested for an unknown one
        self.names = list(KEYS)
        for key in TRLX:
            if self.mode == RL and key.startswith(TRLX_PREFIX):
                self.names.append(key.removeprefix(TRLX_PREFIX))

    def choose_sections(self, names: Sequence[str], library: SectionLibrary) -> list[ConfigSection]:
        """Return the sections, with those that Open-Assistant's RL trainer always reads."""
        sections = self.own.choose_sections(names, library)
        reads_rl = any(
            key in section.values
            for section in sections
            for key in ("num_rollouts", "sft_config", "rank_config")
        )
        if self.mode == RL and reads_rl and not any(section.foreign for section in sections):
            sections.insert(0, library.get(PPO_CONFIG))
        return sections

    def read_section(self, section: ConfigSection, rank: int) -> None:
        """Add the keys of a section; `rank` is its priority."""
        for key, value in section.values.items():
            if section.foreign:
                for each in flatten({key: value}):
                    place = section.find_location(*each.name.split("."))
                    stacked = StackedValue(each.value, place, section.name, rank, source=section)
                    self._set_value(f"{TRLX_PREFIX}{each.name}", stacked)
            elif key in KEYS:
                place = section.find_location(key)
                self._set_value(key, StackedValue(value, place, section.name, rank, source=section))
            else:
                self.own.read_key(section, key, value, rank, self.names)

    def read_override(self, override: Override, rank: int) -> None:
        """Add an assignment from the command line.

        `rank` is its priority, which is above that of all sections. Raises `ConfigError` for an
        unknown key.
        """
        if isinstance(override.value, Mapping) and any(
            key.startswith(f"{TRLX_PREFIX}{override.name}.") for key in TRLX
        ):
            for each in flatten(override.value, f"{override.name}."):
                self.read_override(each, rank)
            return
        name = self._resolve_trlx_key(override.name)
        stacked = StackedValue(override.value, COMMAND_LINE, "", rank, override.removed)
        group, _, inner = name.partition(".")
        if override.removed:  # `~key` removes it and all keys below it
            for key in list(self.values):
                if key == name or key.startswith(f"{name}."):
                    del self.values[key]
            if name in KEYS or name in TRLX:
                self.own.remove(name)
            else:
                self.own.read_override(override, rank)
        elif self._is_key(name):
            value = to_plain(coerce(override.value, Any, name))
            self._set_value(name, replace(stacked, value=value))
        elif inner and group in ("datasets", "datasets_extra"):  # a parameter of an entry
            self._set_entry_parameter(group, inner, override)
        elif inner and self._is_key(group):  # a key in one of the groups
            before = self.values.get(group, StackedValue({}, COMMAND_LINE, "", rank))
            group_value = dict(before.value) if isinstance(before.value, Mapping) else {}
            group_value[inner] = to_plain(override.value)
            self.values[group] = replace(before, value=group_value)
            self.group_values[name] = stacked
        elif name in KEYS and not is_spelling(name, self.own.base):  # another trainer's key
            raise ConfigError(
                f"{name}: weft quickstart {self.own.base.algorithm or 'here'} does not read it; "
                f"{KEYS[name].description}"
            )
        else:
            self.own.read_override(override, rank, self.names)

    def map_foreign_keys(self) -> ForeignOptions:
        """Map the collected keys to weft's options.

        Raises a `ConfigError` that lists every invalid value with the place where it is set.
        """
        values = {}
        ranks = {}
        for name, each in self.values.items():
            if each.value is not None:
                values[name] = each.value
                ranks[name] = each.rank
        for name, each in self.group_values.items():
            ranks[name] = each.rank
        own_options = {}
        for name, each in self.own.values.items():
            if not each.removed:
                own_options[name] = to_plain(each.value)
        mapped = map_keys(KeyMapping(self.own.base, values, ranks, own_options))
        if mapped.rejections:
            raise ConfigError(
                "\n".join(
                    self._format_rejection(key, message)
                    for key, message in dict.fromkeys(mapped.rejections)
                )
            )
        options = {}
        for name, option in mapped.options.items():
            origin = self._find_origin(option.key)
            options[name] = ForeignOption(
                StackedValue(option.value, origin.place, origin.section, origin.rank),
                option.key,
                option.key.removeprefix(TRLX_PREFIX),
            )
        notes = []
        for note, keys in mapped.notes.items():
            notes.append(f"{', '.join(key.removeprefix(TRLX_PREFIX) for key in keys)}: {note}")
        file = self.values.get("deepspeed_config")
        return ForeignOptions(options, notes, None if file is None else to_plain(file.value))

    def _set_entry_parameter(self, key: str, inner: str, override: Override) -> None:
        """Apply `override`, which has the form `datasets.NAME.PARAMETER=value`.

        The parameter is set in all entries called NAME in the list of datasets. `key` is the key of
        this list, "datasets" or "datasets_extra", and `inner` is `NAME.PARAMETER`. Raises
        `ConfigError` if there is no such entry.
        """
        name, _, parameter = inner.partition(".")
        before = self.values.get(key)
        entries = list(before.value or ()) if before is not None else []
        named = [entry if isinstance(entry, str) else next(iter(entry), "") for entry in entries]
        if before is None or name not in named or not parameter:
            close = find_nearest(name, named)
            if close:
                hint = f"did you mean {key}.{close[0]}?"
            else:
                hint = f"{key} has {', '.join(named) or 'no entries'}"
            raise ConfigError(
                f"{override.name}: no entry {name!r}; {hint}; write {key}.NAME.PARAMETER=value"
            )
        changed = []
        for each, entry in zip(named, entries, strict=True):
            if each != name:
                changed.append(entry)
                continue
            parameters = entry.get(name) or {} if isinstance(entry, Mapping) else {}
            changed.append({name: _set_parameter(parameters, parameter, to_plain(override.value))})
        self.values[key] = replace(before, value=changed)

    def _find_origin(self, key: str) -> StackedValue:
        """Return a `StackedValue` whose `place` says where an Open-Assistant key is set.

        The place is the command line if the key itself or its whole group is set there. Otherwise,
        it is the key's line in a section or, for a key that is not set, `IMPLIED`.
        """
        origin = self.values.get(key) or self.group_values.get(key)
        group = self.values.get(key.split(".")[0])
        if origin is None and group is not None and group.source is not None:
            return replace(group, place=group.source.find_location(*key.split(".")))
        return origin or group or StackedValue(None, IMPLIED, "", -2)

    def _resolve_trlx_key(self, name: str) -> str:
        """Return the full trlX key that `name` refers to, or `name` itself if it is not a trlX key.

        If the sections have trlX keys, `name` can be the last part of a key. Raises `ConfigError`
        if several keys end with `name`, unless weft has an option of that name.
        """
        if (
            self.mode != RL
            or name in KEYS
            or name in TRLX
            or any(leaf.name == name for leaf in iterate_options(self.own.base))
        ):
            return name
        if f"{TRLX_PREFIX}{name}" in TRLX:
            return f"{TRLX_PREFIX}{name}"
        if not any(key.startswith(TRLX_PREFIX) for key in self.values):
            return name
        matching = [key for key in TRLX if key.endswith(f".{name}")]
        if len(matching) > 1 and not is_spelling(name, self.own.base):
            names = " or ".join(key.removeprefix(TRLX_PREFIX) for key in matching)
            raise ConfigError(f"{name}: write {names}")
        return matching[0] if len(matching) == 1 else name

    def _is_key(self, name: str) -> bool:
        key = KEYS.get(name) or TRLX.get(name)
        return key is not None and self.mode in key.modes

    def _set_value(self, name: str, stacked: StackedValue) -> None:
        """Store the value of a key, or record a problem if there is no such key."""
        if name not in KEYS and name not in TRLX:
            close = find_nearest(name, TRLX)
            if close:
                names = " or ".join(each.removeprefix(TRLX_PREFIX) for each in close)
                hint = f"; did you mean {names}?"
            else:
                hint = ""
            key = name.removeprefix(TRLX_PREFIX)
            self.own.problems.append(
                f"{stacked.place}: section {stacked.section!r}: unknown key {key!r}{hint}"
            )
            return
        self.values[name] = stacked

    def _format_rejection(self, key: str, message: str) -> str:
        """Return an error message with the place where the key is set, if it is known."""
        first = re.split(r"[.\[]", key)[0]
        stacked = self.values.get(key) or self.values.get(first)
        if stacked is None:
            return message
        index = re.search(r"\[(\d+)\]", key)
        inner = key.removeprefix(TRLX_PREFIX).split(".")
        path: list[str | int] = [first, int(index[1])] if index else [*inner]
        place = stacked.source.find_location(*path) if stacked.source else stacked.place
        section = f"section {stacked.section!r}: " if stacked.section else ""
        return f"{place}: {section}{message}"


def _set_parameter(parameters: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return a copy of a dataset entry's parameters with the parameter `name` set.

    The parameters that set the amount of data are mutually exclusive, so setting one of them
    removes the others.
    """
    excluded_names = SHARES if name in SHARES else ()
    return {
        **{key: each for key, each in parameters.items() if key not in excluded_names},
        name: value,
    }


def guess_quickstart(sections: Sequence[ConfigSection]) -> str:
    """Return the name of the quickstart that reads the sections.

    It is ppo or rw if the sections set a key that only this trainer reads, otherwise sft.
    """
    modes = []
    for section in sections:
        for key in section.values:
            if key in KEYS:
                modes.append(KEYS[key].modes)
    if any(section.foreign for section in sections) or (RL,) in modes:
        return "ppo"
    reward = any(section.values.get("is_reward_model") is True for section in sections)
    return "rw" if reward or (RM,) in modes else "sft"


def replace_parameters(source: SourceSpec, parameters: Mapping[str, Any]) -> SourceSpec:
    """Return the source with the given parameters replaced.

    `parameters` can be named as in Open-Assistant or as in weft. Raises `ConfigError` for
    parameters that the source does not accept.
    """
    label = f"datasets.{source.named}"
    try:
        (entry,) = convert_entries([{source.named: parameters}])
    except InvalidDatasetEntry as bad:
        raise ConfigError(f"{label}: {bad}") from bad
    own = {spec.name: getattr(source, spec.name) for spec in fields(source)}
    if any(name in entry for name in SHARES):
        own |= dict.fromkeys(SHARES)
    merged_values = {**own, **entry, "args": {**source.args, **entry.get("args", {})}}
    return SourceSpec.parse(
        {name: value for name, value in merged_values.items() if value not in (None, "", {})}, label
    )


def find_datasets_with_files(parameters_by_name: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return the names of the datasets for which the command line sets a path."""
    result: set[str] = set()
    for name, parameters in parameters_by_name.items():
        if any(PARAMETERS.get(key) == "path" for key in parameters):
            result.add(name)
    return result
