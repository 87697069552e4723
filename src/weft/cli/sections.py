"""Named config sections: groups of settings in YAML files, with the file and line of each key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from weft.cli import dialects
from weft.errors import ConfigError, find_nearest
from weft.reading import MAX_YAML, iterate_files, parse_yaml, read_text

OWN_FOLDER = "configs"  # folder of the user's sections, in the working directory
SHIPPED = "weft"  # name of the built-in sections in messages, in place of a folder
READY = "ready"  # subfolder of the built-in sections with complete recipes, one per file
SUFFIXES = (".yaml", ".yml")

KeyPath = tuple[str | int, ...]  # keys and list indices that lead to a value, outermost first


@dataclass(frozen=True)
class ConfigSection:
    """Named group of settings in a YAML file.

    `line` is the line of its name, and `lines` maps the path of every key in it to a line number.
    `file` is the path in messages; that of a built-in section begins with `weft:`.
    """

    name: str
    file: str
    line: int
    values: Mapping[str, Any]
    lines: Mapping[KeyPath, int] = field(repr=False, default_factory=dict)
    shipped: bool = False
    foreign: bool = False  # True for a whole file in the format of another program

    def find_location(self, *path: str | int) -> str:
        """Return `FILE:LINE` of the key at `path`, or of its nearest parent with a known line."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.file}:{self.lines[path] if path else self.line}"


@dataclass(frozen=True)
class SectionFile:
    """Contents of a YAML file with config sections.

    `strays` are (key, line number) of the keys outside of any section.
    """

    sections: tuple[ConfigSection, ...]
    strays: tuple[tuple[str, int], ...] = ()
    file: str = ""

    @property
    def problems(self) -> list[str]:
        """Error messages for the keys outside of any section."""
        result: list[str] = []
        for stray, line in self.strays:
            result.append(
                f"{self.file}:{line}: {stray!r} is outside of any section; indent it under a name"
            )
        return result


@dataclass(frozen=True)
class SectionLibrary:
    """All available config sections.

    A name is looked up in `./configs`, then in the folders of `--config-dir`, then among the
    built-in sections.
    """

    # (folder, contents of a file), in search order
    contents: tuple[tuple[str, SectionFile], ...]

    @classmethod
    def from_folders(
        cls, folders: Sequence[str] = (), problems: list[str] | None = None
    ) -> SectionLibrary:
        """Read the built-in YAML files and all YAML files in `./configs` and in `folders`.

        Raises `ConfigError` for a missing folder or an invalid YAML file. If `problems` is given,
        messages about invalid files are appended to it instead.
        """
        entries: list[tuple[str, SectionFile]] = []
        for folder in ([OWN_FOLDER] if Path(OWN_FOLDER).is_dir() else []) + list(folders):
            if not Path(folder).is_dir():
                raise ConfigError(f"--config-dir {folder}: there is no such folder")
            paths = list_yaml_files(Path(folder), f"--config-dir {folder}")
            for path in paths:
                for contents in _read_contents(path, problems):
                    entries.append((folder, contents))
        return cls((*entries, *((SHIPPED, contents) for contents in _read_shipped())))

    def iterate_sections(self) -> Iterator[ConfigSection]:
        """Iterate over the sections in search order, one for each name."""
        return (self.get(name) for name in self.list_names())

    def list_names(self) -> list[str]:
        """Return the names of the sections, in search order."""
        return list(
            dict.fromkeys(
                section.name for _, contents in self.contents for section in contents.sections
            )
        )

    def get(self, name: str) -> ConfigSection:
        """Return the first section named `name` in search order.

        Raises `ConfigError` if the name is unknown, if the section's file has keys outside of any
        section, or if two sections with this name in the same folder have different values.
        """
        matches = []
        for folder, contents in self.contents:
            for section in contents.sections:
                if section.name == name:
                    matches.append((folder, contents, section))
        if not matches:
            raise self._build_unknown_error(name)
        folder, contents, section = matches[0]
        for problem in contents.problems:
            raise ConfigError(problem)
        for other_folder, _, other in matches[1:]:
            if other_folder == folder and dict(other.values) != dict(section.values):
                raise ConfigError(
                    f"section {name!r} is in {section.file}:{section.line} and, with other values, "
                    f"in {other.file}:{other.line}; rename one of them"
                )
        return section

    def _build_unknown_error(self, name: str) -> ConfigError:
        sections = {}
        for _, contents in self.contents:
            for section in contents.sections:
                sections[section.name] = section
        similar = find_nearest(name, sections)
        if Path(name).suffix in SUFFIXES and Path(name).is_file():
            return ConfigError(
                f"--configs {name}: needs names of sections; a file of options is read with "
                f"--config {name}"
            )
        hint = " or ".join(
            f"{similar_name} ({sections[similar_name].file}:{sections[similar_name].line})"
            for similar_name in similar
        )
        searched = list(dict.fromkeys(folder for folder, _ in self.contents))
        return ConfigError(
            f"unknown section {name!r}; "
            + (f"did you mean {hint}?" if similar else "weft config ls lists them")
            + f" (looked in {', '.join(searched)})"
        )


