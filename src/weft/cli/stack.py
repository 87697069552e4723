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
# algorithm -> kind of training, which determines how rows of named datasets are read; others are RL
MODES = {"sft": "sft", "distill": "sft", "rw": "rm", "dpo": "rm"}
# Mutually exclusive options, as ends of dotted names. Only the option that is set last is used.
EXCLUSIVE = (
    ("optimizer.warmup_steps", "optimizer.warmup_steps_proportion", "optimizer.warmup_epochs"),
    ("optimizer.min_lr_ratio", "optimizer.end_lr"),
    ("dataset.train_bs_n_seqs", "dataset.train_tokens_per_batch"),
    ("dataset.valid_bs_n_seqs", "dataset.valid_tokens_per_batch"),
    ("ppo_n_minibatches", "mini_batch_size"),
)
NAME_LENGTH = 100  # maximum characters of a trial name made from the names of sections


@dataclass(frozen=True)
class StackedValue:
    """Value that a config section or the command line sets, and the place where it is set.

    `place` is `FILE:LINE`, "command line", or the flag of another program's file. `section` is the
    name of the section, or "" if the value is not from a section. `rank` is the position of the
    section; the command line has the highest rank. If a key is set several times, the value with
    the highest rank is used.
    """

    value: Any
    place: str
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
    origins: dict[str, tuple[str, StackedValue]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    option_file: str | None = None

    def format_lines(self) -> list[str]:
        """Return a line with the names of the sections, and a line for each option.

        The line of an option has the place where it is set as a comment.
        """
        rows = []
        for override in self.overrides:
            key, origin = self.origins[override.name]
            key_note = "" if key in (override.name, origin.place) else f", {key}"
            rows.append(
                (
                    f"  {override.name} = {format_value(to_plain(override.value))}",
                    f"{origin}{key_note}",
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
        option_names = []
        for name in self.origins:
            if re.match(rf"(unknown option ')?{re.escape(name)}\b", text):
                option_names.append(name)
        if not option_names:
            return error
        key, origin = self.origins[max(option_names, key=len)]
        return ConfigError(f"{text} ({origin}{'' if key in option_names else f', {key}'})")


def read_stack(
    names: Sequence[str],
    library: SectionLibrary,
    base: RunConfig,
    assignments: Iterable[Override] = (),
    file: OptionFile | None = None,
) -> SectionStack:
    """Merge config sections with assignments from the command line and from another program's file.

    Later values override earlier ones, in this order: the options in `file`, the sections `names`
    one after the other, and the `assignments` on the command line. `base` is the default
    configuration. Raises `ConfigError` for unknown sections and keys, and for settings that weft
    does not support. The message states the file and line of an invalid key, and suggests similar
    names.
    """
    option_reader = OptionReader(base)
    dialect = dialects.find("open_assistant")
    reader: StackReader = (
        option_reader if dialect is None else dialect.OpenAssistantReader(option_reader)
    )
    sections = reader.choose_sections(names, library)
    if file is not None:
        for override in file.assignments:
            option_reader.values[override.name] = StackedValue(override.value, file.place, "", -1)
    for rank, section in enumerate(sections):
        reader.read_section(section, rank)
    if option_reader.problems:
        absence = [] if dialect is not None else [dialects.describe_absence("open_assistant")]
        raise ConfigError("\n".join([*option_reader.problems, *absence]))
    for override in assignments:
        reader.read_override(override, len(sections))
    stack = SectionStack(tuple(section.name for section in sections))
    _resolve_options(option_reader, reader.map_foreign_keys(), stack)
    return stack


def find_mode(config: RunConfig) -> str:
    """Return the kind of training that a configuration describes: sft, rm or rl."""
    return MODES.get(config.algorithm, MODES.get(config.generation.split(".")[0], "rl"))


@dataclass(frozen=True)
class ForeignOption:
    """Value of weft's option that is set by the key `key` of another program.

    `short_key` is the form of the key that messages show after the place where it is set.
    """

    value: StackedValue
    key: str
    short_key: str


@dataclass(frozen=True)
class ForeignOptions:
    """Options that are set by keys of another program, by the name of weft's option.

    `notes` are for the user. `option_file` is a file of options that the keys name, or None.
    """

    options: Mapping[str, ForeignOption] = field(default_factory=dict)
    notes: Sequence[str] = ()
    option_file: str | None = None


class OptionFile(Protocol):
    """Protocol for files of another program that set options of weft.

    `place` names the file in messages. `assignments` are the options, and `notes` tell the user how
    the file is read. `describe_autos` returns notes about the values that weft uses for keys set to
    "auto" in the file.
    """

    @property
    def place(self) -> str: ...

    @property
    def assignments(self) -> Sequence[Override]: ...

    @property
    def notes(self) -> Sequence[str]: ...

    def describe_autos(self, config: RunConfig) -> list[str]: ...


class StackReader(Protocol):
    """Protocol for readers of config sections and of the assignments on the command line."""

    def choose_sections(
        self, names: Sequence[str], library: SectionLibrary
    ) -> list[ConfigSection]: ...

    def read_section(self, section: ConfigSection, rank: int) -> None: ...

    def read_override(self, override: Override, rank: int) -> None: ...

    def map_foreign_keys(self) -> ForeignOptions: ...


class OptionReader:
    """Reader that collects weft's options from config sections and the command line.

    `values` are the collected options by dotted name, such as `model.optimizer.lr`, and `problems`
    are error messages. `base` is the default configuration.
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
        """Add the options that a key of a section sets, or a problem for each unknown name.

        `other_names` are additional names to suggest for an unknown name.
        """
        for assignment in flatten({key: value}):
            path = _split_key_path(assignment.name, section)
            stacked = StackedValue(
                assignment.value, section.find_location(*path), section.name, rank, source=section
            )
            if is_spelling(assignment.name, self.base):
                self.values[assignment.name] = stacked
            else:
                self.problems.append(
                    f"{stacked.place}: section {section.name!r}: "
                    f"{self._describe_unknown_key(assignment.name, other_names)}"
                )

    def read_override(self, override: Override, rank: int, other_names: Iterable[str] = ()) -> None:
        """Add an assignment from the command line.

        `rank` is above the ranks of all sections. Raises `ConfigError` for an unknown key; the
        message may suggest one of `other_names`.
        """
        name = override.name
        if override.removed:
            self.remove(name)
        elif not is_spelling(name, self.base):
            raise ConfigError(self._describe_unknown_key(name, other_names))
        self.values[name] = StackedValue(override.value, COMMAND_LINE, "", rank, override.removed)

    def remove(self, name: str) -> None:
        """Remove the values of the option `name` and of all options in the group `name`."""
        for key in list(self.values):
            if key == name or key.startswith(f"{name}."):
                del self.values[key]

    def map_foreign_keys(self) -> ForeignOptions:
        return ForeignOptions()

    def _describe_unknown_key(self, name: str, other_names: Iterable[str]) -> str:
        options = [leaf.name for leaf in iterate_options(self.base)]
        last_part = name.rsplit(".", 1)[-1]
        same_last_part = []
        for option in options:
            if option.rsplit(".", 1)[-1] == last_part:
                same_last_part.append(option)
        known_names = [*other_names, *collect_renamed(), *collect_translators(), *options]
        similar = list(dict.fromkeys([*same_last_part, *find_nearest(name, known_names)]))[:3]
        if similar:
            hint = f"did you mean {' or '.join(similar)}?"
        else:
            hint = "weft quickstart NAME --help lists every option"
        return f"unknown key {name!r}; {hint}"


def _split_key_path(name: str, section: ConfigSection) -> tuple[str, ...]:
    """Return the YAML keys that lead to an option in a section, outermost first.

    `name` is the dotted name of the option. For example, the keys for `actor.optimizer.lr` are
    `("actor.optimizer", "lr")` if the section sets `lr` under the key "actor.optimizer". If the
    section has no key for the option itself, the result is the keys for the longest prefix of
    `name`, such as `("actor.optimizer",)`, or an empty tuple.
    """
    best: tuple[str, ...] = ()
    for path in section.lines:
        keys = tuple(str(part) for part in path)
        joined = ".".join(keys)
        if (name == joined or name.startswith(f"{joined}.")) and len(joined) > len(".".join(best)):
            best = keys
    return best


def _resolve_options(
    option_reader: OptionReader, foreign: ForeignOptions, stack: SectionStack
) -> None:
    """Fill `stack` with the options, origins and notes that result from the collected keys.

    The options that other programs' keys set are added, and alternative spellings are translated.
    If several keys set the same option, the command line overrides the sections, and a later
    section overrides an earlier one. Raises `ConfigError` if two keys in one section, or two on the
    command line, set the same option.
    """
    stack.option_file = foreign.option_file
    values = dict(option_reader.values)
    keys = {name: name for name in values}
    for name, option in foreign.options.items():
        candidate = option.value
        older = values.get(name)
        if older is None or older.rank < candidate.rank:
            values[name], keys[name] = candidate, option.short_key
        elif older.rank == candidate.rank:
            raise ConfigError(
                f"{older.place}: {name} and {option.key} ({candidate.place}) are the same option; "
                "set one of them"
            )
    # The spellings of the batch size set one option together: all get the highest of their ranks.
    batch_rank = max((values[name].rank for name in BATCH_SPELLINGS if name in values), default=0)
    ranks = {
        name: batch_rank if name in BATCH_SPELLINGS else each.rank for name, each in values.items()
    }
    assignments = [Override(name, each.value, each.removed) for name, each in values.items()]
    translation = build_translation(assignments, option_reader.base, ranks)
    # Store the origin of each option.
    for target, spelling in translation.user_spellings.items():
        if spelling not in values:  # a key inside a mapping that was set as a whole
            spelling = next(name for name in values if spelling.startswith(f"{name}."))
        stack.origins[target] = (keys[spelling], values[spelling])
    excluded_options = _find_excluded_options(stack)
    stack.overrides = [each for each in translation.overrides if each.name not in excluded_options]
    stack.origins = {
        name: each for name, each in stack.origins.items() if name not in excluded_options
    }
    # Keep notes about spellings only for words of the command line.
    words = set()
    for name, each in values.items():
        if each.place == COMMAND_LINE and name in option_reader.values:
            words.add(name)
    for note in translation.notes:
        if note.split(" ")[0] in words:
            stack.notes.append(note)
    stack.notes += foreign.notes
    _name_run(stack, option_reader.base)


def _find_excluded_options(stack: SectionStack) -> set[str]:
    """Return the options to drop because a later section sets a mutually exclusive option.

    For example, `optimizer.end_lr` excludes `optimizer.min_lr_ratio`.
    """
    excluded_options: set[str] = set()
    for suffixes in EXCLUSIVE:
        groups: dict[str, list[str]] = {}
        for name in stack.origins:
            for suffix in suffixes:
                if name == suffix or name.endswith(f".{suffix}"):
                    groups.setdefault(name.removesuffix(suffix), []).append(name)
        for names in groups.values():
            highest_rank = max(stack.origins[name][1].rank for name in names)
            for name in names:
                if stack.origins[name][1].rank < highest_rank:
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

    This is the quickstart of a built-in recipe among the sections, or else the name of an option
    group `ppo`, `grpo` or `dpo` in them. Otherwise, it is guessed from keys that only other
    programs' RL or reward trainers read. The default is "sft".
    """
    recipe_algorithms = []
    for section in sections:
        if section.file.startswith(f"{SHIPPED}:{READY}/"):
            recipe_algorithms.append(section.name.partition("-")[0])
    algorithms = []
    for name in ("ppo", "grpo", "dpo"):
        if any(name in section.values for section in sections):
            algorithms.append(name)
    if recipe_algorithms or algorithms:
        return (recipe_algorithms or algorithms)[0]
    dialect = dialects.find("open_assistant")
    return "sft" if dialect is None else str(dialect.guess_quickstart(sections))
