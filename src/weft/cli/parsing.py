"""The argument parser that commands have: plain complaints, help that fits the terminal, `--a_b`
for `--a-b` and back.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from weft.errors import ConfigError
from weft.reading import refuse_url

# paths that stand behind a flag of their name
FLAGS = ("fileroot", "output", "out", "prompts", "folders")
# arguments that are paths, though their type is a text
PATHS = (*FLAGS, "root", "input", "valid_output")
# with which the description of a module begins, and its help does not
OWN_NAME = re.compile(r"^`weft [^`]*`: ")


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are a user's error like any other, and whose examples
    keep their lines.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **options)
        self.description = OWN_NAME.sub("", self.description or "")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        values, rest = super().parse_known_args(
            None if args is None else self._spelled(args), namespace
        )
        check_paths(values)
        return values, rest

    def _spelled(self, words: Sequence[str]) -> list[str]:
        """The words with the flags of this parser as it spells them."""
        end = list(words).index("--") if "--" in words else len(words)
        return [*map(self._flag, words[:end]), *words[end:]]

    def _flag(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return word
        plain = name[2:]
        found = (f"--{each}" for each in (plain.replace("_", "-"), plain.replace("-", "_")))
        return next(
            (f"{flag}{equals}{value}" for flag in found if flag in self._option_string_actions),
            word,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; {self.prog} --help says more")


def check_paths(values: argparse.Namespace) -> None:
    """Raises `ConfigError` for a URL in an argument that is a path.

    What reads models and data checks their names itself.
    """
    for name, value in vars(values).items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Path) or (name in PATHS and isinstance(each, str)):
                flag = f"--{name.replace('_', '-')} " if name in FLAGS else ""
                refuse_url(each, f"{flag}{each}", ConfigError)


def helped(parser: argparse.ArgumentParser, argv: Sequence[str]) -> bool:
    """Whether nothing was asked for; the help is printed then."""
    if argv:
        return False
    parser.print_help()
    return True
