"""Parsing of the arguments of commands."""

from __future__ import annotations

import pytest

from weft.cli.parsing import CommandParser
from weft.errors import ConfigError


def parser() -> CommandParser:
    made = CommandParser(prog="weft test")
    made.add_argument("--max-new-tokens", type=int)
    made.add_argument("--dry_run", action="store_true")
    commands = made.add_subparsers(dest="command")
    inner = commands.add_parser("inner")
    inner.add_argument("--top-k", type=int)
    inner.add_argument("rest", nargs="*")
    return made


def test_flags_are_spelled_with_either_character() -> None:
    given = parser().parse_args(
        ["--max_new_tokens=3", "--dry-run", "inner", "--top_k", "5", "--", "--top_k"]
    )
    assert (given.max_new_tokens, given.dry_run, given.top_k) == (3, True, 5)
    assert given.rest == ["--top_k"], "what follows -- is no flag"
    assert parser().parse_args(["--max-new-tokens", "4"]).max_new_tokens == 4


def test_an_unknown_flag_is_named_as_it_was_typed() -> None:
    with pytest.raises(ConfigError, match="weft test: unrecognized arguments: --top_kk"):
        parser().parse_args(["--top_kk"])
    with pytest.raises(ConfigError, match=r"arguments: --top_kk=3; did you mean --top-k\?"):
        parser().parse_args(["inner", "--top_kk=3", "--", "x"])


def test_the_help_has_one_spelling() -> None:
    assert "--max_new_tokens" not in parser().format_help()