def list_yaml_files(folder: Path, subject: str) -> list[Path]:
    """Return the YAML files in a folder and its subfolders.

    Raises `ConfigError` if there are too many files; the message begins with `subject`.
    """
    return sorted(
        path
        for path in iterate_files(folder, subject, ConfigError)
        if path.suffix in SUFFIXES and path.is_file()
    )


def _read_contents(path: Path, problems: list[str] | None) -> Iterator[SectionFile]:
    """Yield the contents of a file, or nothing if it is invalid and `problems` gets the message."""
    try:
        yield read_file(path)
    except ConfigError as error:
        if problems is None:
            raise
        problems.append(str(error))


def read_file(path: Path, display_path: str = "") -> SectionFile:
    """Return the sections of a YAML file.

    If the file has options at its top level, the whole file is one section, which is named after
    the file. `display_path` is the path in messages. Raises a `ConfigError` with file and line if
    the YAML is invalid.
    """
    display_path = display_path or str(path)
    values, node = parse_yaml(
        read_text(path, display_path, ConfigError, MAX_YAML), display_path, ConfigError
    )
    if values is None or node is None:
        return SectionFile(())
    if not isinstance(values, dict):
        raise ConfigError(
            f"{display_path}:1: contains {type(values).__name__}; write sections as NAME: with "
            "key: value below"
        )
    lines = dict(_iterate_key_lines(node, ()))
    return _build_contents(
        {str(key): value for key, value in values.items()}, lines, path, display_path
    )


def _build_contents(
    values: Mapping[str, Any], lines: Mapping[KeyPath, int], path: Path, display_path: str
) -> SectionFile:
    is_shipped = display_path.startswith(f"{SHIPPED}:")
    group_names = set()
    for name, value in values.items():
        if isinstance(value, Mapping):
            group_names.add(name)
    option_names = []
    for name, value in values.items():
        if not isinstance(value, Mapping) and value is not None:
            option_names.append(name)
    dialect = dialects.find("open_assistant")
    is_foreign = dialect is not None and dialect.is_trlx_file(values)
    foreign_keys = () if dialect is None else dialect.KEYS
    if is_foreign or (option_names and group_names <= {*foreign_keys, *_load_option_groups()}):
        return SectionFile(
            (ConfigSection(path.stem, display_path, 1, values, lines, is_shipped, is_foreign),)
        )
    sections = []
    for name, value in values.items():
        if name in option_names:
            continue
        section_values = {str(key): each for key, each in (value or {}).items()}
        section_lines = {}
        for path_of_key, line in lines.items():
            if path_of_key[0] == name and len(path_of_key) > 1:
                section_lines[path_of_key[1:]] = line
        start = lines.get((name,), 1)
        sections.append(
            ConfigSection(name, display_path, start, section_values, section_lines, is_shipped)
        )
    strays = tuple((name, lines.get((name,), 1)) for name in option_names)
    return SectionFile(tuple(sections), strays, display_path)


@cache
def _load_option_groups() -> frozenset[str]:
    """Return the option groups of the built-in quickstarts, such as `model` and `dataset`."""
    from weft import registry
    from weft.cli.reference import SHIPPED as QUICKSTARTS
    from weft.options import iterate_options

    configs = [registry.quickstarts.get(name)() for name in QUICKSTARTS]
    return frozenset(
        leaf.name.split(".")[0]
        for config in configs
        for leaf in iterate_options(config)
        if "." in leaf.name
    )


def _iterate_key_lines(node: yaml.Node, path: KeyPath) -> Iterable[tuple[KeyPath, int]]:
    """Yield (path, line number) of every key and list item below `node`, whose path is `path`."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            key_path = (*path, str(key.value))
            yield key_path, key.start_mark.line + 1
            yield from _iterate_key_lines(value, key_path)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, index), value.start_mark.line + 1
            yield from _iterate_key_lines(value, (*path, index))


def find_shipped_file(display_path: str) -> Path:
    """Return the path of a built-in file from its path in messages.

    This is `weft:ready/NAME.yaml` for a recipe, and `weft:NAME.yaml` for other sections.
    """
    name = display_path.removeprefix(f"{SHIPPED}:")
    if name.split("/")[0] == READY:
        return Path(str(files("weft") / "recipes" / name))
    return Path(dialects.load("open_assistant").RECIPES) / name


def find_recipe_file(path: str) -> str:
    """Return `path`, or the built-in recipe if `path` is a missing file `recipes/NAME.yaml`."""
    recipe = Path(path)
    shipped = find_shipped_file(f"{READY}/{recipe.name}")
    if str(recipe.parent) == "recipes" and not recipe.exists() and shipped.is_file():
        return str(shipped)
    return path


def list_example_sections() -> tuple[str, ...]:
    """Return names of built-in sections for examples in help texts.

    Together they configure a run. The last one is the section of the model.
    """
    dialect = dialects.find("open_assistant")
    return ("sft-tldr-pythia-1b",) if dialect is None else dialect.EXAMPLE_SECTIONS


def _read_shipped() -> Iterator[SectionFile]:
    dialect = dialects.find("open_assistant")
    for path in () if dialect is None else sorted(dialect.RECIPES.glob("*.yaml")):
        yield read_file(path, f"{SHIPPED}:{path.name}")
    for path in sorted(Path(str(files("weft") / "recipes" / READY)).glob("*.yaml")):
        yield read_file(path, f"{SHIPPED}:{READY}/{path.name}")
