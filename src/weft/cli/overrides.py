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
SWEEP = re.compile(r"[a-z]+\(")  # choice(..), range(..)
NUMBER_LIST_OPTION = "device_mesh"  # number lists that a text option accepts as text


@dataclass(frozen=True)
class Override:
    """Assignment of a value to an option.

    `removed` is True for an assignment of the form `~key`, which restores the default. `typed` is
    the original command-line word, or None if the assignment comes from a file.
    """

    name: str
    value: Any
    removed: bool = False
    typed: str | None = field(default=None, compare=False)


def parse(words: Sequence[str]) -> list[Override]:
    """Parse the assignments on the command line, in order.

    Hydra rejects some assignments as invalid, and reads others as a sweep over several runs. Their
    values are kept as literal text or as lists of strings, and are rejected later if the options do
    not accept them. Raises `ConfigError` if a value cannot be kept in this way, such as `[1`.
    """
    # Importing takes 0.2 seconds, so only when needed.
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
        except (
            ValueError,
            RecursionError,
        ) as error:  # for example a number with 5,000 digits, or deeply nested brackets
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
    """Return a note for each option that is set more than once, with different values.

    The note says that the last value is used.
    """
    words: dict[str, list[str]] = {}
    for each in overrides:
        # mappings are merged
        if each.typed is not None and not isinstance(each.value, Mapping):
            words.setdefault(each.name, []).append(shorten(each.typed))
    result: list[str] = []
    for given in (list(dict.fromkeys(reversed(words)))[::-1] for words in words.values()):
        if len(given) > 1:
            result.append(
                f"{', '.join(given[:-1])} and {given[-1]} are all set; the last counts"
                if len(given) > 2
                else f"{given[0]} and {given[1]} are both set; the last counts"
            )
    return result


def _build_sweep_error(word: str, name: str) -> ConfigError:
    return ConfigError(
        f"{word}: this is a sweep over several values, but one command starts one run; write a "
        f"list as {name}=[1,2], or quote a text with commas: {name}=\"'a,b'\""
    )


def _parse_literally(word: str, error: ConfigError, *, sweep: bool = False) -> Override:
    """Return an assignment whose value is the literal text in `word`.

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
    whole = None if items is not None else text
    return Override(
        match["name"],
        CommandLineValue(whole or text, text, UnparsedValue(whole, items, sweep, error)),
        typed=word,
    )


def _split_items(text: str) -> tuple[str, ...] | None:
    """Split a string at commas outside brackets.

    Returns None if an item is empty or brackets do not match.
    """
    depth = 0
    parts = [""]
    for letter in text:
        depth += (letter in "[({") - (letter in "])}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    items = tuple(part.strip() for part in parts)
    return items if all(items) and not depth else None


def _build_syntax_error(word: str, error: Exception) -> ConfigError:
    if "=" not in word:
        word = shorten(word)
        return ConfigError(
            f"{word!r}: is not of the form key=value; write for example {word}=VALUE, or see --help"
        )
    name, _ = word.split("=", 1)
    where = str(error).splitlines()[0]
    return ConfigError(
        f"{shorten(word)!r}: cannot be read ({shorten(where)}); quote texts with special "
        f"characters: {name}=\"'...'\""
    )


def merge(values: dict[str, Any], override: Override) -> None:
    """Apply one override to the nested `values`.

    The groups in the dotted name, such as `actor.optimizer`, are created if they are missing.
    """
    *groups, last = override.name.split(".")
    inner = values
    if last == NUMBER_LIST_OPTION and isinstance(override.value, list | tuple):
        override = replace(override, value=",".join(str(to_plain(each)) for each in override.value))
    for group in groups:
        below = inner.setdefault(group, {})
        if not isinstance(below, dict):
            if override.removed:
                return
            below = inner[group] = {}
        inner = below
    if override.removed:
        inner.pop(last, None)
    elif isinstance(override.value, Mapping) and isinstance(inner.get(last), dict):
        inner[last] = {**inner[last], **override.value}
    else:
        inner[last] = override.value


def read_file(path: str) -> dict[str, Any]:
    """Return the nested values in a YAML file (`--config FILE`), such as a run's config.yaml.

    Raises `ConfigError` if the file cannot be read or is not a mapping.
    """
    values = read_yaml(Path(path).expanduser(), f"--config {path}", ConfigError)
    if values is None:
        raise ConfigError(f"--config {path}: is empty; write options as key: value")
    if not isinstance(values, dict):
        raise ConfigError(
            f"--config {path}: must contain options as key: value, but contains {type(values).__name__}"
        )
    return values


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[Override]:
    """Flatten nested values into assignments to dotted names, such as `actor.optimizer.lr`.

    A mapping is not flattened if one of its keys contains a colon, as in a mapping from
    `FILE.py:function` to a weight.
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
        own = OmegaConf.create(_replace_scalars(values))
        whole = OmegaConf.merge(OmegaConf.create(dict(defaults)), own)
        resolved = OmegaConf.to_container(whole, resolve=True)
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


def _select_entries(resolved: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `resolved` whose keys are in `wanted`, including nested entries.

    A `CommandLineValue` in `wanted` is returned instead of the resolved value, because it also has
    the text that the user typed.
    """
    selected: dict[str, Any] = {}
    for key, value in wanted.items():
        if isinstance(value, Mapping):
            selected[key] = _select_entries(resolved[key], value)
        else:
            selected[key] = value if isinstance(value, CommandLineValue) else resolved[key]
    return selected
