"""Data sources in config sections, with the settings of the command line applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from weft import registry
from weft.cli import dialects, overrides
from weft.cli.sections import ConfigSection, SectionFile, SectionLibrary
from weft.cli.stack import SectionStack, find_mode, guess_quickstart, read_stack
from weft.data.loader import resolve_sources
from weft.data.named import find_entry
from weft.data.spec import DatasetSpec, SourceSpec
from weft.errors import ConfigError, find_nearest
from weft.options import read, to_plain

QUICKSTARTS = {"sft": "sft", "rm": "rw", "rl": "ppo"}  # mode -> quickstart
DATASET_PREFIX = "datasets."  # prefix of a dataset's name on the command line


@dataclass(frozen=True)
class NamedDataSettings:
    """Command-line settings for named datasets.

    Attributes:
        folders: Additional folders of YAML files with config sections.
        data_path: Path of a local copy of the datasets, or None.
        parameters: Values set by `datasets.NAME.PARAMETER=value`, keyed by dataset and parameter.
        options: Assignments to `dataset.*`.
    """

    folders: Sequence[str] = ()
    data_path: str | None = None
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    options: Sequence[overrides.Override] = ()

    @cached_property
    def library(self) -> SectionLibrary:
        return SectionLibrary.from_folders(self.folders)

    def find_section(self, name: str) -> ConfigSection | None:
        """Return the section `name`, or None if it does not exist."""
        return self.library.get(name) if name in self.library.list_names() else None

    def list_sources(self, section: ConfigSection, mode: str) -> list[SourceSpec]:
        """Return the data sources that a config section lists.

        `mode` is the kind of training. The section and the command line can set
        `dataset.valid_split`, the share of rows held out for validation; it applies only to sources
        without validation data. Raises `ConfigError` if the section lists no datasets.
        """
        dialect = dialects.find("open_assistant")
        foreign_keys = () if dialect is None else dialect.DATA_KEYS
        data_values = {}
        for key, value in section.values.items():
            if key in foreign_keys or key.split(".")[0] == "dataset":
                data_values[key] = value
        library = SectionLibrary((("", SectionFile((replace(section, values=data_values),))),))
        base = registry.quickstarts.get(QUICKSTARTS[mode])()
        values = _collect_values(read_stack([section.name], library, base, self.options))
        spec = read(DatasetSpec(), values.get("dataset", {}))
        sources = []
        for source in resolve_sources(spec):
            if source.path or source.named:
                sources.append(source)
        if not sources:
            raise ConfigError(
                f"{section.find_location()}: section {section.name!r} lists no datasets"
            )
        valid_share = spec.valid_split or None
        result: list[SourceSpec] = []
        for source in sources:
            result.append(
                source
                if source.valid_split is not None or source.valid_path
                else replace(source, valid_split=valid_share)
            )
        return result

    def apply_to(self, sources: Sequence[SourceSpec], files: Sequence[str]) -> list[SourceSpec]:
        """Return the sources with the command line's settings applied.

        The values in `parameters` replace those of the sources. If `data_path` is not None, the
        paths of local copies in it replace the paths of named datasets. `files` are the user's
        dataset catalogues, which can define aliases of datasets. Raises `ConfigError` if a
        parameter is set for a dataset that is not in `sources`.
        """
        names = [source.named for source in sources if source.named]
        parameters_by_name = {
            _resolve_alias(name, files): parameters for name, parameters in self.parameters.items()
        }
        for name in parameters_by_name.keys() - set(names):
            similar = find_nearest(name, names)
            raise ConfigError(
                f"datasets.{name}: is not among the named datasets; "
                + (
                    f"did you mean datasets.{similar[0]}?"
                    if similar
                    else f"they are {', '.join(names)}"
                )
            )
        updated_sources = list(sources)
        with_files: Set[str] = frozenset()
        if parameters_by_name:  # parameters are named as in Open-Assistant's lists of datasets
            dialect = dialects.load("open_assistant")
            with_files = dialect.find_datasets_with_files(parameters_by_name)
            for index, source in enumerate(sources):
                if source.named in parameters_by_name:
                    updated_sources[index] = dialect.replace_parameters(
                        source, parameters_by_name[source.named]
                    )
        if self.data_path is None:
            return updated_sources
        return _with_copies(updated_sources, self.data_path, with_files)


NO_SETTINGS = NamedDataSettings()


def build_stacked_options(
    names: Sequence[str],
    folders: Sequence[str],
    mode: str | None,
    assignments: Sequence[overrides.Override],
) -> tuple[dict[str, Any], str]:
    """Return the options and the training mode of the run that the sections `names` describe.

    `assignments` override the sections, and `folders` are additional folders of sections. The mode
    is "sft", "rm" or "rl". If `mode` is None, it is guessed from the sections' keys.
    """
    library = SectionLibrary.from_folders(folders)
    if mode:
        quickstart = QUICKSTARTS[mode]
    else:
        quickstart = guess_quickstart([library.get(name) for name in names])
    base = registry.quickstarts.get(quickstart)()
    return _collect_values(read_stack(names, library, base, assignments)), find_mode(base)


def group_by_dataset(
    assignments: Sequence[overrides.Override],
) -> tuple[dict[str, dict[str, Any]], list[overrides.Override]]:
    """Separate the parameters of named datasets from other assignments.

    Returns the parameters that `datasets.NAME.PARAMETER=value` sets, grouped by dataset name, and
    the other assignments. Raises `ConfigError` if a name begins with `datasets.` but does not have
    this form.
    """
    parameters_by_name: dict[str, dict[str, Any]] = {}
    others = []
    for assignment in assignments:
        if not assignment.name.startswith(DATASET_PREFIX):
            others.append(assignment)
            continue
        name, _, parameter = assignment.name.removeprefix(DATASET_PREFIX).rpartition(".")
        if not name or not parameter:
            raise ConfigError(
                f"{assignment.name}: write datasets.NAME.PARAMETER=value, such as "
                f"datasets.webgpt.fraction=0.5"
            )
        parameters_by_name.setdefault(name, {})[parameter] = to_plain(assignment.value)
    return parameters_by_name, others


def _collect_values(stack: SectionStack) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for each in stack.overrides:
        overrides.merge(values, each)
    return values


def _resolve_alias(name: str, files: Sequence[str]) -> str:
    """Return the name of the dataset with the alias `name`, or `name` if it is not an alias."""
    try:
        return find_entry(name, files).name
    except ConfigError:
        return name


def _with_copies(
    sources: Sequence[SourceSpec], data_path: str, fixed_names: Set[str] = frozenset()
) -> list[SourceSpec]:
    """Return the sources with the paths of named datasets replaced by local copies in `data_path`.

    If there is only one named dataset, `data_path` can be the copy itself. Otherwise, `data_path`
    is a folder with copies of some or all datasets. In this case, a dataset keeps its path if the
    folder has no copy of it, if the path is absolute, or if its name is in `fixed_names` (datasets
    whose path the user has set). Raises `ConfigError` if the folder has no copy of any dataset.
    """
    named_sources = [source for source in sources if source.named]
    folder = Path(data_path).expanduser()
    if len(named_sources) == 1:
        path = _find_file(folder, named_sources[0]) or data_path
        return [replace(source, path=path) if source.named else source for source in sources]
    copies: list[str | None] = []
    for source in sources:
        if source.named:
            copies.append(_find_file(folder, source) or _find_folder(folder, source))
        else:
            copies.append(None)
    if not any(copies):
        dataset_names = ", ".join(str(source.named) for source in named_sources)
        if named_sources:
            problem = (
                f"has no folder named {dataset_names}; write datasets.NAME.data_path=FILE for one "
                "copy"
            )
        else:
            problem = "is a copy of a named dataset; add --datasets NAME"
        raise ConfigError(f"data_path={data_path}: {problem}")
    result: list[SourceSpec] = []
    for source, copy in zip(sources, copies, strict=True):
        result.append(
            replace(source, path=copy)
            if copy and source.named not in fixed_names and not _is_elsewhere(source)
            else source
        )
    return result


def _is_elsewhere(source: SourceSpec) -> bool:
    return Path(source.path).expanduser().is_absolute()


def _find_file(folder: Path, source: SourceSpec) -> str | None:
    """Return the path of the source's file in `folder`, or None if it is not there.

    The subfolder that is named after the dataset is searched first, then `folder` itself.
    """
    if not source.path or _is_elsewhere(source):
        return None
    candidates = (folder / str(source.named) / source.path, folder / source.path)
    return next((str(candidate) for candidate in candidates if candidate.exists()), None)


def _find_folder(folder: Path, source: SourceSpec) -> str | None:
    candidate = folder / str(source.named)
    return str(candidate) if candidate.exists() else None
