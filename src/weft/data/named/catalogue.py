"""Catalogue of named datasets: built-in entries, registered entries and entries in YAML files.

An entry of the catalogue has a source, a reader, and the options of the reader.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, build_unknown_name_error, find_nearest
from weft.reading import read_yaml
from weft.registry import named_datasets

MODES = ("sft", "rm", "rl")
LIST_FIELDS = ("modes", "aliases")


@dataclass(frozen=True)
class CatalogueEntry:
    """Entry of the catalogue: where a named dataset comes from, and how to read it.

    An entry without `repo` and `url` can only be read from a local copy.

    Attributes:
        name: name of the dataset
        reader: name of the reader, a function that converts the rows
        modes: modes in which the dataset can be used: sft, rm, rl
        repo: name of the dataset on the hub, OWNER/NAME
        config: configuration of the dataset on the hub
        revision: revision of the dataset on the hub
        url: https address of a file to download
        train: training split, or a pattern of file names such as `*x*.json`
        valid: validation split, or a pattern of file names; if None, some training rows are held
            out for validation
        separator: text between the records of a plain text file
        rows_in: key of the list of rows, for JSON files that consist of one object
        aliases: other names of the dataset
        licence: licence of the dataset, which is shown in messages about the download
        note: remark for the user
        options: default options of the reader, which a user's options override
    """

    name: str
    reader: str
    modes: tuple[str, ...]
    repo: str | None = None
    config: str | None = None
    revision: str | None = None
    url: str | None = None
    train: str = "train"
    valid: str | None = None
    separator: str | None = None
    rows_in: str | None = None
    aliases: tuple[str, ...] = ()
    licence: str | None = None
    note: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, name: str, value: Any, where: str) -> CatalogueEntry:
        """Parse an entry of a YAML file. Keys that are not fields are options of the reader.

        Raises `ConfigError` naming `where` and the entry if the entry is invalid.
        """
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{where}: {name}: must be a mapping such as {{reader: pairs, repo: OWNER/NAME, "
                f"modes: [rm]}}"
            )
        field_names = {spec.name for spec in fields(cls)} - {"name", "options"}
        values = {key: item for key, item in value.items() if key in field_names}
        options = {}
        for key, item in value.items():
            if key not in field_names:
                options[key] = item
        for key in ("reader", "modes"):
            if not values.get(key):
                close = find_nearest(key, options, 1)
                hint = f"; is {close[0]!r} meant?" if close else ""
                raise ConfigError(f"{where}: {name}: {key} is missing{hint}")
        for key, item in values.items():
            if key in LIST_FIELDS:
                values[key] = tuple(item) if isinstance(item, list | tuple) else (item,)
            elif item is not None and not isinstance(item, str):
                raise ConfigError(f"{where}: {name}: {key}={item!r}: must be text")
        unknown = [mode for mode in values["modes"] if mode not in MODES]
        if unknown:
            raise ConfigError(f"{where}: {name}: modes={unknown}: must be of {', '.join(MODES)}")
        if values.get("repo") and values.get("url"):
            raise ConfigError(
                f"{where}: {name}: repo and url exclude each other; keep the one that it comes from"
            )
        return cls(name=name, options=options, **values)

    @property
    def origin(self) -> str:
        """Web address of the dataset and the name of its configuration, for messages."""
        if self.repo:
            config = f", configuration {self.config}" if self.config else ""
            return f"https://huggingface.co/datasets/{self.repo}{config}"
        return self.url or "no public place"


FOLDER = Path(__file__).parent / "entries"
# languages of pairs in names such as wmt2019_zh-en
LANGUAGES = (
    "ar",
    "de",
    "fr",
    "en",
    "it",
    "nl",
    "tr",
    "ru",
    "ms",
    "ko",
    "ja",
    "zh",
)
PAIR = "{source}-{target}"


def find_entry(name: str, files: Sequence[str] = ()) -> CatalogueEntry:
    """Return the catalogue entry of the dataset `name`.

    Entries in the user's `files` override others of the same name. Raises `ConfigError` if there is
    no such entry, suggesting similar names, or if the name contains an unknown language (as in
    wmt2019_zh-xx).
    """
    entries = _load_entries(files)
    match = entries.get(name) or entries.get(name.lower())
    if match is not None and PAIR not in match.name:
        return match
    for entry in entries.values():
        if PAIR in entry.name and re.match(entry.name.removesuffix(PAIR), name):
            return _build_language_pair(entry, name)
    raise build_unknown_name_error("dataset", name, entries)


def list_names(mode: str | None = None, files: Sequence[str] = ()) -> list[str]:
    """Return the sorted names of all entries, or only of those for `mode` (sft, rm or rl).

    `files` are the user's YAML files with further entries. Aliases are not included.
    """
    if mode is not None and mode not in MODES:
        raise build_unknown_name_error("mode", mode, MODES)
    return sorted(
        {
            entry.name
            for entry in _load_entries(files).values()
            if mode is None or mode in entry.modes
        }
    )


def read_entries(file: Path) -> dict[str, CatalogueEntry]:
    """Read a YAML file of entries, `NAME: {reader: .., repo: .., ...}`, and return them by name.

    Raises `ConfigError` if an entry is invalid.
    """
    values = read_yaml(file, f"dataset.named_file={file}", ConfigError)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{file}: must contain entries as NAME: {{reader: .., repo: ..}}")
    result: dict[str, CatalogueEntry] = {}
    for name, value in values.items():
        result[str(name)] = CatalogueEntry.parse(str(name), value, str(file))
    return result


def _load_entries(files: Sequence[str]) -> dict[str, CatalogueEntry]:
    """Return all catalogue entries by name and alias.

    Entries in `files` override registered entries, which override built-in ones.
    """
    entries: dict[str, CatalogueEntry] = dict(_load_shipped())
    for name in named_datasets.list_names():
        value = named_datasets.get(name)
        if isinstance(value, CatalogueEntry):
            entries[name] = replace(value, name=name)
        else:
            entries[name] = CatalogueEntry.parse(name, value, "register_named_dataset")
    for file in files:
        entries |= read_entries(Path(file).expanduser())
    aliases = {}
    for entry in entries.values():
        for alias in entry.aliases:
            aliases[alias] = entry
    return {**aliases, **entries}


@cache
def _load_shipped() -> Mapping[str, CatalogueEntry]:
    shipped_entries: dict[str, CatalogueEntry] = {}
    for file in sorted(FOLDER.glob("*.yaml")):
        entries = read_entries(file)
        duplicates = shipped_entries.keys() & entries.keys()
        assert not duplicates, f"{file.name}: {', '.join(duplicates)} are in another file too"
        shipped_entries |= entries
    return shipped_entries


def _build_language_pair(entry: CatalogueEntry, name: str) -> CatalogueEntry:
    """Return the catalogue entry for one language pair of a translation dataset.

    `entry` is the dataset's entry for all language pairs. `name` ends with the language pair, as in
    wmt2019_zh-en. Raises `ConfigError` if a language is unknown.
    """
    pair = name[len(entry.name) - len(PAIR) :]
    languages = pair.split("-")
    if (
        len(languages) != 2
        or languages[0] == languages[1]
        or any(language not in LANGUAGES for language in languages)
    ):
        example = entry.name.replace(PAIR, "zh-en")
        raise ConfigError(
            f"dataset {name!r}: {pair!r} is not a pair of known languages; write two of "
            f"{', '.join(LANGUAGES)}, such as {example}"
        )
    source, target = languages
    if entry.config:
        config = entry.config.format(source=source, target=target)
    else:
        config = None
    return replace(
        entry,
        name=name,
        config=config,
        options={**entry.options, "source": source, "target": target},
    )
