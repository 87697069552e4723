"""Command lines of EasyLM's training scripts: parsing of flags, and results of the translation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite
from pathlib import Path
from typing import Any

from weft.compat.easylm import flags as tables
from weft.compat.easylm.flag_rules import FlagRule
from weft.compat.easylm.flags import TrainingCommand
from weft.errors import ConfigError, find_nearest

# flags of `weft quickstart` that are passed on, without a value and with one
PASSED_FLAGS = ("--dry-run", "--verbose", "-v", "--print-script", "--debug")
PASSED_VALUES = ("--cfg", "--import", "--config", "--configs", "--config-dir")
# texts that need quotes, because they mean null, a Boolean or a number otherwise
RESERVED = ("null", "none", "true", "false", "yes", "no", "on", "off", "nan", "inf")
PLAIN_TEXT = re.compile(r"[A-Za-z_/.][\w/.:@-]*")
SWITCHES = {"true": True, "1": True, "t": True, "false": False, "0": False, "f": False}


@dataclass(frozen=True)
class ParsedFlags:
    """Parsed command line of EasyLM's script `name`.

    `values` maps the flags that are set to their values. `passed` are the words to pass on to
    `weft quickstart`.
    """

    name: str
    command: TrainingCommand
    values: Mapping[str, Any]
    passed: tuple[str, ...] = ()

    def has(self, flag: str) -> bool:
        return flag in self.values

    def get(self, flag: str) -> Any:
        """Return the value of a flag: the user's, or EasyLM's default."""
        return self.values.get(flag, self.command.get_default(flag))

    @property
    def accumulation(self) -> int:
        """Number of batches per update; in PPO and online DPO, of minibatches."""
        steps: int = self.get("optimizer.accumulate_gradient_steps")
        return steps

    def count_updates(self, steps: int) -> int:
        """Convert a number of EasyLM's steps to the number of weft's steps, rounded up.

        EasyLM counts batches, and weft counts updates of `accumulate_gradient_steps` batches. In
        PPO and online DPO, both count batches of prompts.
        """
        return steps if self.command.samples else ceil(steps / self.accumulation)


def parse_flags(name: str, words: Sequence[str]) -> ParsedFlags:
    """Parse `--flag=value`, `--flag value`, `--switch` and `--noswitch`.

    Words `option=value` and flags of `weft quickstart` are passed on. An empty value means that the
    flag is not set. Raises `ConfigError` for an unknown flag, and for a value of the wrong type or
    out of range.
    """
    command = tables.TRAINING[name]
    values: dict[str, Any] = {}
    passed = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, text = word.partition("=")
        if flag in PASSED_FLAGS or (equals and not word.startswith("-")):
            passed.append(word)
            continue
        if flag in PASSED_VALUES:
            passed.append(word)
            passed += [] if equals or not rest else [rest.pop(0)]
            continue
        key = flag.removeprefix("--")
        is_switch = _is_switch(command, key)
        if not is_switch and _is_switch(command, key.removeprefix("no")) and not equals:
            key, text = key.removeprefix("no"), "false"
        elif not word.startswith("--") or key not in command.flags:
            raise _build_unknown_error(name, word)
        elif not equals and is_switch:
            text = "true"
        elif not equals:
            if not rest:
                raise ConfigError(f"--{key}: needs a value; write --{key}=VALUE")
            text = rest.pop(0)
        rule = command.flags[key]
        if text == "" and not rule.may_be_empty:
            values.pop(key, None)
        else:
            values[key] = _parse_value(key, text, rule)
    return ParsedFlags(name, command, values, tuple(passed))


def _is_switch(command: TrainingCommand, key: str) -> bool:
    return key in command.flags and command.flags[key].value_type is bool


def _build_unknown_error(name: str, word: str) -> ConfigError:
    flag = word.partition("=")[0].lstrip("-")
    known = tables.TRAINING[name].flags
    close = find_nearest(flag, known)
    others = [other for other, each in tables.TRAINING.items() if flag in each.flags]
    if not word.startswith("-"):
        hint = "flags are written --flag=value, options of weft option=value"
    elif others:
        hint = f"it is a flag of {', '.join(others)}"
    elif close:
        hint = "did you mean " + " or ".join(f"--{each}" for each in close) + "?"
    else:
        hint = f"weft easylm {name} --help lists the flags"
    return ConfigError(f"{name}: unknown flag {word.partition('=')[0]!r}; {hint}")


def _parse_value(key: str, text: str, rule: FlagRule) -> Any:
    kind = rule.value_type
    if kind is bool:
        if text.lower() not in SWITCHES:
            raise ConfigError(f"--{key}={text}: must be true or false")
        return SWITCHES[text.lower()]
    if kind is str:
        return text
    try:
        number = int(text) if kind is int else float(text)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise ConfigError(f"--{key}={text}: must be {expected}") from None
    if not isfinite(number):
        raise ConfigError(f"--{key}={text}: must be a finite number")
    if rule.limits is not None and number not in rule.limits:
        raise ConfigError(f"--{key}={text}: must be {rule.limits}")
    return number


@dataclass(frozen=True)
class ModelConversion:
    """Stream that is converted to a Hugging Face directory before a run.

    The fields are the arguments of `weft.compat.easylm.prepared_models.prepare_model`.
    """

    load_checkpoint: str
    config: str
    update: str
    tokenizer: str | None
    is_reward_model: bool

    def __str__(self) -> str:
        return self.load_checkpoint or "a model without weights"

    def locate(self, folder: Path) -> Path:
        """Return the Hugging Face directory below `folder` that `write` writes."""
        from weft.compat.easylm.prepared_models import locate_model

        is_reward_model = self.is_reward_model
        return locate_model(*self._values, folder, is_reward_model=is_reward_model)

    def write(self, folder: Path, *, weights: bool = True) -> Path:
        """Convert the stream to a Hugging Face directory below `folder`, and return its path.

        Without `weights`, an empty file is written in their place.
        """
        from weft.compat.easylm.prepared_models import prepare_model

        is_reward_model = self.is_reward_model
        return prepare_model(
            *self._values, folder, is_reward_model=is_reward_model, weights=weights
        )

    @property
    def _values(self) -> tuple[str, str, str, str | None]:
        return self.load_checkpoint, self.config, self.update, self.tokenizer


@dataclass
class TranslatedCommand:
    """Options of `weft quickstart` that a command line of EasyLM is translated to.

    Attributes:
        quickstart: name of the quickstart
        options: values by option name
        streams: streams to convert, by the role whose `path` the result becomes
        environment: variables that the run needs
        notes: notes for the user, one line each
        passed: words of the command line that are passed on unchanged
    """

    quickstart: str
    options: dict[str, Any] = field(default_factory=dict)
    streams: dict[str, ModelConversion] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    passed: tuple[str, ...] = ()

    def format_words(self) -> list[str]:
        """Return the words of the command `weft ...`."""
        assigned = [f"{name}={format_value(value)}" for name, value in self.options.items()]
        return ["quickstart", self.quickstart, *assigned, *self.passed]


def format_value(value: Any) -> str:
    """Return a value in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {format_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(format_value, value)) + "]"
    text = str(value)
    if not isinstance(value, str):
        return text
    if PLAIN_TEXT.fullmatch(text) and text.lower() not in RESERVED:
        return text
    # Backslashes stay as they are, unless a quote follows them.
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)
    return "'" + re.sub(r"(\\+)$", r"\1\1", text) + "'"
