"""Arguments and messages of the commands that load models, such as `weft sample` and `weft chat`."""

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
    """Add the options that say how a model is loaded."""
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


def check_chat_templates(names: Iterable[str], given: argparse.Namespace) -> None:
    """Raise `NoTemplate` if a policy in `names` has no chat template; no weights are loaded."""
    from weft.evaluation.models import load_policy_tokenizer

    for name in names:
        model = find_model(name, ModelQuery("MODEL", POLICIES))
        tokenizer = TokenizerSpec(chat_template=given.chat_template)
        spec = ModelSpec(path=model.path, tokenizer=tokenizer)
        try:
            load_policy_tokenizer(spec).check_template()
        except NoTemplate as error:
            raise NoTemplate(f"{name}: {error}") from error


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
def show_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar titled `label` on standard error, if that is a terminal.

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
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
