"""Argument parser of all commands, with the options of those that load models.

Error messages are short, `--a_b` is accepted for `--a-b`, and help texts keep their line breaks.

Options and messages shared by the commands that load models: `weft sample`, `weft eval`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from weft.checkpoints.names import SCORERS, ModelQuery, find_model
from weft.data.spec import TokenizerSpec
from weft.engine.spec import AUTO, QUANTIZE, ModelSpec
from weft.errors import ConfigError
from weft.evaluation.models import check_generates_text, open_policy, open_scorer
from weft.observe.short_names import POLICIES
from weft.reading import find_url_problem, refuse_url

if TYPE_CHECKING:
    from weft.evaluation.models import OpenedModel


# arguments that are paths and have a flag
FLAGS = ("fileroot", "output", "out", "prompts", "folders")
# arguments that are paths but have type str
PATHS = (*FLAGS, "root", "input", "valid_output")
# prefix of module docstrings that is removed from the help text
OWN_NAME = re.compile(r"^`weft [^`]*`: ")


class CommandParser(argparse.ArgumentParser):
    """Argument parser that raises `ConfigError` for invalid arguments.

    The line breaks of its description and examples are kept in the help.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **options)
        self.register("type", Path, _parse_path)
        self.description = OWN_NAME.sub("", self.description or "")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        values, rest = super().parse_known_args(
            None if args is None else self._normalize_flags(args), namespace
        )
        _check_paths(values)
        return values, rest

    def _normalize_flags(self, words: Sequence[str]) -> list[str]:
        """Return the words with each flag in the spelling that this parser defines.

        A flag can be typed with hyphens or underscores. Words after `--` are not changed.
        """
        end = list(words).index("--") if "--" in words else len(words)
        return [*map(self._normalize_flag, words[:end]), *words[end:]]

    def _normalize_flag(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return word
        plain = name[2:]
        flags = (f"--{each}" for each in (plain.replace("_", "-"), plain.replace("-", "_")))
        return next(
            (f"{flag}{equals}{value}" for flag in flags if flag in self._option_string_actions),
            word,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; see {self.prog} --help")


def _parse_path(text: str) -> Path:
    """Convert an argument to a path.

    Raises `ArgumentTypeError` for a URL, because `Path` would change `gs://bucket` to `gs:/bucket`.
    """
    problem = find_url_problem(text)
    if problem is not None:
        raise argparse.ArgumentTypeError(f"{text} {problem}")
    return Path(text)


def _check_paths(values: argparse.Namespace) -> None:
    """Raise `ConfigError` if an argument that must be a local path is a URL.

    Only arguments with string values are checked. Names of models and data are checked when they
    are read.
    """
    for name, value in vars(values).items():
        for each in value if isinstance(value, list) else [value]:
            if name in PATHS and isinstance(each, str):
                flag = f"--{name.replace('_', '-')} " if name in FLAGS else ""
                refuse_url(each, f"{flag}{each}", ConfigError)


def print_help_if_empty(parser: argparse.ArgumentParser, argv: Sequence[str]) -> bool:
    """Print the help if there are no arguments, and return whether it was printed."""
    if argv:
        return False
    parser.print_help()
    return True


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        default=AUTO,
        help="torch or hf (default: hf if weft does not implement the model's family)",
    )
    parser.add_argument("--device", help="cpu, cuda, ... (default: the best available)")
    parser.add_argument(
        "--dtype",
        help="float32, bfloat16 or float16 (default: the checkpoint's on a GPU, else float32)",
    )
    parser.add_argument(
        "--quantize",
        choices=QUANTIZE,
        help="store the weights in 8 or 4 bits: less memory, slower on a CPU",
    )


def add_template(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chat-template",
        help="chat template of the policy: a name or a jinja file (default: the model's own)",
    )


def load_policy(name: str, given: argparse.Namespace) -> OpenedModel:
    """Open a policy, with the chat template of `--chat-template` if that is given.

    If `name` is the name of a run, the run's newest checkpoint is opened. Raises `UserError` for a
    model that is not a policy.
    """
    return _print_notes(
        open_policy(_build_spec(name, given, ModelQuery("MODEL", POLICIES), given.chat_template))
    )


def check_policies(names: Iterable[str]) -> None:
    """Raise `UserError` if a model in `names` is not found or cannot generate text.

    The models are not loaded.
    """
    for name in names:
        check_generates_text(str(find_model(name, ModelQuery("MODEL", POLICIES)).path))


def load_scorer(name: str, given: argparse.Namespace, option: str = "--reward") -> OpenedModel:
    """Open a reward model with its own tokenizer and chat template.

    If `name` is the name of a run, the run's newest checkpoint is opened. `option` is the flag to
    name in error messages. Raises `UserError` for a model that is not a reward model.
    """
    return _print_notes(open_scorer(_build_spec(name, given, ModelQuery(option, SCORERS), None)))


def _build_spec(
    name: str, given: argparse.Namespace, wanted: ModelQuery, template: str | None
) -> ModelSpec:
    model = find_model(name, wanted)
    if model.note:
        print_note(model.note)
    tokenizer = TokenizerSpec(chat_template=template)
    return ModelSpec(
        path=model.path,
        backend=given.backend,
        device=given.device,
        dtype=given.dtype,
        quantize=given.quantize,
        tokenizer=tokenizer,
    )


def _print_notes(opened: OpenedModel) -> OpenedModel:
    for note in opened.notes:
        print_note(note)
    return opened


def print_note(text: str) -> None:
    """Print a note to standard error."""
    print(text, file=sys.stderr)


@contextmanager
def show_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar titled `what` on standard error, if that is a terminal.

    Yields a function that updates the bar; its arguments are the number of finished items and the
    total.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
