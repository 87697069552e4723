"""How a configuration field carries its help text and its rule. Configurations are dataclasses beside what they configure."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any

from weft.errors import ConfigError


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    choices: Sequence[Any] | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    check: Callable[[Any], str | None] | None = None,
    hidden: bool = False,
) -> Any:
    """A dataclass field with a help text and a rule that `validate` enforces.

    `check` returns what is wrong with a value, or None. `hidden` marks fields that weft fills in, absent from `--help`.
    A mutable default (list, dict, dataclass) is copied for every instance.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "at_least": at_least,
        "at_most": at_most,
        "check": check,
        "hidden": hidden,
    }
    if default is MISSING:
        return field(metadata=metadata)
    if isinstance(default, (list, dict)) or is_dataclass(default):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def problem(spec: Field[Any], value: Any) -> str | None:
    """What is wrong with `value` for the field `spec`, as `rule; fix`, or None."""
    rules = spec.metadata
    if value is None or not rules:
        return None
    if rules.get("choices") is not None and value not in rules["choices"]:
        return f"must be one of {', '.join(map(str, rules['choices']))}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if rules.get("at_least") is not None and not value >= rules["at_least"]:
            return f"must be at least {rules['at_least']}"
        if rules.get("at_most") is not None and not value <= rules["at_most"]:
            return f"must be at most {rules['at_most']}"
    check = rules.get("check")
    return check(value) if check else None


def validate(config: Any, path: str = "") -> None:
    """Check every field of a dataclass, nested ones too. Raises `ConfigError` naming the dotted option, value and rule."""
    for spec in fields(config):
        value, name = getattr(config, spec.name), f"{path}{spec.name}"
        if is_dataclass(value) and not isinstance(value, type):
            validate(value, f"{name}.")
        wrong = problem(spec, value)
        if wrong:
            raise ConfigError(f"{name}={value!r}: {wrong}")
