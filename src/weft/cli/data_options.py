"""Options of `weft data`, which define the data of a run.

They come from config files, config sections, dataset names, and assignments on the command line.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from weft.cli import overrides
from weft.cli.parsing import split_names
from weft.data.spec import DatasetSpec, TokenizerSpec
from weft.errors import ConfigError
from weft.options import option, read, validate

MODES = ("sft", "rm", "rl")
ROLES = ("model", "actor")  # roles whose tokenizer produces a run's token ids
ASSIGNMENT = re.compile(r"\+*(datasets(_extra)?\.[\w.{}+-]+|[A-Za-z_][\w.]*)=")
COPY_PREFIX = "data_path="  # prefix of the path of a named dataset's local copy


@dataclass
class DataConfig:
    """Configuration of `weft data`: the options that define a run's data."""

    dataset: DatasetSpec = option(DatasetSpec(), "data")
    tokenizer: TokenizerSpec = option(TokenizerSpec(), "tokenizer")
    seed: int = option(1, "seed of the order of rows, and of sampling them")


def add_dataset_options(command: argparse.ArgumentParser, *, modes: bool = True) -> None:
    """Add the options of commands that read named datasets.

    The option `--mode` is added only if `modes` is True.
    """
    command.add_argument(
        "--datasets",
        nargs="+",
        metavar="NAME",
        help="names of datasets, or of sections that list datasets, or all (docs/named-datasets.md); "
        "data_path=FILE_OR_FOLDER reads a copy, datasets.NAME.PARAMETER=value sets a parameter",
    )
    if modes:
        command.add_argument(
            "--mode",
            choices=MODES,
            help="purpose of the datasets (default sft; with --configs by the sections' keys)",
        )
    command.add_argument(
        "--yes", action="store_true", help="download missing datasets without asking"
    )


def add_stack_options(command: argparse.ArgumentParser) -> None:
    """Add `--configs` and `--config-dir`, which select config sections that list datasets."""
    command.add_argument(
        "--configs",
        nargs="+",
        metavar="NAME",
        help="read the datasets of these sections, given as for a quickstart",
    )
    command.add_argument(
        "--config-dir",
        dest="folders",
        action="append",
        default=[],
        metavar="DIR",
        help="folder of sections, searched after ./configs",
    )


def read_command_line(arguments: argparse.Namespace) -> tuple[DataConfig, list[str]]:
    """Return the data options and the data paths of a command line.

    Raises `ConfigError` for unknown options, or if no data are named.
    """
    words = [*arguments.words, *take_assignments(arguments, "datasets", "configs")]
    assignments = []
    for word in words:
        if ASSIGNMENT.match(word) and not word.startswith(COPY_PREFIX):
            assignments.append(word)
    copies = []
    for word in words:
        if word.startswith(COPY_PREFIX):
            copies.append(word.removeprefix(COPY_PREFIX))
    paths = [word for word in words if not ASSIGNMENT.match(word)]
    config = _read_config(arguments, assignments)
    if arguments.tokenizer is not None:
        config.tokenizer.path = arguments.tokenizer
    if arguments.type is not None:
        config.dataset.type = arguments.type
    if paths:
        config.dataset = replace(
            config.dataset, path=None, train_path=None, sources=None, named=None, valid_path=None
        )
    _set_named_datasets(config, arguments, assignments, copies[-1] if copies else None)
    config.dataset = replace(
        config.dataset, train_bs_n_seqs=1, train_tokens_per_batch=None, shuffle=False
    )
    validate(config)
    spec = config.dataset
    if not (paths or spec.path or spec.train_path or spec.sources or spec.named or spec.args):
        raise ConfigError(
            "no data are named: give a PATH, --datasets, --config, --configs, or "
            "dataset.sources=..."
        )
    return config, paths


