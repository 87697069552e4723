"""Mapping of Open-Assistant's configuration to weft: rules for keys, and lists of datasets.

A `KeyMapping` collects options, notes and error messages. An item of a list of datasets is
`- name`, or `- name:` with the dataset's parameters indented below; it becomes an entry of
`dataset.sources`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.cli.aliases import OverrideTranslation, count_data_ranks
from weft.cli.stack import find_mode
from weft.experiments.common import RunConfig
from weft.options import iterate_options

SFT = "sft"
RM = "rm"
RL = "rl"
IMPLIED = "Open-Assistant's trainer"  # key of settings that its code always applies
TRLX_PREFIX = "trlx."  # prefix of keys of trlX's configuration
NO_OFF_VALUE = object()


@dataclass(frozen=True)
class MappedOption:
    """Value of a weft option, and the Open-Assistant key that sets it."""

    value: Any
    key: str


@dataclass
class KeyMapping:
    """Result of mapping the keys of an Open-Assistant configuration to weft options.

    The configuration is merged from several sections, and later sections override earlier ones.
    `values` maps Open-Assistant's keys to their values, without null values. `ranks` maps each key
    to the position of the section from which its value was taken. `own_options` has the options of
    weft that the user also sets.
    """

    config: RunConfig
    values: Mapping[str, Any]
    ranks: Mapping[str, int]
    own_options: Mapping[str, Any] = field(default_factory=dict)
    options: dict[str, MappedOption] = field(default_factory=dict)
    # note -> keys that it applies to
    notes: dict[str, list[str]] = field(default_factory=dict)
    rejections: list[tuple[str, str]] = field(default_factory=list)  # (key, error message)
    key: str = IMPLIED  # key being mapped
    known: frozenset[str] = frozenset()  # the options of the experiment

    def __post_init__(self) -> None:
        self.known = self.known or frozenset(leaf.name for leaf in iterate_options(self.config))

    @property
    def mode(self) -> str:
        return find_mode(self.config)

    @property
    def data_ranks(self) -> int:
        ranks = count_data_ranks(
            OverrideTranslation(self.config, self.known), dict(self.own_options)
        )
        if isinstance(ranks, int) and not isinstance(ranks, bool):
            return ranks
        return 1

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def with_key(self, key: str) -> KeyMapping:
        """Return a copy of this mapping that attributes newly set options to `key`.

        The copy shares its options, notes and errors with the original.
        """
        return replace(self, key=key)

    def set_option(self, target: str, value: Any, *, off: Any = NO_OFF_VALUE) -> None:
        """Set an option of the run to `value`.

        If two Open-Assistant keys set the same option, the key from the later section takes
        precedence. `target` is the name of the option. `{model}` in it is replaced by each trained
        role, `{first}` by the main role, `{algorithm}` by the group of the algorithm's options, and
        `{gen}` by the group of the sampling options. `off` is the value that has no effect. If
        `value` equals `off` and the experiment does not have the option, nothing is set.
        """
        config = self.config
        roles = config.trained_roles or (config.main_role,)
        for role in roles if "{model}" in target else ("",):
            name = target.replace("{model}", role).replace("{first}", config.main_role)
            name = name.replace("{algorithm}", config.algorithm).replace("{gen}", config.generation)
            if off is not NO_OFF_VALUE and value == off and name not in self.known:
                continue
            before = self.options.get(name)
            if before is None or self.get_rank(self.key) >= self.get_rank(before.key):
                self.options[name] = MappedOption(value, self.key)

    def get_rank(self, key: str) -> int:
        """Return the position of the section that sets `key`, or -1 if the key is not set.

        For a key in a group, such as `rank_config.dtype`, this is the position of the section that
        sets the group, unless the key was set individually.
        """
        return self.ranks.get(key, self.ranks.get(key.split(".")[0], -1))

    def add_note(self, note: str) -> None:
        """Add a note on the current key for the user."""
        keys = self.notes.setdefault(note, [])
        if self.key not in keys:
            keys.append(self.key)

    def reject(self, value: Any, reason: str) -> None:
        """Record that weft does not support the current key with this value."""
        name = self.key.removeprefix(TRLX_PREFIX)
        self.rejections.append((self.key, f"{name}={format_yaml_value(value)}: {reason}"))

    def check_boolean(self, value: Any) -> bool:
        """Return `value` if it is a Boolean; otherwise record an error and return False."""
        if isinstance(value, bool):
            return value
        self.reject(value, "must be true or false")
        return False

    def is_valid_number(self, value: Any, minimum: float = 0.0) -> bool:
        """Return whether `value` is a number of at least `minimum`; if not, record an error."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < minimum:
            self.reject(value, f"must be a number, at least {minimum:g}")
            return False
        return True


