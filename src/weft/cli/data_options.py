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
    """Return the data options and the data paths that a command line gives.

    Raises `ConfigError` for unknown options, or if no data are named.
    """
    words = [*arguments.words, *take_assignments(arguments, "datasets", "configs")]
    assigned = []
    for word in words:
        if ASSIGNMENT.match(word) and not word.startswith(COPY_PREFIX):
            assigned.append(word)
    copies = []
    for word in words:
        if word.startswith(COPY_PREFIX):
            copies.append(word.removeprefix(COPY_PREFIX))
    paths = [word for word in words if not ASSIGNMENT.match(word)]
    config = _read_config(arguments, assigned)
    if arguments.tokenizer is not None:
        config.tokenizer.path = arguments.tokenizer
    if arguments.type is not None:
        config.dataset.type = arguments.type
    if paths:
        config.dataset = replace(
            config.dataset, path=None, train_path=None, sources=None, named=None, valid_path=None
        )
    _set_named_datasets(config, arguments, assigned, copies[-1] if copies else None)
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

    `options` are the names of the list options in `arguments`. If an assignment follows a list
    option, such as `--datasets`, argparse adds it to the option's values.
    """
    words = list[str]()
    for name in options:
        given = getattr(arguments, name) or []
        for word in given:
            if ASSIGNMENT.match(word):
                words.append(word)
        setattr(arguments, name, [word for word in given if not ASSIGNMENT.match(word)])
    return words


def _read_config(arguments: argparse.Namespace, assigned: list[str]) -> DataConfig:
    """Return the options in `--config` and `--configs`, overridden by the assignments."""
    config = DataConfig()
    if arguments.config is not None:
        config = read(config, _extract_data_options(overrides.read_file(str(arguments.config))))
    given = overrides.parse(assigned)
    if arguments.datasets or arguments.configs:
        from weft.cli.stacked_data import build_stacked_options, group_by_dataset

        _, given = group_by_dataset(
            given
        )  # parameters of datasets override those in the sections' lists
    if arguments.configs:
        own = [each for each in given if each.name.startswith("tokenizer.")]
        names = []
        for word in arguments.configs:
            for name in word.split(","):
                if name:
                    names.append(name)
        of_stack = [each for each in given if each not in own]
        values, arguments.mode = build_stacked_options(
            names, arguments.folders, arguments.mode, of_stack
        )
        config = read(config, _extract_data_options(values))
        if arguments.command == "counts":
            config.tokenizer.path = None  # only rows are counted, unless a tokenizer is named
        given = own
    arguments.mode = arguments.mode or MODES[0]
    values = {}
    for assignment in given:
        overrides.merge(values, assignment)
    return read(config, values)


def _set_named_datasets(
    config: DataConfig, arguments: argparse.Namespace, assigned: list[str], copy: str | None
) -> None:
    """Set the data sources in `config` to the datasets named on the command line.

    `copy` is the path of a local copy of the datasets. Datasets that are not on this machine are
    left out, unless the user allows their download. Raises `ConfigError` if no dataset remains.
    """
    if not (arguments.datasets or arguments.configs or copy):
        return
    from weft.cli import named_data
    from weft.cli.stacked_data import NamedDataSettings, group_by_dataset

    parameters, options = group_by_dataset(overrides.parse(assigned))
    of_data = [each for each in options if each.name.startswith("dataset.")]
    settings = NamedDataSettings(arguments.folders, copy, parameters, of_data)
    wanted = named_data.resolve_sources(
        arguments.datasets, arguments.mode, config.dataset, settings
    )
    if arguments.command == "counts" and config.tokenizer.path is None:
        allowed = wanted  # `weft data counts` asks before it downloads
    else:
        allowed = named_data.select_permitted(wanted, config.dataset, arguments.yes)
    if not allowed:
        raise ConfigError("none of the named datasets is on this machine; --yes downloads them")
    config.dataset = replace(
        config.dataset,
        sources=[named_data.to_source_entry(source) for source in allowed],
        named=None,
    )


def _extract_data_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in a run's configuration that define its data.

    If `tokenizer` is not set, the tokenizer of the run's model or actor is used.
    """
    options = {}
    for name in ("dataset", "tokenizer", "seed"):
        if name in values:
            options[name] = values[name]
    role: Mapping[str, Any] = next(
        (values[name] for name in ROLES if isinstance(values.get(name), Mapping)), {}
    )
    own = {}
    for name, value in (role.get("tokenizer") or {}).items():
        if value is not None:
            own[name] = value
    if role and "tokenizer" not in options:
        options["tokenizer"] = {"path": role.get("path"), **own}
    return options
