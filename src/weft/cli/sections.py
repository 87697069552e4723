"""Named sections of settings: where their YAML files lie, and what stands in them, each key with
its file and line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from weft.errors import ConfigError, nearest
from weft.reading import MOST_YAML, files_below, parse_yaml, read_text

OWN_FOLDER = "configs"  # of the working directory
SHIPPED = "weft"  # how the folder of the shipped sections is called in messages
READY = "ready"  # the folder among them of whole recipes, one a file
SUFFIXES = (".yaml", ".yml")
# The groups of trlX's configuration, which its files have at their top.
TRLX_GROUPS = ("train", "model", "tokenizer", "optimizer", "scheduler", "method")

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Section:
    """Settings under one name. `lines` has the line of every key below them, by its path."""

    name: str
    file: str
    line: int
    values: Mapping[str, Any]
    lines: Mapping[KeyPath, int] = field(repr=False, default_factory=dict)
    shipped: bool = False
    trlx: bool = False  # the groups of trlX's configuration

    def place(self, *path: str | int) -> str:
        """`FILE:LINE` of the value at `path`, or of the nearest one above it."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.file}:{self.lines[path] if path else self.line}"


@dataclass(frozen=True)
class Contents:
    """What a file holds: its sections, and values that stand outside of any."""

    sections: tuple[Section, ...]
    strays: tuple[tuple[str, int], ...] = ()
    file: str = ""

    @property
    def wrong(self) -> list[str]:
        """What is wrong with the values outside of sections."""
        return [
            f"{self.file}:{line}: {stray!r} stands outside of any section; indent it under a name"
            for stray, line in self.strays
        ]


@dataclass(frozen=True)
class Library:
    """The sections that there are: those of `./configs`, then those of the folders named, then
    those weft ships.
    """

    # (folder, a file's contents), in the order of search
    contents: tuple[tuple[str, Contents], ...]

    @classmethod
    def find(cls, folders: Sequence[str] = (), broken: list[str] | None = None) -> Library:
        """Read every YAML file.

        Raises `ConfigError` for a folder that is not there, and for files that are not YAML unless
        `broken` takes what is wrong with them.
        """
        found: list[tuple[str, Contents]] = []
        for folder in ([OWN_FOLDER] if Path(OWN_FOLDER).is_dir() else []) + list(folders):
            if not Path(folder).is_dir():
                raise ConfigError(f"--config-dir {folder}: there is no such folder")
            inside = yaml_files(Path(folder), f"--config-dir {folder}")
            found += [(folder, contents) for path in inside for contents in _read(path, broken)]
        return cls((*found, *((SHIPPED, contents) for contents in _shipped())))

    def all(self) -> Iterator[Section]:
        """Every section that a name stands for, in the order of search."""
        return (self.get(name) for name in self.names())

    def names(self) -> list[str]:
        """What the sections are called, in the order of search."""
        return list(
            dict.fromkeys(
                section.name for _, contents in self.contents for section in contents.sections
            )
        )

    def get(self, name: str) -> Section:
        """The first section of this name.

        Raises `ConfigError` for unknown names, and where one folder has it in two forms.
        """
        same = [(folder, c, s) for folder, c in self.contents for s in c.sections if s.name == name]
        if not same:
            raise self._unknown(name)
        folder, contents, section = same[0]
        for wrong in contents.wrong:
            raise ConfigError(wrong)
        for other_folder, _, other in same[1:]:
            if other_folder == folder and dict(other.values) != dict(section.values):
                raise ConfigError(
                    f"section {name!r} is in {section.file}:{section.line} and, with other "
                    f"values, in "
                    f"{other.file}:{other.line}; rename one of them"
                )
        return section

    def _unknown(self, name: str) -> ConfigError:
        known = {s.name: s for _, contents in self.contents for s in contents.sections}
        close = nearest(name, known)
        if Path(name).suffix in SUFFIXES and Path(name).is_file():
            return ConfigError(
                f"--configs {name}: takes names of sections; a file of options is read with "
                f"--config {name}"
            )
        hint = " or ".join(f"{each} ({known[each].file}:{known[each].line})" for each in close)
        looked = list(dict.fromkeys(folder for folder, _ in self.contents))
        return ConfigError(
            f"unknown section {name!r}; "
            + (f"did you mean {hint}?" if close else "weft config ls lists them")
            + f" (looked in {', '.join(looked)})"
        )


