"""`--configs A B ...`: merge named config sections and the command line into weft's options.

A section overrides those to its left, and the command line overrides all sections.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.cli.aliases import (
    BATCH_SPELLINGS,
    RENAMED,
    VALUE_TRANSLATORS,
    build_translation,
    is_spelling,
)
from weft.cli.help import format_value
from weft.cli.open_assistant.datasets import SHARES
from weft.cli.open_assistant.key_mapping import IMPLIED, RL, RM, TRLX_PREFIX, KeyMapping
from weft.cli.open_assistant.keys import KEYS, TRLX, map_keys
from weft.cli.overrides import Override, flatten
from weft.cli.sections import READY, SHIPPED, ConfigSection, SectionLibrary
from weft.errors import ConfigError, find_nearest
from weft.experiments.common import RunConfig
from weft.options import coerce, iterate_options, to_plain

COMMAND_LINE = "command line"
PPO_CONFIG = "ppo_config"  # section that Open-Assistant's RL trainer always reads
# Mutually exclusive options, as ends of dotted names; of two, the one set last is kept.
EXCLUSIVE = (
    ("optimizer.warmup_steps", "optimizer.warmup_steps_proportion", "optimizer.warmup_epochs"),
    ("optimizer.min_lr_ratio", "optimizer.end_lr"),
    ("dataset.train_bs_n_seqs", "dataset.train_tokens_per_batch"),
    ("dataset.valid_bs_n_seqs", "dataset.valid_tokens_per_batch"),
    ("ppo_n_minibatches", "mini_batch_size"),
)
NAME_LENGTH = 100


@dataclass(frozen=True)
class StackedValue:
    """Value that a config section or the command line sets, and the place where it is set.

    `place` is `FILE:LINE` or "command line". `rank` is the position of the section, and is highest
    for the command line. If a key is set twice, the value with the higher rank is used.
    """

    value: Any
    place: str  # FILE:LINE, or the command line
    section: str
    rank: int
    removed: bool = False
    source: ConfigSection | None = None

    def __str__(self) -> str:
        return f"{self.section}, {self.place}" if self.section else self.place


@dataclass
class SectionStack:
    """Result of merging config sections and the command line.

    Attributes:
        names: Names of the merged sections.
        overrides: Assignments to weft's options.
        origins: For each option, the key in the user's spelling, and a `StackedValue` that states
            where the key is set.
        notes: Notes for the user.
        deepspeed: DeepSpeed file named in the sections, or None. It is used if the flag
            `--deepspeed` is given without a file.
    """

    names: tuple[str, ...]
    overrides: list[Override] = field(default_factory=list)
    # option -> (the key that sets it, the place)
    origins: dict[str, tuple[str, StackedValue]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    deepspeed: str | None = None  # default file of --deepspeed

    def format_lines(self) -> list[str]:
        """Return a line for each option, with the place where it is set as a comment.

        The first line lists the names of the sections.
        """
        rows = []
        for override in self.overrides:
            key, where = self.origins[override.name]
            if key in (override.name, IMPLIED):
                key_note = ""
            else:
                key_note = f", {key.removeprefix(TRLX_PREFIX)}"
            rows.append(
                (
                    f"  {override.name} = {format_value(to_plain(override.value))}",
                    f"{where}{key_note}",
                )
            )
        width = min(max((len(left) for left, _ in rows), default=0), 72)
        return [
            f"settings: {' '.join(self.names)}",
            *(f"{left:{width}}  # {right}" for left, right in rows),
        ]

    def add_origin(self, error: ConfigError) -> ConfigError:
        """Return a copy of `error` whose message also states where the invalid option is set.

        The place is known only if the message of `error` begins with the name of an option in this
        stack. Otherwise, `error` itself is returned.
        """
        text = str(error)
        named = []
        for name in self.origins:
            if re.match(rf"(unknown option ')?{re.escape(name)}\b", text):
                named.append(name)
        if not named:
            return error
        key, where = self.origins[max(named, key=len)]
        return ConfigError(
            f"{text} ({where}{'' if key in named else f', {key.removeprefix(TRLX_PREFIX)}'})"
        )


def read_stack(
    names: Sequence[str],
    library: SectionLibrary,
    base: RunConfig,
    given: Iterable[Override] = (),
    below: Iterable[Override] = (),
) -> SectionStack:
    """Merge config sections with assignments from the command line and from a DeepSpeed file.

    Later values override earlier ones, in this order: the assignments of the DeepSpeed file
    (`below`), the sections `names` one after the other, and the assignments on the command line
    (`given`). Raises `ConfigError` for unknown sections and keys, and for settings that weft does
    not support. The message gives the file and line of an invalid key, and suggests similar names.
    """
    reader = _StackReader(base)
    sections = [library.get(name) for name in names]
    if reader.mode == RL and any(_is_rl(s) for s in sections) and not any(s.trlx for s in sections):
        sections.insert(0, library.get(PPO_CONFIG))
    for override in below:
        reader.weft_values[override.name] = StackedValue(override.value, "--deepspeed", "", -1)
    for rank, section in enumerate(sections):
        reader.read_section(section, rank)
    if reader.problems:
        raise ConfigError("\n".join(reader.problems))
    for override in given:
        reader.read_override(override, len(sections))
    stack = SectionStack(tuple(section.name for section in sections))
    if "deepspeed_config" in reader.open_assistant_values:
        stack.deepspeed = to_plain(reader.open_assistant_values["deepspeed_config"].value)
    _resolve_options(reader, stack)
    return stack


def _is_rl(section: ConfigSection) -> bool:
    return any(key in section.values for key in ("num_rollouts", "sft_config", "rank_config"))


class _StackReader:
    """Reader that collects all keys set in a sequence of config sections or on the command line.

    Open-Assistant's keys and weft's options are collected separately. If a section contains nested
    options of weft, they are stored under dotted names, such as `model.optimizer.lr`.
    """

    def __init__(self, base: RunConfig) -> None:
        self.base = base
        self.mode = KeyMapping(base, {}, {}).mode
        self.open_assistant_values: dict[str, StackedValue] = {}
        # keys within one of Open-Assistant's groups that the command line sets individually
        self.group_values: dict[str, StackedValue] = {}
        self.weft_values: dict[str, StackedValue] = {}
        self.problems: list[str] = []

    def read_section(self, section: ConfigSection, rank: int) -> None:
        for key, value in section.values.items():
            if section.trlx:
                for each in flatten({key: value}):
                    where = StackedValue(
                        each.value,
                        section.find_location(*each.name.split(".")),
                        section.name,
                        rank,
                        source=section,
                    )
                    self._set_open_assistant_value(f"{TRLX_PREFIX}{each.name}", where)
            elif key in KEYS:
                self._set_open_assistant_value(
                    key,
                    StackedValue(
                        value, section.find_location(key), section.name, rank, source=section
                    ),
                )
            else:
                for each in flatten({key: value}):
                    path = _split_key_path(each.name, section)
                    where = StackedValue(
                        each.value, section.find_location(*path), section.name, rank, source=section
                    )
                    if is_spelling(each.name, self.base):
                        self.weft_values[each.name] = where
                    else:
                        self.problems.append(
                            f"{where.place}: section {section.name!r}: {self._describe_unknown_key(each.name)}"
                        )

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
        where = StackedValue(override.value, COMMAND_LINE, "", rank, override.removed)
        group, _, inner = name.partition(".")
        if override.removed:  # `~key` removes it and all keys below it
            removed_keys = []
            for key in (*self.open_assistant_values, *self.weft_values):
                if key == name or key.startswith(f"{name}."):
                    removed_keys.append(key)
            for key in removed_keys:
                self.open_assistant_values.pop(key, None)
                self.weft_values.pop(key, None)
            if name not in KEYS and name not in TRLX:
                self.weft_values[name] = where
        elif self._is_open_assistant_key(name):
            self._set_open_assistant_value(
                name,
                StackedValue(to_plain(coerce(override.value, Any, name)), COMMAND_LINE, "", rank),
            )
        elif inner and group in ("datasets", "datasets_extra"):  # a parameter of an entry
            self._set_entry_parameter(group, inner, override)
        elif inner and self._is_open_assistant_key(
            group
        ):  # a key in one of Open-Assistant's groups
            before = self.open_assistant_values.get(group, StackedValue({}, COMMAND_LINE, "", rank))
            whole = {
                **(before.value if isinstance(before.value, Mapping) else {}),
                inner: to_plain(override.value),
            }
            self.open_assistant_values[group], self.group_values[name] = (
                replace(before, value=whole),
                where,
            )
        elif name in KEYS and not is_spelling(name, self.base):  # another trainer's key
            raise ConfigError(
                f"{name}: weft quickstart {self.base.algorithm or 'here'} does not read it; "
                f"{KEYS[name].says}"
            )
        elif not is_spelling(name, self.base):
            raise ConfigError(self._describe_unknown_key(name))
        else:
            self.weft_values[name] = where

    def _set_entry_parameter(self, key: str, inner: str, override: Override) -> None:
        """Apply `override`, which has the form `datasets.NAME.PARAMETER=value`.

        The parameter is set in all entries called NAME in the list of datasets. `key` is the key of
        this list, "datasets" or "datasets_extra", and `inner` is `NAME.PARAMETER`. Raises
        `ConfigError` if there is no such entry.
        """
        name, _, parameter = inner.partition(".")
        before = self.open_assistant_values.get(key)
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
        self.open_assistant_values[key] = replace(before, value=changed)

    def find_origin(self, key: str) -> StackedValue:
        """Return a `StackedValue` whose `place` says where an Open-Assistant key is set.

        The place is the command line if the key itself or its whole group is set there. Otherwise,
        it is the key's line in a section or, for a key that is not set, `IMPLIED`.
        """
        origin = self.open_assistant_values.get(key) or self.group_values.get(key)
        group = self.open_assistant_values.get(key.split(".")[0])
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
            or any(leaf.name == name for leaf in iterate_options(self.base))
        ):
            return name
        if f"{TRLX_PREFIX}{name}" in TRLX:
            return f"{TRLX_PREFIX}{name}"
        if not any(key.startswith(TRLX_PREFIX) for key in self.open_assistant_values):
            return name
        matching_keys = [key for key in TRLX if key.endswith(f".{name}")]
        if len(matching_keys) > 1 and not is_spelling(name, self.base):
            raise ConfigError(
                f"{name}: write {' or '.join(key.removeprefix(TRLX_PREFIX) for key in matching_keys)}"
            )
        return matching_keys[0] if len(matching_keys) == 1 else name

    def _is_open_assistant_key(self, name: str) -> bool:
        key = KEYS.get(name) or TRLX.get(name)
        return key is not None and self.mode in key.modes

    def _set_open_assistant_value(self, name: str, where: StackedValue) -> None:
        if name not in KEYS and name not in TRLX:
            close = find_nearest(name, TRLX)
            if close:
                hint = f"; did you mean {' or '.join(each.removeprefix(TRLX_PREFIX) for each in close)}?"
            else:
                hint = ""
            key = name.removeprefix(TRLX_PREFIX)
            self.problems.append(
                f"{where.place}: section {where.section!r}: unknown key {key!r}{hint}"
            )
            return
        self.open_assistant_values[name] = where

    def _describe_unknown_key(self, name: str) -> str:
        options = [leaf.name for leaf in iterate_options(self.base)]
        last = name.rsplit(".", 1)[-1]
        same_end = []
        for option in options:
            if option.rsplit(".", 1)[-1] == last:
                same_end.append(option)
        of_trlx = []
        for key in TRLX:
            if self.mode == RL and key.startswith(TRLX_PREFIX):
                of_trlx.append(key.removeprefix(TRLX_PREFIX))
        close = list(
            dict.fromkeys(
                [
                    *same_end,
                    *find_nearest(name, [*KEYS, *RENAMED, *VALUE_TRANSLATORS, *options, *of_trlx]),
                ]
            )
        )[:3]
        if close:
            hint = f"did you mean {' or '.join(close)}?"
        else:
            hint = "weft quickstart NAME --help lists every option"
        return f"unknown key {name!r}; {hint}"


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


def _split_key_path(name: str, section: ConfigSection) -> tuple[str, ...]:
    """Return the YAML keys that lead to an option in a section, outermost first.

    `name` is the dotted name of the option. For example, the keys for `actor.optimizer.lr` are
    `("actor.optimizer", "lr")` if the section sets `lr` under the key "actor.optimizer". If the
    section has no key for the option itself, the keys for the longest prefix of `name` in the
    section are returned, such as `("actor.optimizer",)`, or an empty tuple if there is none.
    """
    best: tuple[str, ...] = ()
    for path in section.lines:
        texts = tuple(str(part) for part in path)
        joined = ".".join(texts)
        if (name == joined or name.startswith(f"{joined}.")) and len(joined) > len(".".join(best)):
            best = texts
    return best


def _resolve_options(reader: _StackReader, stack: SectionStack) -> None:
    """Fill `stack` with the options, origins and notes that result from the keys in `reader`.

    This maps Open-Assistant's keys to options and translates alternative spellings. If several keys
    set the same option, the command line takes precedence over sections, and a later section over
    an earlier one. Raises `ConfigError` if two keys in one section, or two on the command line, set
    the same option.
    """
    sets = dict(reader.weft_values)
    keys = {name: name for name in sets}
    mapped = _map_open_assistant_keys(reader)
    for name, option in mapped.options.items():
        where = reader.find_origin(option.key)
        candidate = StackedValue(option.value, where.place, where.section, where.rank)
        older = sets.get(name)
        if older is None or older.rank < candidate.rank:
            sets[name], keys[name] = candidate, option.key
        elif older.rank == candidate.rank:
            raise ConfigError(
                f"{older.place}: {name} and {option.key} ({candidate.place}) are the same option; set "
                f"one of them"
            )
    # Spellings of the batch size are read together, so all take the highest rank among them.
    batch = max((sets[name].rank for name in BATCH_SPELLINGS if name in sets), default=0)
    ranks = {name: batch if name in BATCH_SPELLINGS else each.rank for name, each in sets.items()}
    assigned = [Override(name, each.value, each.removed) for name, each in sets.items()]
    done = build_translation(assigned, reader.base, ranks)
    # Remember where each option came from, for messages and the saved configuration.
    for target, spelling in done.user_spellings.items():
        if spelling not in sets:  # a key below one that was set
            spelling = next(name for name in sets if spelling.startswith(f"{name}."))
        stack.origins[target] = (keys[spelling], sets[spelling])
    excluded = _find_excluded_options(stack)
    stack.overrides = [each for each in done.overrides if each.name not in excluded]
    stack.origins = {name: each for name, each in stack.origins.items() if name not in excluded}
    # Say what a spelling became only for words of the command line.
    words = set()
    for name, each in sets.items():
        if each.place == COMMAND_LINE and name in reader.weft_values:
            words.add(name)
    for note in done.notes:
        if note.split(" ")[0] in words:
            stack.notes.append(note)
    for why, names in _strip_trlx_prefixes(mapped.notes).items():
        stack.notes.append(f"{', '.join(names)}: {why}")
    _name_run(stack, reader.base)


def _map_open_assistant_keys(reader: _StackReader) -> KeyMapping:
    """Map Open-Assistant's keys in `reader` to weft's options.

    Raises a `ConfigError` that lists every invalid value with the place where it is set.
    """
    set_ = {}
    for name, each in reader.open_assistant_values.items():
        if each.value is not None:
            set_[name] = each
    given = {}
    for name, each in reader.weft_values.items():
        if not each.removed:
            given[name] = to_plain(each.value)
    values = {name: each.value for name, each in set_.items()}
    ranks = {name: each.rank for name, each in (*set_.items(), *reader.group_values.items())}
    mapped = map_keys(KeyMapping(reader.base, values, ranks, given))
    if mapped.rejections:
        raise ConfigError(
            "\n".join(
                _format_rejection(reader, key, why) for key, why in dict.fromkeys(mapped.rejections)
            )
        )
    return mapped


def _format_rejection(reader: _StackReader, key: str, why: str) -> str:
    first = re.split(r"[.\[]", key)[0]
    where = reader.open_assistant_values.get(key) or reader.open_assistant_values.get(first)
    if where is None:
        return why
    index = re.search(r"\[(\d+)\]", key)
    inner = key.removeprefix(TRLX_PREFIX).split(".")
    path: list[str | int] = [first, int(index[1])] if index else [*inner]
    place = where.source.find_location(*path) if where.source else where.place
    return f"{place}: {f'section {where.section!r}: ' if where.section else ''}{why}"


def _strip_trlx_prefixes(notes: Mapping[str, list[str]]) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for why, keys in notes.items():
        result[why] = [key.removeprefix(TRLX_PREFIX) for key in keys]
    return result


def _find_excluded_options(stack: SectionStack) -> set[str]:
    """Return the options to drop because a later section sets a mutually exclusive option.

    For example, `optimizer.end_lr` excludes `optimizer.min_lr_ratio`.
    """
    excluded_options: set[str] = set()
    for ends in EXCLUSIVE:
        groups: dict[str, list[str]] = {}
        for name in stack.origins:
            for end in ends:
                if name == end or name.endswith(f".{end}"):
                    groups.setdefault(name.removesuffix(end), []).append(name)
        for names in groups.values():
            last = max(stack.origins[name][1].rank for name in names)
            for name in names:
                if stack.origins[name][1].rank < last:
                    excluded_options.add(name)
    return excluded_options


def _name_run(stack: SectionStack, base: RunConfig) -> None:
    """Name the experiment after the algorithm, and the trial after the sections.

    Names that the user has set are kept.
    """
    trial = re.sub(r"[^A-Za-z0-9.-]+", "-", "-".join(stack.names)).strip("-.")[:NAME_LENGTH]
    for name, value in (
        ("experiment_name", base.algorithm or "run"),
        ("trial_name", trial or "run"),
    ):
        if name not in stack.origins and not getattr(base, name):
            stack.overrides.append(Override(name, value.replace("_", "-")))
            stack.origins[name] = (name, StackedValue(value, "the names of the sections", "", -2))


def guess_quickstart(sections: Sequence[ConfigSection]) -> str:
    """Return the name of the quickstart that best fits the sections.

    If there is a built-in recipe among the sections, its quickstart is chosen. Otherwise, an option
    group named `ppo`, `grpo` or `dpo` determines the quickstart. If there is no such group, keys
    that only Open-Assistant's RL or reward trainer reads determine it. The default is "sft".
    """
    recipes = []
    for section in sections:
        if section.file.startswith(f"{SHIPPED}:{READY}/"):
            recipes.append(section.name.partition("-")[0])
    own = []
    for name in ("ppo", "grpo", "dpo"):
        if any(name in section.values for section in sections):
            own.append(name)
    if recipes or own:
        return (recipes or own)[0]
    modes = []
    for section in sections:
        for key in section.values:
            if key in KEYS:
                modes.append(KEYS[key].modes)
    if any(section.trlx for section in sections) or (RL,) in modes:
        return "ppo"
    reward = any(section.values.get("is_reward_model") is True for section in sections)
    return "rw" if reward or (RM,) in modes else "sft"
