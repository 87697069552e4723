"""`weft chat MODEL`: talk in the terminal with a model or the newest checkpoint of a run.

`weft chat A B` talks with two models at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from rich.table import Table
from rich.text import Text

from weft.checkpoints.names import ModelQuery, find_model, find_newest_run
from weft.cli import dialects, model_arguments
from weft.cli.conversation import HELP as HELP_OF_ONE
from weft.cli.conversation import LABELS, AnswerDisplay, ChatView, Conversation, is_printable
from weft.cli.parsing import CommandParser
from weft.data.spec import TokenizerSpec
from weft.engine.spec import GenerationSpec, ModelSpec
from weft.errors import ConfigError, RunError, UserError
from weft.evaluation.models import open_policy
from weft.options import validate


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="weft chat", description=__doc__)
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL_DIR",
        help="a model: directory, adapter, run (runs/E/T, runs/E/T@step40) or hub name; two models answer side by side",
    )
    parser.add_argument("--model-path", metavar="MODEL_DIR", help="the same as MODEL_DIR")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="logits are divided by it (default 1); 0 is greedy",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens that sum to this probability (default 1: all)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        help="sample from this many of the likeliest tokens (default 0: all)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=512,
        help="maximum number of tokens per answer (default 512)",
    )
    parser.add_argument(
        "--seed", type=int, help="seed of sampling (default: a different one each time)"
    )
    format_options = parser.add_mutually_exclusive_group()
    format_options.add_argument(
        "--chat-template",
        metavar="NAME",
        help="name of a template or a jinja file (default: the model's own)",
    )
    scripts = dialects.find("scripts")
    if scripts is None:
        format_options.add_argument("--format", help=argparse.SUPPRESS)
    else:
        format_options.add_argument("--format", choices=scripts.FORMATS, help=scripts.FORMATS_HELP)
    parser.add_argument(
        "--plain", action="store_true", help="continue the text without the chat template"
    )
    parser.add_argument(
        "--no-history", action="store_true", help="answer each message without the earlier ones"
    )
    model_arguments.add_model_options(parser)
    parser.add_argument(
        "--8bit",
        dest="quantize",
        action="store_const",
        const="8bit",
        help="the same as --quantize 8bit",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Parse the command line, load the models, and run the conversation.

    Raises `UserError` (exit code 2) for an unusable model or option.
    """
    arguments = build_parser().parse_args(list(argv))
    names = arguments.models
    if not names and arguments.model_path is not None:
        names = [arguments.model_path]
    if len(names) not in (1, 2) or (arguments.models and arguments.model_path is not None):
        raise ConfigError(
            "name one model: weft chat MODEL_DIR (or --model_path MODEL_DIR, which is the same); "
            "or two: weft chat A B"
        )
    spec = _build_generation_spec(arguments)
    template = arguments.chat_template or None
    if arguments.format is not None:
        template = dialects.load("scripts").FORMATS[arguments.format]
    located_models = [find_model(find_newest_run(name), ModelQuery("MODEL_DIR")) for name in names]
    models = [_build_model_spec(located.path, arguments, template) for located in located_models]

    view = ChatView()
    conversations = []
    for label, located, model in zip(LABELS, located_models, models, strict=False):
        if located.note:
            view.show_note(located.note)
        conversations.append(
            _open_conversation(
                model, spec, view, plain=arguments.plain, label=label if len(models) > 1 else ""
            )
        )
        conversations[-1].system = arguments.system
        conversations[-1].history = not arguments.no_history
    if len(conversations) == 1:
        view.show_note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
        conversations[0].run_until_end()
        return 0
    view.show_note("/help lists the commands, /a and /b address one model, Ctrl-D leaves")

    SideBySide(conversations, view).converse()
    return 0


def _build_model_spec(path: str, arguments: argparse.Namespace, template: str | None) -> ModelSpec:
    model = ModelSpec(
        path=path,
        backend=arguments.backend,
        device=arguments.device,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        tokenizer=TokenizerSpec(chat_template=template),
    )
    validate(model)
    return model


def _build_generation_spec(arguments: argparse.Namespace) -> GenerationSpec:
    is_greedy = arguments.temperature == 0
    spec = GenerationSpec(
        max_new_tokens=arguments.max_new_tokens,
        temperature=1.0 if is_greedy else arguments.temperature,
        greedy=is_greedy,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=int.from_bytes(os.urandom(4), "little") if arguments.seed is None else arguments.seed,
    )
    validate(spec)
    return spec


def _open_conversation(
    model: ModelSpec, spec: GenerationSpec, view: ChatView, *, plain: bool, label: str
) -> Conversation:
    """Load the model and its tokenizer, print a header, and return the conversation.

    With `plain`, or if the tokenizer has no chat template, the model continues each line as plain
    text. `label` is "A" or "B" if the user chats with two models, and otherwise "". Raises
    `UserError` for a model that cannot generate text.
    """
    opened = open_policy(model)
    tokenizer = opened.tokenizer
    description = opened.engine.description
    conversation = Conversation(
        opened.engine, tokenizer, replace(spec, stop_ids=tokenizer.list_stop_ids()), view
    )
    conversation.plain = plain or tokenizer.chat_template is None
    conversation.context = opened.context
    if label:
        conversation.name = opened.name
    view.show_title(f"{label or 'weft chat'}  {opened.name}")
    for note in opened.notes:
        view.show_note(note)
    if opened.adapter:
        view.show_note(f"adapter of {opened.path}")
    device = description.get("device", model.device or "")
    view.show_note(
        f"{description['family']}, {_format_amount(description['num_parameters'])} parameters, "
        f"{description.get('dtype', '')} {device}".rstrip()
    )
    view.show_note(conversation.describe_settings())
    if conversation.plain:
        if plain:
            reason = "--plain"
        else:
            reason = "this tokenizer has no chat template, so the model is not a chat model"
        view.show_note(
            f"plain text: each line is continued on its own, without a chat template ({reason})"
        )
    if tokenizer.eos_id is None:
        view.show_note("the tokenizer has no end-of-sequence token: answers end at max_new_tokens")
    return conversation


