"""Argument parser of all commands, and converters of arguments.

Error messages are short, `--a_b` is accepted for `--a-b`, and help texts keep their line breaks.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from weft.errors import ConfigError, find_nearest
from weft.reading import find_url_problem, refuse_url
from weft.storage.buckets import is_remote

# arguments that are set by flags and are local paths, or URLs for some commands
FLAGS = ("fileroot", "output", "out", "prompts", "folders")
# all arguments of type str that are local paths, or URLs for some commands
PATHS = (*FLAGS, "root", "input", "valid_output")
# prefix of module docstrings that is removed from the help text
OWN_NAME = re.compile(r"^`weft [^`]*`: ")


class CommandParser(argparse.ArgumentParser):
    """Argument parser that raises `ConfigError` for invalid arguments.

    The line breaks of its description and examples are kept in the help. `url_arguments` are the
    names of path arguments that can also be URLs of folders in buckets.
    """

    def __init__(self, *args: Any, url_arguments: Sequence[str] = (), **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **options)
        self.register("type", Path, _parse_path)
        self._url_arguments = url_arguments
        self.description = OWN_NAME.sub("", self.description or "")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        if args is not None:
            # Accept flags with hyphens or underscores; leave the words after `--` as they are.
            num_flag_words = list(args).index("--") if "--" in args else len(args)
            args = [*map(self._normalize_flag, args[:num_flag_words]), *args[num_flag_words:]]
        parsed, rest = super().parse_known_args(args, namespace)
        _check_paths(parsed, self._url_arguments)
        return parsed, rest

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
            similar = find_nearest(flags[0], self._list_flags(), 1) if flags else []
            hint = f"; did you mean {similar[0]}?" if similar else ""
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return parsed

    def _list_flags(self) -> list[str]:
        """Return the flags of this parser and of its subcommands."""
        flags: list[str] = []
        for action in self._actions:
            flags += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    flags += parser._list_flags()
        return flags

    def _normalize_flag(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return word
        bare_name = name[2:]
        flags = (
            f"--{spelling}"
            for spelling in (bare_name.replace("_", "-"), bare_name.replace("-", "_"))
        )
        return next(
            (f"{flag}{equals}{value}" for flag in flags if flag in self._option_string_actions),
            word,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; see {self.prog} --help")


def split_names(words: Iterable[str]) -> list[str]:
    """Return the names in `words`; a word can have several names, separated by commas."""
    names = []
    for word in words:
        for name in word.split(","):
            if name:
                names.append(name)
    return names


def parse_count(text: str) -> int:
    """Convert an argument to an integer of at least 0."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must not be below 0")
    return number


def parse_positive(text: str) -> int:
    """Convert an argument to an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def add_imports(parser: argparse.ArgumentParser, metavar: str | None, help: str) -> None:
    """Add `--import`, which names user code and can be repeated."""
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar=metavar, help=help
    )


def add_fileroot(parser: argparse.ArgumentParser, default: str | None = "./runs") -> None:
    """Add `--fileroot`, the folder of the runs that a command names."""
    parser.add_argument(
        "--fileroot",
        default=default,
        help="folder of the runs that EXPERIMENT/TRIAL names (./runs)",
    )


def _parse_path(text: str) -> Path:
    """Convert an argument to a path.

    Raises `ArgumentTypeError` for a URL, which `Path` would corrupt: `gs://bucket` would become
    `gs:/bucket`.
    """
    problem = find_url_problem(text)
    if problem is not None:
        raise argparse.ArgumentTypeError(f"{text} {problem}")
    return Path(text)


def _check_paths(parsed: argparse.Namespace, url_arguments: Sequence[str]) -> None:
    """Raise `ConfigError` if an argument that must be a local path is a URL.

    `url_arguments` are the names of arguments that may be URLs. Names of models and data are not
    checked here, but when they are read.
    """
    for name, value in vars(parsed).items():
        for path in value if isinstance(value, list) else [value]:
            can_be_url = name in url_arguments and isinstance(path, str) and is_remote(path)
            if name in PATHS and isinstance(path, str) and not can_be_url:
                flag = f"--{name.replace('_', '-')} " if name in FLAGS else ""
                refuse_url(path, f"{flag}{path}", ConfigError)


def print_help_if_empty(parser: argparse.ArgumentParser, argv: Sequence[str]) -> bool:
    """Print the help if there are no arguments, and return whether it was printed."""
    if argv:
        return False
    parser.print_help()
    return True
