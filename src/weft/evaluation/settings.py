"""Named sampling settings, either built into weft or read from the user's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError, build_unknown_name_error, find_nearest
from weft.options import iterate_options, read, validate
from weft.reading import read_yaml

# Named as in Open-Assistant's sampling reports.
SHIPPED: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"greedy": True},
    "k50": {"top_k": 50, "top_p": 0.95},
    "magic_numbers": {"top_k": 9607, "top_p": 0.242},
    "nucleus9": {"top_p": 0.9, "temperature": 0.8},
    "warm": {"temperature": 0.7, "top_p": 0.9},
    "free": {},
}
# Options of `transformers` that weft's sampler does not support, with the value that disables each.
NEUTRAL: Mapping[str, Any] = {
    "num_beams": 1,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "penalty_alpha": 0.0,
    "no_repeat_ngram_size": 0,
    "diversity_penalty": 0.0,
    "length_penalty": 1.0,
    "early_stopping": False,
}


@dataclass(frozen=True)
class SamplingSettings:
    """Named set of sampling options, either built into weft or read from a file.

    `spec` has the values of all options. `file_values` has only the options that the set itself
    defines, exactly as they were written.
    """

    name: str
    spec: GenerationSpec
    file_values: Mapping[str, Any] = field(default_factory=dict)


def build_shipped(name: str, base: GenerationSpec) -> SamplingSettings:
    """Return the built-in settings called `name`; options that they do not set come from `base`.

    Raises `ConfigError`, which suggests similar names, if the name is unknown.
    """
    if name not in SHIPPED:
        raise build_unknown_name_error("sampling setting", name, SHIPPED)
    return _parse_settings(name, SHIPPED[name], base, name)


def choose(words: Sequence[str], base: GenerationSpec) -> tuple[list[SamplingSettings], list[str]]:
    """Return the sampling settings that `words` select, and notes on settings that are left out.

    Each word is the name of built-in settings, or the path of a YAML or JSON file with settings.
    The result is in the order of `words`. Settings in a file are left out if they need an option
    that weft does not support. Raises `ConfigError` for unknown names and for duplicate names, and
    if no settings remain.
    """
    chosen = list[SamplingSettings]()
    notes = list[str]()
    for word in words:
        if word.endswith((".yaml", ".yml", ".json")):
            file_settings, left_out = read_file(word, base)
            chosen += file_settings
            notes += left_out
        else:
            chosen.append(build_shipped(word, base))
    names = [settings.name for settings in chosen]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"two sampling settings are called {twice!r}; give one of them another name"
        )
    if not chosen:
        raise ConfigError("\n".join(["no sampling setting is left", *notes]))
    return chosen, notes


def read_file(path: str, base: GenerationSpec) -> tuple[list[SamplingSettings], list[str]]:
    """Return the settings in a file, and notes on settings that are left out.

    The file has the form `{NAME: {top_k: 50, ...}}`, or Open-Assistant's form `{default:
    {generate_args}, configurations: [{name, generate_args}]}`. Options that the file does not set
    come from `base`. Settings are left out if they need an option that weft does not support, such
    as beam search or a repetition penalty. Raises `ConfigError` for unknown options and invalid
    values.
    """
    values = read_yaml(Path(path).expanduser(), f"--settings {path}", ConfigError)
    if not isinstance(values, Mapping) or not values:
        raise ConfigError(
            f"{path}: must contain settings by name, such as {{warm: {{temperature: 0.7}}}}"
        )
    settings = list[SamplingSettings]()
    notes = list[str]()
    for name, given in _list_entries(path, values):
        missing = []
        for key, value in NEUTRAL.items():
            if key in given and given[key] != value:
                missing.append(f"{key}={given[key]}")
        if missing:
            notes.append(
                f"{path}: {name} is left out: weft does not sample with {', '.join(missing)}"
            )
            continue
        settings.append(_parse_settings(name, given, base, f"{path}: {name}"))
    return settings, notes


def _list_entries(path: str, values: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    if "configurations" not in values:
        entries = [(str(name), value) for name, value in values.items()]
    else:
        common = _check_mapping(
            path,
            "default",
            _check_mapping(path, "default", values.get("default")).get("generate_args"),
        )
        listed = values["configurations"]
        if not isinstance(listed, Sequence) or not all(
            isinstance(each, Mapping) and "name" in each for each in listed
        ):
            raise ConfigError(f"{path}: configurations must be a list of {{name, generate_args}}")
        entries = []
        for each in listed:
            entries.append(
                (
                    str(each["name"]),
                    {
                        **common,
                        **_check_mapping(path, str(each["name"]), each.get("generate_args")),
                    },
                )
            )
    return [(name, _check_mapping(path, name, value)) for name, value in entries]


def _check_mapping(path: str, name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"{path}: {name} must be a mapping of sampling options, not {value!r}")
    return value or {}


def _parse_settings(
    name: str, given: Mapping[str, Any], base: GenerationSpec, where: str
) -> SamplingSettings:
    values = {}
    for key, value in given.items():
        if key not in NEUTRAL and value is not None:
            values[key] = value
    sampled = values.pop("do_sample", None)
    if sampled is not None and "greedy" not in values:
        values["greedy"] = not sampled
    if values.get("temperature") == 0:
        values |= {"temperature": 1.0, "greedy": True}
    known = [leaf.name for leaf in iterate_options(base)]
    for key in values:
        if key not in known:
            close = find_nearest(key, known)
            raise ConfigError(
                f"{where}: no sampling option {key!r}; "
                f"{f'did you mean {close[0]}?' if close else ', '.join(known)}"
            )
    try:
        spec = read(replace(base), values)
        validate(spec)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return SamplingSettings(name, spec, dict(given))
