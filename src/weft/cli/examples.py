"""Write sample data and a small model, enough to try every command of the README.

Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft import writing
from weft.cli.common_options import EXAMPLES
from weft.cli.ls import format_size
from weft.cli.parsing import CommandParser, print_help_if_empty
from weft.errors import ConfigError

FIRST_COMMAND = f"weft quickstart sft experiment_name=first trial_name=sft {EXAMPLES['sft']}"
DESCRIPTIONS = {
    "sft.jsonl": "prompts with answers, three of ten wrong: sft",
    "chat.jsonl": "the same rows as conversations: sft with dataset.type=chat",
    "pairs.jsonl": "a correct and a wrong answer to each prompt: rw, dpo",
    "prompts.jsonl": "prompts with the correct answer, for a verifier: ppo, grpo, gen",
    "model": "a Llama with 400,000 random weights that reads digits, + and =",
    "text-model": (
        "a Llama with 40,000 random weights that reads any text, byte by byte: for the tutorials"
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run `weft examples ...` and return the exit code.

    Raises `ConfigError` if writing would overwrite a file that has different content.
    """
    parser = CommandParser(prog="weft examples", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="{ls,write}", required=True)
    commands.add_parser("ls", help="list the files")
    writing = commands.add_parser("write", help="write the files to a folder")
    writing.add_argument("folder", type=Path, metavar="DIR", help="a new folder, such as data")
    if print_help_if_empty(parser, argv):
        return 2
    given = parser.parse_args(list(argv))
    from weft.cli.example_files import build_files

    file_contents = build_files()
    if given.command == "write":
        write_files(given.folder, file_contents)
        print(f"written to {given.folder}:")
    for name, what in DESCRIPTIONS.items():
        parts = []
        for path, content in file_contents.items():
            if path.split("/")[0] == name:
                parts.append(content)
        print(f"  {name:15}{format_size(sum(map(len, parts))):>8}  {what}")
    print(
        "\nBegin with:"
        if given.command == "write"
        else "\nweft examples write data writes the files; then begin with:"
    )
    print(
        "  "
        + FIRST_COMMAND.replace(
            "=data/", f"={given.folder if given.command == 'write' else 'data'}/"
        )
    )
    return 0


def write_files(folder: Path, file_contents: dict[str, bytes]) -> None:
    """Write the files that do not exist yet; `file_contents` maps paths in `folder` to contents.

    Raises `ConfigError`, before anything is written, if a file exists with other content.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a folder")
    other = []
    for name, content in file_contents.items():
        if not _can_write(folder / name, content):
            other.append(name)
    if other:
        raise ConfigError(
            f"{folder} contains files that weft would overwrite ({', '.join(other[:4])}); name "
            f"another folder, or remove them"
        )
    try:
        for name, content in file_contents.items():
            if not (folder / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                writing.write(folder / name, content)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder} cannot be written: {error.strerror or error}"
        ) from error


def _can_write(path: Path, content: bytes) -> bool:
    """Return whether `path` is missing or is a file that already has this content."""
    if path.is_symlink() or not path.exists():
        return not path.is_symlink()
    return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content
