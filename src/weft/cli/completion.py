"""Print the script with which a shell completes commands, options, values, runs and files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.cli.parsing import CommandParser, print_help_if_empty

SCRIPTS = Path(__file__).with_name("shells")
SHELLS = ("bash", "zsh", "fish")
WORDS_SUBCOMMAND = "words"  # subcommand called by the scripts with the words of a command line, the last one partial
EPILOG = """examples:
  source <(weft completion bash)                                     in ~/.bashrc
  source <(weft completion zsh)                                      in ~/.zshrc, after compinit
  weft completion fish > ~/.config/fish/completions/weft.fish        once"""


def main(argv: Sequence[str]) -> int:
    """Print a shell's completion script, or candidates for a command line.

    Returns the exit code.
    """
    if argv and argv[0] == WORDS_SUBCOMMAND:
        return _print_candidates(list(argv[1:]))
    parser = CommandParser(prog="weft completion", description=__doc__, epilog=EPILOG)
    parser.add_argument("shell", choices=SHELLS)
    if print_help_if_empty(parser, argv):
        return 2
    given = parser.parse_args(list(argv))
    print((SCRIPTS / f"weft.{given.shell}").read_text(encoding="utf-8"), end="")
    return 0


def _print_candidates(words: list[str]) -> int:
    """Print the completions of the last word, one per line, and return the exit code 0.

    Each line has a candidate, followed by a tab and a description if there is one.
    """
    from weft.cli.candidates import find_candidates

    words = words[1:] if words[:1] == ["--"] else words
    current = words.pop() if words else ""
    for word, what in find_candidates(words, current):
        print(f"{word}\t{what}" if what else word)
    return 0