def take_assignments(arguments: argparse.Namespace, *options: str) -> list[str]:
    """Remove assignments such as `key=value` from the values of list options, and return them.

    `options` are the names of the list options in `arguments`. argparse adds assignments that
    follow a list option, such as `--datasets`, to the values of the option.
    """
    words = list[str]()
    for name in options:
        words_of_option = getattr(arguments, name) or []
        for word in words_of_option:
            if ASSIGNMENT.match(word):
                words.append(word)
        setattr(arguments, name, [word for word in words_of_option if not ASSIGNMENT.match(word)])
    return words


def _read_config(arguments: argparse.Namespace, assignments: list[str]) -> DataConfig:
    """Return the options in `--config` and `--configs`, overridden by the assignments."""
    config = DataConfig()
    if arguments.config is not None:
        config = read(config, _extract_data_options(overrides.read_file(str(arguments.config))))
    overrides_given = overrides.parse(assignments)
    if arguments.datasets or arguments.configs:
        from weft.cli.stacked_data import build_stacked_options, group_by_dataset

        # Parameters of datasets are applied later, to the datasets that the sections list.
        _, overrides_given = group_by_dataset(overrides_given)
    if arguments.configs:
        tokenizer_overrides = [
            each for each in overrides_given if each.name.startswith("tokenizer.")
        ]
        names = split_names(arguments.configs)
        stack_overrides = [each for each in overrides_given if each not in tokenizer_overrides]
        values, arguments.mode = build_stacked_options(
            names, arguments.folders, arguments.mode, stack_overrides
        )
        config = read(config, _extract_data_options(values))
        if arguments.command == "counts":
            config.tokenizer.path = None  # only rows are counted, unless a tokenizer is named
        overrides_given = tokenizer_overrides
    arguments.mode = arguments.mode or MODES[0]
    values = {}
    for assignment in overrides_given:
        overrides.merge(values, assignment)
    return read(config, values)


def _set_named_datasets(
    config: DataConfig, arguments: argparse.Namespace, assignments: list[str], copy: str | None
) -> None:
    """Set the data sources in `config` to the datasets named on the command line.

    `assignments` are the words `key=value`, and `copy` is the path of a local copy of the datasets
    or None. Datasets that are not on this machine are left out, unless the user allows their
    download. Raises `ConfigError` if no dataset remains.
    """
    if not (arguments.datasets or arguments.configs or copy):
        return
    from weft.cli import named_data
    from weft.cli.stacked_data import NamedDataSettings, group_by_dataset

    parameters, options = group_by_dataset(overrides.parse(assignments))
    data_options = [each for each in options if each.name.startswith("dataset.")]
    settings = NamedDataSettings(arguments.folders, copy, parameters, data_options)
    sources = named_data.resolve_sources(
        arguments.datasets, arguments.mode, config.dataset, settings
    )
    if arguments.command == "counts" and config.tokenizer.path is None:
        permitted = sources  # `weft data counts` asks before it downloads
    else:
        permitted = named_data.select_permitted(sources, config.dataset, arguments.yes)
    if not permitted:
        raise ConfigError("none of the named datasets is on this machine; --yes downloads them")
    config.dataset = replace(
        config.dataset,
        sources=[named_data.to_source_entry(source) for source in permitted],
        named=None,
    )


def _extract_data_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in a run's configuration that define its data.

    If `values` have no option `tokenizer`, the tokenizer of the run's model or actor is used.
    """
    options = {}
    for name in ("dataset", "tokenizer", "seed"):
        if name in values:
            options[name] = values[name]
    role: Mapping[str, Any] = next(
        (values[name] for name in ROLES if isinstance(values.get(name), Mapping)), {}
    )
    tokenizer_options = {}
    for name, value in (role.get("tokenizer") or {}).items():
        if value is not None:
            tokenizer_options[name] = value
    if role and "tokenizer" not in options:
        options["tokenizer"] = {"path": role.get("path"), **tokenizer_options}
    return options
