"""Arguments and messages of commands that load models, such as `weft sample` and `weft chat`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from weft.checkpoints.names import SCORERS, ModelQuery, find_model
from weft.data.spec import TokenizerSpec
from weft.engine.spec import AUTO, QUANTIZE, ModelSpec
from weft.errors import NoTemplate
from weft.evaluation.models import check_generates_text, open_policy, open_scorer
from weft.observe.jsonl import POLICIES

if TYPE_CHECKING:
    from weft.evaluation.models import OpenedModel


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for loading a model: backend, device, dtype and quantization."""
    parser.add_argument(
        "--backend",
        default=AUTO,
        help="torch or hf (default: hf if weft does not implement the model's family)",
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: the best available)")
    parser.add_argument(
        "--dtype",
        help="float32, bfloat16 or float16 (default: the checkpoint's on a GPU, else float32)",
    )
    parser.add_argument(
        "--quantize",
        choices=QUANTIZE,
        help="store the weights in 8 or 4 bits: less memory, slower on a CPU",
    )


def add_template_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--chat-template`."""
    parser.add_argument(
        "--chat-template",
        help="chat template of the policy: a name or a jinja file (default: the model's own)",
    )


def load_policy(name: str, arguments: argparse.Namespace) -> OpenedModel:
    """Load a policy, with the chat template of `--chat-template` if it is set.

    If `name` is a run, its newest checkpoint is loaded. Raises `UserError` for a model that is not
    a policy.
    """
    return _print_notes(
        open_policy(
            _build_spec(name, arguments, ModelQuery("MODEL", POLICIES), arguments.chat_template)
        )
    )


def check_policies(names: Iterable[str]) -> None:
    """Raise `UserError` if a model in `names` is not found or cannot generate text.

    The models are not loaded.
    """
    for name in names:
        check_generates_text(str(find_model(name, ModelQuery("MODEL", POLICIES)).path))


def check_chat_templates(names: Iterable[str], arguments: argparse.Namespace) -> None:
    """Raise `NoTemplate` if a policy in `names` has no chat template; no weights are loaded."""
    from weft.evaluation.models import load_policy_tokenizer

    for name in names:
        model = find_model(name, ModelQuery("MODEL", POLICIES))
        tokenizer = TokenizerSpec(chat_template=arguments.chat_template)
        spec = ModelSpec(path=model.path, tokenizer=tokenizer)
        try:
            load_policy_tokenizer(spec).check_template()
        except NoTemplate as error:
            raise NoTemplate(f"{name}: {error}") from error


def load_scorer(name: str, arguments: argparse.Namespace, option: str = "--reward") -> OpenedModel:
    """Load a reward model with its own tokenizer and chat template.

    If `name` is a run, its newest checkpoint is loaded. `option` is the flag to name in error
    messages. Raises `UserError` for a model that is not a reward model.
    """
    return _print_notes(
        open_scorer(_build_spec(name, arguments, ModelQuery(option, SCORERS), None))
    )


def _build_spec(
    name: str, arguments: argparse.Namespace, query: ModelQuery, template: str | None
) -> ModelSpec:
    model = find_model(name, query)
    if model.note:
        print_note(model.note)
    tokenizer = TokenizerSpec(chat_template=template)
    return ModelSpec(
        path=model.path,
        backend=arguments.backend,
        device=arguments.device,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        tokenizer=tokenizer,
    )


def _print_notes(opened: OpenedModel) -> OpenedModel:
    """Print the notes about a loaded model, and return the model."""
    for note in opened.notes:
        print_note(note)
    return opened


def print_note(text: str) -> None:
    """Print a note to standard error."""
    print(text, file=sys.stderr)


@contextmanager
def show_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar titled `title`, if standard error is a terminal.

    Yields a function that updates the bar; its arguments are the number of finished items and the
    total number.
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
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