def _format_amount(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


MIN_TERMINAL_WIDTH = 80  # minimum terminal width for answers side by side
HELP = "/a LINE, /b LINE a message or a command for one model; other lines are for both"


class AnswerColumn:
    """Display of a streamed answer in one column of the terminal."""

    def __init__(self, column: ColumnView) -> None:
        self._column = column

    def __enter__(self) -> AnswerColumn:
        return self

    def write(self, text: str, style: str = "") -> str:
        printable_text = "".join(
            character
            for character in text.replace("\t", "    ")
            if character == "\n" or is_printable(character)
        )
        self._column.answer_text.append(printable_text, style=style or None)
        self._column.both.refresh()
        return text

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._column.answer_text.rstrip()


class ColumnView:
    """User interface of one of two conversations that are shown side by side.

    Notes are collected and shown below the answer.
    """

    def __init__(self, both: SideBySide, label: str) -> None:
        self.both = both
        self.label = label
        self.interactive = both.view.interactive
        self.answer_text = Text()
        self.notes = list[tuple[str, str]]()
        self.answered = False

    def read_line(self) -> str | None:
        return self.both.view.read_line()

    def open_answer(self) -> AnswerDisplay:
        self.answered = True
        if self.both.uses_columns:
            return AnswerColumn(self)
        return self.both.view.open_answer(self.label)

    def show_note(self, text: str) -> None:
        self.notes.append((text, "dim"))

    def show_error(self, text: str) -> None:
        self.notes.append((text, "red"))

    def reset(self) -> None:
        self.answer_text = Text()
        self.notes = []
        self.answered = False

    def format_cell(self) -> Text:
        """Return the text of this conversation's table cell: the answer, followed by the notes."""
        lines = [Text(text.strip(), style=style) for text, style in self.notes]
        return Text("\n").join([*([self.answer_text] if self.answered else []), *lines])


class SideBySide:
    """Chat with two models at once, each in a separate conversation.

    Both models answer the lines that the user types.
    """

    def __init__(self, conversations: Sequence[Conversation], view: ChatView) -> None:
        self.view = view
        self.uses_columns = view.interactive and view.width >= MIN_TERMINAL_WIDTH
        self._columns = [ColumnView(self, label) for label in LABELS]
        self._conversations = list(conversations)
        for conversation, column in zip(self._conversations, self._columns, strict=True):
            conversation.view = column
        self._live = None if not self.uses_columns else view.open_live_display(Text())

    def converse(self) -> None:
        """Read and handle lines until the input ends or the user quits.

        In a terminal, errors are shown and the chat continues. Otherwise, errors are raised.
        """
        while (line := self.view.read_line()) is not None:
            if not self.handle_line(line):
                return

    def handle_line(self, line: str) -> bool:
        """Handle one line of input, and return False if the user wants to leave."""
        self.uses_columns = self.view.interactive and self.view.width >= MIN_TERMINAL_WIDTH
        for column in self._columns:
            column.reset()
        indices, line = self._parse_address(line)
        if line.strip() == "/help":
            self.view.show_note(f"{HELP_OF_ONE}\n{HELP}")
            return True
        if not self.uses_columns:
            continues = self._answer_line(indices, line)
            self._show_remaining_notes()
            return continues
        self._live = self.view.open_live_display(Text())
        with self._live:
            continues = self._answer_line(indices, line)
        if any(column.answered for column in self._columns):
            self.view.show(self._build_table())
        else:
            self._show_remaining_notes()
        return continues

    def refresh(self) -> None:
        """Redraw the display with the answers received so far."""
        if self._live is not None:
            self._live.update(self._build_table())

    def _parse_address(self, line: str) -> tuple[list[int], str]:
        """Return (indices of the addressed models, line without the address).

        A line that begins with `/a` or `/b` addresses one model. Other lines address both.
        """
        for index, label in enumerate(LABELS):
            first_word, _, message = line.strip().partition(" ")
            if first_word == f"/{label.lower()}" and message.strip():
                return [index], message.strip()
        return [0, 1], line

    def _answer_line(self, indices: Sequence[int], line: str) -> bool:
        continues = True
        for index in indices:
            conversation = self._conversations[index]
            column = self._columns[index]
            try:
                continues = conversation.handle_line(line) and continues
            except (UserError, RunError, OSError) as error:
                if not self.view.interactive:
                    raise
                column.show_error(str(error))
            if column.answered and not self.uses_columns:
                self._show_notes(column)
        return continues

    def _show_remaining_notes(self) -> None:
        """Show the notes that have not been shown yet.

        If both conversations have the same notes, these are shown only once.
        """
        first, second = self._columns
        if first.notes == second.notes:
            for text, style in first.notes:
                (self.view.show_error if style == "red" else self.view.show_note)(text)
            first.notes = []
            second.notes = []
        for column in self._columns:
            self._show_notes(column)

    def _show_notes(self, column: ColumnView) -> None:
        for text, style in column.notes:
            (self.view.show_error if style == "red" else self.view.show_note)(
                f"{column.label}      {text.strip()}"
            )
        column.notes = []

    def _build_table(self) -> Table:
        grid = Table(
            box=None, expand=True, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold green"
        )
        for label in LABELS:
            grid.add_column(label, ratio=1, overflow="fold")
        grid.add_row(*(column.format_cell() for column in self._columns))
        return grid