def format_yaml_value(value: Any) -> str:
    """Format a value as YAML text."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class KeyRule:
    """Rule for translating one of Open-Assistant's keys.

    `description` is the rule's text in the documentation. `modes` are the trainers that read the
    key: sft, rm or rl.
    """

    description: str
    rule: Callable[[KeyMapping, Any], None]
    modes: Sequence[str] = (SFT, RM)


def map_to_option(target: str, *modes: str, off: Any = NO_OFF_VALUE) -> KeyRule:
    """Return the rule for a key that sets weft's option `target` to the key's value.

    `modes` are the trainers that read the key, by default those for SFT and reward models. If an
    experiment does not have the option, the key can only be set to `off`, which has no effect.
    """
    return KeyRule(
        f"`{_format_target(target)}`",
        lambda mapping, value: mapping.set_option(target, value, off=off),
        modes or (SFT, RM),
    )


def ignore_with_note(reason: str, *modes: str) -> KeyRule:
    """Return a rule for a key that has no effect in weft.

    If the key is set, the user is shown the note `reason`. `modes` are the trainers that read the
    key; by default, all of them.
    """
    return KeyRule(
        f"nothing: {reason}",
        lambda mapping, value: mapping.add_note(reason),
        modes or (SFT, RM, RL),
    )


def reject_unless(reason: str, *allowed: Any, modes: Sequence[str] = (SFT, RM, RL)) -> KeyRule:
    """Return the rule for a key that weft supports only with one of the `allowed` values.

    An allowed value sets no option. For any other value, an error with `reason` is recorded.
    """

    def apply_rule(mapping: KeyMapping, value: Any) -> None:
        if value not in allowed:
            mapping.reject(value, reason)

    return KeyRule(
        f"refused unless {' or '.join(format_yaml_value(each) for each in allowed)}: {reason}",
        apply_rule,
        modes,
    )


def _format_target(target: str) -> str:
    names = {"{model}": "MODEL", "{first}": "MODEL", "{gen}": "GEN", "{algorithm}": "ALGORITHM"}
    for mark, name in names.items():
        target = target.replace(mark, name)
    return target


# -- lists of datasets


# Parameters that every entry accepts -> the key of a source. Other parameters go into `args`.
PARAMETERS = {
    "fraction": "fraction",
    "size": "size",
    "weight": "weight",
    "val_split": "valid_split",
    "max_val_set": "max_valid",
    "data_path": "path",
    # local copy for oasst_export and augment_oasst; preferred to the hub's
    "input_file_path": "path",
}
# a missing path with one of these endings is a file, any other a folder
FILES = (".jsonl", ".json", ".gz", ".parquet")
SHARES = ("fraction", "size", "weight")  # mutually exclusive
# keys of a source in weft's spelling
SOURCE_KEYS = ("name", "path", "valid_path", "valid_split", "max_valid", "args")
# hf_dataset_name of oasst_export -> name of the dataset fetched from there
HUB_DATASETS = {"OpenAssistant/oasst1": "oasst_export", "OpenAssistant/oasst2": "oasst2"}
VALID_SPLIT = 0.2  # Open-Assistant's default evaluation share
ENTRY_SYNTAX = (
    "an entry is '- name' or '- name:' with its parameters (fraction, size, val_split, ...) "
    "indented below it"
)


class InvalidDatasetEntry(Exception):
    """Raised if a list of datasets has an invalid item.

    `index` is the position of the item, or -1 if the whole list is invalid. The message is the
    reason.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


