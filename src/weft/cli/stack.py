"""`--configs A B ...`: merge named config sections and the command line into weft's options.

A section overrides those to its left, and the command line overrides all sections.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from weft.cli import dialects
from weft.cli.aliases import (
    BATCH_SPELLINGS,
    build_translation,
    collect_renamed,
    collect_translators,
    is_spelling,
)
from weft.cli.help import format_value
from weft.cli.overrides import Override, flatten
from weft.cli.sections import READY, SHIPPED, ConfigSection, SectionLibrary
from weft.errors import ConfigError, find_nearest
from weft.experiments.common import RunConfig
from weft.options import iterate_options, to_plain

COMMAND_LINE = "command line"
# Algorithm -> kind of training, which determines how rows of named datasets are read; all others are RL.
MODES = {"sft": "sft", "distill": "sft", "rw": "rm", "dpo": "rm"}
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
        option_file: Another program's file of options that is named in the sections, or None. It
            is used if its flag, such as `--deepspeed`, is given without a file.
    """

    names: tuple[str, ...]
    overrides: list[Override] = field(default_factory=list)
    # option -> (the key that sets it, the place)
    origins: dict[str, tuple[str, StackedValue]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    option_file: str | None = None

    def format_lines(self) -> list[str]:
        """Return a line for each option, with the place where it is set as a comment.

        The first line lists the names of the sections.
        """
        rows = []
        for override in self.overrides:
            key, where = self.origins[override.name]
            key_note = "" if key in (override.name, where.place) else f", {key}"
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
        return ConfigError(f"{text} ({where}{'' if key in named else f', {key}'})")


def read_stack(
    names: Sequence[str],
    library: SectionLibrary,
    base: RunConfig,
    given: Iterable[Override] = (),
    below: OptionFile | None = None,
) -> SectionStack:
    """Merge config sections with assignments from the command line and from another program's file.

    Later values override earlier ones, in this order: the assignments of the file (`below`), the
    sections `names` one after the other, and the assignments on the command line (`given`). Raises
    `ConfigError` for unknown sections and keys, and for settings that weft does not support. The
    message gives the file and line of an invalid key, and suggests similar names.
    """
    own = OptionReader(base)
    dialect = dialects.find("open_assistant")
    reader: StackReader = own if dialect is None else dialect.OpenAssistantReader(own)
    sections = reader.choose_sections(names, library)
    if below is not None:
        for override in below.assignments:
            own.values[override.name] = StackedValue(override.value, below.place, "", -1)
    for rank, section in enumerate(sections):
        reader.read_section(section, rank)
    if own.problems:
        absence = [] if dialect is not None else [dialects.describe_absence("open_assistant")]
        raise ConfigError("\n".join([*own.problems, *absence]))
    for override in given:
        reader.read_override(override, len(sections))
    stack = SectionStack(tuple(section.name for section in sections))
    _resolve_options(own, reader.map_foreign_keys(), stack)
    return stack


def find_mode(config: RunConfig) -> str:
    """Return the kind of training that a configuration describes: sft, rm or rl."""
    return MODES.get(config.algorithm, MODES.get(config.generation.split(".")[0], "rl"))


@dataclass(frozen=True)
class ForeignOption:
    """Weft's option that another program's key sets; `short_key` is the key in messages."""

    value: StackedValue
    key: str
    short_key: str


@dataclass(frozen=True)
class ForeignOptions:
    """Options that another program's keys set, with notes and the file of options that they name."""

    options: Mapping[str, ForeignOption] = field(default_factory=dict)
    notes: Sequence[str] = ()
    option_file: str | None = None


class OptionFile(Protocol):
    """Weft's options that another program's file sets.

    `place` names the file in messages, and `notes` tell the user how it is read.
    """

    @property
    def place(self) -> str: ...

    @property
    def assignments(self) -> Sequence[Override]: ...

    @property
    def notes(self) -> Sequence[str]: ...

    def describe_autos(self, config: RunConfig) -> list[str]: ...


class StackReader(Protocol):
    """Reader of config sections and of the assignments on the command line."""

    def choose_sections(
        self, names: Sequence[str], library: SectionLibrary
    ) -> list[ConfigSection]: ...

    def read_section(self, section: ConfigSection, rank: int) -> None: ...

    def read_override(self, override: Override, rank: int) -> None: ...

    def map_foreign_keys(self) -> ForeignOptions: ...


class OptionReader:
    """Reader that collects weft's options from config sections and the command line.

    If a section contains nested options, they are stored under dotted names, such as
    `model.optimizer.lr`. `values` are the collected options, and `problems` are error messages.
    """

    def __init__(self, base: RunConfig) -> None:
        self.base = base
        self.values: dict[str, StackedValue] = {}
        self.problems: list[str] = []

    def choose_sections(self, names: Sequence[str], library: SectionLibrary) -> list[ConfigSection]:
        return [library.get(name) for name in names]

    def read_section(self, section: ConfigSection, rank: int) -> None:
        for key, value in section.values.items():
            self.read_key(section, key, value, rank)

    def read_key(
        self,
        section: ConfigSection,
        key: str,
        value: Any,
        rank: int,
        other_names: Iterable[str] = (),
    ) -> None:
        """Add a key of a section, or a problem for each unknown name.

        `other_names` are names of other programs that may be suggested for an unknown name.
        """
        for each in flatten({key: value}):
            path = _split_key_path(each.name, section)
            where = StackedValue(
                each.value, section.find_location(*path), section.name, rank, source=section
            )
            if is_spelling(each.name, self.base):
                self.values[each.name] = where
            else:
                self.problems.append(
                    f"{where.place}: section {section.name!r}: "
                    f"{self._describe_unknown_key(each.name, other_names)}"
                )

    def read_override(self, override: Override, rank: int, other_names: Iterable[str] = ()) -> None:
        """Add an assignment from the command line.

        `rank` is its priority, which is above that of all sections. Raises `ConfigError` for an
        unknown key, with suggestions that include `other_names`.
        """
        name = override.name
        if override.removed:
            self.remove(name)
        elif not is_spelling(name, self.base):
            raise ConfigError(self._describe_unknown_key(name, other_names))
        self.values[name] = StackedValue(override.value, COMMAND_LINE, "", rank, override.removed)

    def remove(self, name: str) -> None:
        """Remove what is set for `name` and for all names below it."""
        for key in list(self.values):
            if key == name or key.startswith(f"{name}."):
                del self.values[key]

    def map_foreign_keys(self) -> ForeignOptions:
        return ForeignOptions()

    def _describe_unknown_key(self, name: str, other_names: Iterable[str]) -> str:
        options = [leaf.name for leaf in iterate_options(self.base)]
        last = name.rsplit(".", 1)[-1]
        same_end = []
        for option in options:
            if option.rsplit(".", 1)[-1] == last:
                same_end.append(option)
        known = [*other_names, *collect_renamed(), *collect_translators(), *options]
        close = list(dict.fromkeys([*same_end, *find_nearest(name, known)]))[:3]
        if close:
            hint = f"did you mean {' or '.join(close)}?"
        else:
            hint = "weft quickstart NAME --help lists every option"
        return f"unknown key {name!r}; {hint}"


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


def _resolve_options(own: OptionReader, foreign: ForeignOptions, stack: SectionStack) -> None:
    """Fill `stack` with the options, origins and notes that result from the collected keys.

    This adds the options that other programs' keys set, and translates alternative spellings. If several keys
    set the same option, the command line takes precedence over sections, and a later section over
    an earlier one. Raises `ConfigError` if two keys in one section, or two on the command line, set
    the same option.
    """
    stack.option_file = foreign.option_file
    sets = dict(own.values)
    keys = {name: name for name in sets}
    for name, option in foreign.options.items():
        candidate = option.value
        older = sets.get(name)
        if older is None or older.rank < candidate.rank:
            sets[name], keys[name] = candidate, option.short_key
        elif older.rank == candidate.rank:
            raise ConfigError(
                f"{older.place}: {name} and {option.key} ({candidate.place}) are the same option; set "
                f"one of them"
            )
    # Spellings of the batch size are read together, so all take the highest rank among them.
    batch = max((sets[name].rank for name in BATCH_SPELLINGS if name in sets), default=0)
    ranks = {name: batch if name in BATCH_SPELLINGS else each.rank for name, each in sets.items()}
    assigned = [Override(name, each.value, each.removed) for name, each in sets.items()]
    done = build_translation(assigned, own.base, ranks)
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
        if each.place == COMMAND_LINE and name in own.values:
            words.add(name)
    for note in done.notes:
        if note.split(" ")[0] in words:
            stack.notes.append(note)
    stack.notes += foreign.notes
    _name_run(stack, own.base)


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
    that only other programs' RL or reward trainers read determine it. The default is "sft".
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
    dialect = dialects.find("open_assistant")
    return "sft" if dialect is None else str(dialect.guess_quickstart(sections))
