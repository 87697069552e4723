"""Parse `key=value ...` in Hydra's grammar, and YAML files, for `weft.options.read`.

Both are converted to nested plain values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.options import CommandLineValue, UnparsedValue, to_plain
from weft.reading import describe_cause, explain_read_errors, read_yaml, shorten

WORD = re.compile(r"\+{0,2}(?P<name>[A-Za-z_][\w.-]*)=(?P<text>.*)", re.DOTALL)
SWEEP = re.compile(r"[a-z]+\(")  # sweep functions of Hydra such as `choice(..)` and `range(..)`
NUMBER_LIST_OPTION = "device_mesh"  # text option for which a list of numbers is converted to text


@dataclass(frozen=True)
class Override:
    """Assignment of a value to an option.

    `removed` is True for an assignment of the form `~key`, which restores the default. `typed` is
    the word on the command line, or None if the assignment comes from a file.
    """

    name: str
    value: Any
    removed: bool = False
    typed: str | None = field(default=None, compare=False)


def parse(words: Sequence[str]) -> list[Override]:
    """Parse the assignments on the command line, in order.

    Some values are not valid in Hydra's grammar, or mean a sweep over several runs. They are kept
    as literal text or as lists of strings, and are rejected later by options that do not accept
    such values. Raises `ConfigError` if a value cannot be kept in this way, such as `[1`.
    """
    # Imported here because the import takes 0.2 seconds.
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    overrides = []
    for word in words:
        try:
            parsed = parser.parse_override(word)
        except HydraException as error:
            overrides.append(_parse_literally(word, _build_syntax_error(word, error)))
            continue
        except (ValueError, RecursionError) as error:
            # for example a number with 5,000 digits, or deeply nested brackets
            raise ConfigError(f"{shorten(word)!r}: {describe_cause(error)}") from error
        if parsed.is_sweep_override():
            overrides.append(
                _parse_literally(word, _build_sweep_error(word, parsed.key_or_group), sweep=True)
            )
            continue
        value: Any = parsed.value()
        if isinstance(value, (bool, int, float)) or (value is None and "=" in word):
            value = CommandLineValue(value, word.split("=", 1)[1].strip())
        overrides.append(
            Override(parsed.key_or_group, value, removed=parsed.is_delete(), typed=word)
        )
    return overrides


def describe_repeated(overrides: Sequence[Override]) -> list[str]:
    """Return a note for each option that is set to several different values on the command line.

    The note says that the last value is used.
    """
    words: dict[str, list[str]] = {}
    for each in overrides:
        # Mappings are merged, so they do not replace each other.
        if each.typed is not None and not isinstance(each.value, Mapping):
            words.setdefault(each.name, []).append(shorten(each.typed))
    notes: list[str] = []
    for repeated in words.values():
        # Of equal words, keep the last.
        distinct = list(dict.fromkeys(reversed(repeated)))[::-1]
        if len(distinct) > 1:
            listed = f"{', '.join(distinct[:-1])} and {distinct[-1]}"
            quantity = "both" if len(distinct) == 2 else "all"
            notes.append(f"{listed} are {quantity} set; the last counts")
    return notes


def _build_sweep_error(word: str, name: str) -> ConfigError:
    return ConfigError(
        f"{word}: this is a sweep over several values, but one command starts one run; write a "
        f"list as {name}=[1,2], or quote a text with commas: {name}=\"'a,b'\""
    )


def _parse_literally(word: str, error: ConfigError, *, sweep: bool = False) -> Override:
    """Return an assignment whose value is the literal text after `=` in `word`.

    Raises `error` if the text is empty, contains quotes or interpolations, or begins with a bracket
    but is not a list. With `sweep`, `error` is also raised if the text is a call of one of Hydra's
    sweep functions, such as `range(1,5)`.
    """
    match = WORD.fullmatch(word)
    if match is None or any(sign in match["text"] for sign in ("'", '"', "${")):
        raise error
    text = match["text"].strip()
    if text.startswith("[") and text.endswith("]"):
        items = _split_items(text[1:-1])
    else:
        items = None
    if items is None and (not text or text[0] in "[{" or (sweep and SWEEP.match(text))):
        raise error
    literal = None if items is not None else text
    return Override(
        match["name"],
        CommandLineValue(literal or text, text, UnparsedValue(literal, items, sweep, error)),
        typed=word,
    )


def _split_items(text: str) -> tuple[str, ...] | None:
    """Split a string at commas outside brackets.

    Returns None if an item is empty or brackets do not match.
    """
    depth = 0
    parts = [""]
    for character in text:
        depth += (character in "[({") - (character in "])}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    items = tuple(part.strip() for part in parts)
    return items if all(items) and not depth else None


def _build_syntax_error(word: str, error: Exception) -> ConfigError:
    if "=" not in word:
        word = shorten(word)
        return ConfigError(
            f"{word!r}: is not of the form key=value; write for example {word}=VALUE, or see --help"
        )
    name, _ = word.split("=", 1)
    reason = str(error).splitlines()[0]
    return ConfigError(
        f"{shorten(word)!r}: cannot be read ({shorten(reason)}); quote texts with special "
        f"characters: {name}=\"'...'\""
    )


def merge(values: dict[str, Any], override: Override) -> None:
    """Apply one override to the nested `values`.

    Missing groups in its dotted name, such as `actor.optimizer`, are created.
    """
    *groups, option = override.name.split(".")
    group_values = values
    if option == NUMBER_LIST_OPTION and isinstance(override.value, list | tuple):
        override = replace(override, value=",".join(str(to_plain(each)) for each in override.value))
    for group in groups:
        nested = group_values.setdefault(group, {})
        if not isinstance(nested, dict):
            if override.removed:
                return
            nested = group_values[group] = {}
        group_values = nested
    if override.removed:
        group_values.pop(option, None)
    elif isinstance(override.value, Mapping) and isinstance(group_values.get(option), dict):
        group_values[option] = {**group_values[option], **override.value}
    else:
        group_values[option] = override.value


def read_file(path: str) -> dict[str, Any]:
    """Return the nested values in a YAML file (`--config FILE`), such as a run's config.yaml.

    Raises `ConfigError` if the file cannot be read or is not a mapping.
    """
    values = read_yaml(Path(path).expanduser(), f"--config {path}", ConfigError)
    if values is None:
        raise ConfigError(f"--config {path}: is empty; write options as key: value")
    if not isinstance(values, dict):
        raise ConfigError(
            f"--config {path}: must contain options as key: value, but contains "
            f"{type(values).__name__}"
        )
    return values


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[Override]:
    """Flatten nested values into assignments to dotted names, such as `actor.optimizer.lr`.

    A mapping with a colon in one of its keys, such as `FILE.py:function`, is not flattened: it is
    the value of one option.
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and value and not any(":" in str(name) for name in value):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield Override(f"{prefix}{key}", value)