def convert_entries(entries: Any) -> list[dict[str, Any]]:
    """Convert a list of datasets to entries of `dataset.sources`.

    The list can also be a string of names separated by commas. Raises `InvalidDatasetEntry` for an
    invalid list or item.
    """
    if isinstance(entries, str):
        entries = [each for each in entries.split(",") if each]
    if not isinstance(entries, Sequence):
        raise InvalidDatasetEntry(-1, f"must be a list; {ENTRY_SYNTAX}")
    return [_convert_entry(entry, index) for index, entry in enumerate(entries)]


def _convert_entry(entry: Any, index: int) -> dict[str, Any]:
    if isinstance(entry, str):
        return {"named": entry}
    if not isinstance(entry, Mapping) or not entry:
        raise InvalidDatasetEntry(index, f"{entry!r} is not a dataset; {ENTRY_SYNTAX}")
    name, *others = entry
    parameters = entry[name]
    if others:
        raise InvalidDatasetEntry(
            index,
            f"{', '.join(map(str, others))} is on the same level as {name!r}; indent it below "
            f"'- {name}:', or begin it with '- '",
        )
    if parameters is None:
        return {"named": str(name)}
    if not isinstance(parameters, Mapping):
        raise InvalidDatasetEntry(
            index, f"{name}: {parameters!r} is not a parameter; {ENTRY_SYNTAX}"
        )
    return _build_source(str(name), parameters, index)


def _build_source(name: str, parameters: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the entry of `dataset.sources` for the dataset `name` with the given parameters.

    `index` is the dataset's position in the user's list, for error messages. Raises
    `InvalidDatasetEntry` for an unknown hf_dataset_name.
    """
    source: dict[str, Any] = {"named": name}
    set_parameters = {}
    for key, value in parameters.items():
        if value is not None:
            set_parameters[str(key)] = value
    if "data_path" in set_parameters and "input_file_path" in set_parameters:
        set_parameters["path"] = _join_folder(
            str(set_parameters.pop("data_path")), str(set_parameters.pop("input_file_path"))
        )
    hub = set_parameters.pop("hf_dataset_name", None)
    # a local file is preferred to the hub
    if hub is not None and not {"path", "data_path", "input_file_path"} & set_parameters.keys():
        if hub not in HUB_DATASETS:
            raise InvalidDatasetEntry(
                index,
                f"{name}: hf_dataset_name={hub}: must be {' or '.join(HUB_DATASETS)}; give another "
                f"as data_path, a copy",
            )
        source["named"] = HUB_DATASETS[hub] if name == "oasst_export" else name
    for key, value in set_parameters.items():
        if key in PARAMETERS:
            source[PARAMETERS[key]] = value
        elif key in SOURCE_KEYS:
            source[key] = value
        else:
            source.setdefault("args", {})[key] = value
    return source


def _join_folder(data_path: str, file: str) -> str:
    """Return the path of `file` in the folder `data_path`, or `data_path` if that is a file."""
    place = Path(data_path).expanduser()
    is_file = place.is_file() or (place.suffix in FILES and not place.is_dir())
    return data_path if is_file else str(Path(data_path) / file)


def scale_entries(entries: Sequence[Mapping[str, Any]], share: float) -> list[dict[str, Any]]:
    """Return copies of entries of `dataset.sources`, with the rows per epoch multiplied by `share`.

    Raises `InvalidDatasetEntry` for an entry with a weight, because a weight does not determine the
    number of rows.
    """
    scaled_entries = []
    for index, entry in enumerate(entries):
        if "weight" in entry:
            raise InvalidDatasetEntry(index, "weight has no share of an epoch; write fraction")
        if "size" in entry:
            scaled_entries.append({**entry, "size": max(1, round(entry["size"] * share))})
        else:
            scaled_entries.append({**entry, "fraction": entry.get("fraction", 1.0) * share})
    return scaled_entries


def limit_validation(entries: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return copies of the entries, with `max_valid` set to `count` if it is unset or higher.

    `entries` are entries of `dataset.sources`, and `max_valid` limits their validation rows.
    """
    return [{**entry, "max_valid": min(count, entry.get("max_valid", count))} for entry in entries]
