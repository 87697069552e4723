"""Catalogue entry of a named dataset: its source, its reader, and the options of the reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from weft.errors import ConfigError, find_nearest

MODES = ("sft", "rm", "rl")
SEVERAL = ("modes", "aliases")  # fields with several values


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
    separator: str | None = None  # text between the records of a plain text file
    rows_in: str | None = None  # key of the list of rows, if a file is one JSON object
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
        known = {spec.name for spec in fields(cls)} - {"name", "options"}
        given = {key: item for key, item in value.items() if key in known}
        options = {}
        for key, item in value.items():
            if key not in known:
                options[key] = item
        for key in ("reader", "modes"):
            if not given.get(key):
                close = find_nearest(key, options, 1)
                hint = f"; is {close[0]!r} meant?" if close else ""
                raise ConfigError(f"{where}: {name}: {key} is missing{hint}")
        for key, item in given.items():
            if key in SEVERAL:
                given[key] = tuple(item) if isinstance(item, list | tuple) else (item,)
            elif item is not None and not isinstance(item, str):
                raise ConfigError(f"{where}: {name}: {key}={item!r}: must be text")
        wrong = [mode for mode in given["modes"] if mode not in MODES]
        if wrong:
            raise ConfigError(f"{where}: {name}: modes={wrong}: must be of {', '.join(MODES)}")
        if given.get("repo") and given.get("url"):
            raise ConfigError(
                f"{where}: {name}: repo and url exclude each other; keep the one that it comes from"
            )
        return cls(name=name, options=options, **given)

    @property
    def origin(self) -> str:
        """Web address of the dataset and the name of its configuration, for messages."""
        if self.repo:
            config = f", configuration {self.config}" if self.config else ""
            return f"https://huggingface.co/datasets/{self.repo}{config}"
        return self.url or "no public place"