def resolve(values: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with each `${other.option}` replaced by the value of that option.

    `defaults` has the values of the options that are not set in `values`. Raises `ConfigError` for
    unknown names.
    """
    if "${" not in repr(values):
        return values
    from omegaconf import OmegaConf

    with explain_read_errors("an interpolation ${...} cannot be resolved", ConfigError):
        assigned = OmegaConf.create(_replace_scalars(values))
        all_values = OmegaConf.merge(OmegaConf.create(dict(defaults)), assigned)
        resolved = OmegaConf.to_container(all_values, resolve=True)
    assert isinstance(resolved, dict)
    return _select_entries({str(key): value for key, value in resolved.items()}, values)


def _replace_scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with each `CommandLineValue` replaced by its plain value, for OmegaConf."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result[key] = _replace_scalars(value)
        elif isinstance(value, CommandLineValue):
            result[key] = value.value
        else:
            result[key] = value
    return result


def _select_entries(resolved: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `resolved` whose keys are in `template`, including nested entries.

    A `CommandLineValue` in `template` is kept in place of the resolved value, because it also has
    the text that the user typed.
    """
    selected: dict[str, Any] = {}
    for key, value in template.items():
        if isinstance(value, Mapping):
            selected[key] = _select_entries(resolved[key], value)
        else:
            selected[key] = value if isinstance(value, CommandLineValue) else resolved[key]
    return selected
