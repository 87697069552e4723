"""The argument parser that every command has: plain complaints, help that fits the terminal."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from weft.errors import ConfigError

OWN_NAME = re.compile(r"^`weft [^`]*`: ")  # with which the description of a module begins, and its help does not


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are a user's error like any other, and whose examples keep their lines."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **options)
        self.description = OWN_NAME.sub("", self.description or "")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; {self.prog} --help says more")


def helped(parser: argparse.ArgumentParser, argv: Sequence[str]) -> bool:
    """Whether nothing was asked for; the help is printed then."""
    if argv:
        return False
    parser.print_help()
    return True