def yaml_files(folder: Path, what: str) -> list[Path]:
    """The YAML files in a folder and those below it.

    Raises `ConfigError` where there are very many files.
    """
    return sorted(
        path
        for path in files_below(folder, what, ConfigError)
        if path.suffix in SUFFIXES and path.is_file()
    )


def _read(path: Path, broken: list[str] | None) -> Iterator[Contents]:
    try:
        yield read_file(path)
    except ConfigError as error:
        if broken is None:
            raise
        broken.append(str(error))


def read_file(path: Path, shown: str = "") -> Contents:
    """The sections of a YAML file.

    One with options at its top is a single section, named after the file.

    Raises `ConfigError` with file and line for what is not YAML.
    """
    shown = shown or str(path)
    values, node = parse_yaml(read_text(path, shown, ConfigError, MOST_YAML), shown, ConfigError)
    if values is None or node is None:
        return Contents(())
    if not isinstance(values, dict):
        raise ConfigError(
            f"{shown}:1: holds {type(values).__name__}; write sections as NAME: with key: value "
            f"below"
        )
    lines = dict(_lines(node, ()))
    return _contents({str(key): value for key, value in values.items()}, lines, path, shown)


def _contents(
    values: Mapping[str, Any], lines: Mapping[KeyPath, int], path: Path, shown: str
) -> Contents:
    from weft.cli.open_assistant.keys import KEYS  # whose keys a file may have at its top

    shipped = shown.startswith(f"{SHIPPED}:")
    groups = {name for name, value in values.items() if isinstance(value, Mapping)}
    plain = [
        name
        for name, value in values.items()
        if not isinstance(value, Mapping) and value is not None
    ]
    trlx = set(values) <= set(TRLX_GROUPS) and "method" in values
    if trlx or (plain and groups <= {*KEYS, *_option_groups()}):
        return Contents((Section(path.stem, shown, 1, values, lines, shipped, trlx),))
    sections = tuple(
        Section(
            name,
            shown,
            lines.get((name,), 1),
            {str(key): each for key, each in (values[name] or {}).items()},
            {key[1:]: line for key, line in lines.items() if key[0] == name and len(key) > 1},
            shipped,
        )
        for name in values
        if name not in plain
    )
    return Contents(sections, tuple((name, lines.get((name,), 1)) for name in plain), shown)


@cache
def _option_groups() -> frozenset[str]:
    """The groups that options of the shipped quickstarts stand in, such as `model` and `dataset`."""
    from weft import registry
    from weft.cli.reference import SHIPPED as QUICKSTARTS
    from weft.options import leaves

    configs = [registry.quickstarts.get(name)() for name in QUICKSTARTS]
    return frozenset(
        leaf.name.split(".")[0] for config in configs for leaf in leaves(config) if "." in leaf.name
    )


def _lines(node: yaml.Node, path: KeyPath) -> Iterable[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = (*path, str(key.value))
            yield below, key.start_mark.line + 1
            yield from _lines(value, below)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, index), value.start_mark.line + 1
            yield from _lines(value, (*path, index))


def shipped_file(shown: str = "") -> Path:
    """The file of a shipped section, by the name that messages give it; the folder for ""."""
    return Path(str(files("weft") / "recipes" / shown.removeprefix(f"{SHIPPED}:")))


def recipe_file(path: str) -> str:
    """`path`; or where `recipes/NAME.yaml` is not in the working directory the recipe of that name
    that weft ships.
    """
    place = Path(path)
    shipped = shipped_file(f"{READY}/{place.name}")
    if str(place.parent) == "recipes" and not place.exists() and shipped.is_file():
        return str(shipped)
    return path


def _shipped() -> Iterator[Contents]:
    for folder in ("", f"{READY}/"):
        for path in sorted(shipped_file(folder).glob("*.yaml")):
            yield read_file(path, f"{SHIPPED}:{folder}{path.name}")
