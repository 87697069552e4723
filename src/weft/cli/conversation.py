"""One conversation with a model: messages, the user's commands, streamed answers, and the display.

In a terminal, the display shows speaker labels and wraps text. If the output is piped, only the
answers are printed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.live import Live

from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError, RunError, UserError, build_unknown_name_error, find_nearest
from weft.options import read, validate
from weft.writing import open_file

if TYPE_CHECKING:
    from weft.data.tokenizer import Tokenizer
    from weft.engine.base import Engine
FOREIGN_COMMANDS = ("quit", "exit", "!quit", "!exit", "!reset")  # of other chat programs
LABELS = ("A", "B")  # labels of two models that answer side by side
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "greedy")
HELP = """/help            this list
/retry           another answer to the last message
/reset           clear the conversation; the system prompt stays
/system [TEXT]   set the system prompt; "/system off" removes it; without TEXT, show it
/set NAME VALUE  change temperature, top_p, top_k, min_p, max_new_tokens or greedy
/save FILE       append the conversation to a JSONL file, a row of the `chat` dataset form
/quit            leave, as do quit and Ctrl-D
an empty line    continue an answer that was cut or stopped
Ctrl-C           stop the answer"""


class AnswerDisplay(Protocol):
    """Protocol for displays of an answer while it is generated.

    `write` shows text in a style of the package `rich`, and returns the text.
    """

    def __enter__(self) -> AnswerDisplay: ...
    def write(self, text: str, style: str = "") -> str: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class ConversationView(Protocol):
    """Protocol for user interfaces that read the user's lines and show a conversation.

    `interactive` is True if the user types in a terminal. `read_line` returns None at the end of
    the input.
    """

    interactive: bool

    def read_line(self) -> str | None: ...
    def open_answer(self) -> AnswerDisplay: ...
    def show_note(self, text: str) -> None: ...
    def show_error(self, text: str) -> None: ...


@dataclass
class Conversation:
    """Conversation of a user with one model.

    `prompt_ids` and `answer_ids` are the token ids of the last prompt and its answer.
    `is_answer_complete` is True if the model finished this answer.

    `context` is the model's maximum number of tokens. If a conversation gets longer, its oldest
    messages are left out of the prompt. If `history` is False, each message is answered without the
    earlier ones. If `plain` is True, each message is continued as text, without a chat template.
    """

    engine: Engine
    tokenizer: Tokenizer
    spec: GenerationSpec
    view: ConversationView
    system: str | None = None
    plain: bool = False
    context: int | None = None
    history: bool = True
    messages: list[dict[str, str]] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    answer_ids: list[int] = field(default_factory=list)
    is_answer_complete: bool = True
    num_requests: int = 0  # part of the sampling seed, so that a retry gives another answer
    name: str = ""  # model name, written into files with the answers of several models

    def run_until_end(self) -> None:
        """Read and handle lines until the input ends or the user quits.

        If the input is not a terminal, an error ends the conversation, because no user can correct
        it.
        """
        while (line := self.view.read_line()) is not None:
            try:
                if not self.handle_line(line):
                    return
            except (UserError, RunError, OSError) as error:
                if not self.view.interactive:
                    raise
                self.view.show_error(str(error))

    def handle_line(self, line: str) -> bool:
        """Handle one line of input, and return False if the user wants to leave.

        The line is a command or a message to the model. In a terminal, an empty line continues the
        last answer.
        """
        if not line.strip():
            if self.view.interactive:
                self.continue_answer()
        elif line.strip() in FOREIGN_COMMANDS:
            return self._run_command(line.strip().removeprefix("!"), "")
        elif line.startswith("/") and not line.startswith("//"):
            name, _, argument = line[1:].strip().partition(" ")
            return self._run_command(name, argument.strip())
        else:
            self.answer_message(line[1:] if line.startswith("//") else line)
        return True

    def answer_message(self, text: str) -> None:
        """Add a user message and answer it.

        If answering raises `UserError`, the message is removed.
        """
        earlier_messages = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            self._answer_last_message()
        except UserError:
            self.messages = earlier_messages
            raise

    def continue_answer(self) -> None:
        """Continue the last answer if it was cut off or stopped."""
        if self.is_answer_complete:
            if self.messages:
                self.view.show_note("the answer is complete; /retry samples another one")
            return
        self.messages.pop()
        self._stream_answer(self.prompt_ids, self.answer_ids)

    def retry_answer(self) -> None:
        """Sample another answer to the last message."""
        if not self.messages:
            self.view.show_note("there are no messages yet")
            return
        if self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        self._answer_last_message()

    def describe_settings(self) -> str:
        """Return a one-line description of the sampling settings."""
        spec = self.spec
        words = ["greedy" if spec.greedy else f"temperature {spec.temperature:g}"]
        if not spec.greedy:
            for name, value in _collect_limits(spec).items():
                words.append(f"{name} {value:g}")
        return ", ".join([*words, f"at most {spec.new_token_limit} tokens"])

    # -- commands

    def _run_command(self, name: str, argument: str) -> bool:
        if name in ("quit", "exit"):
            return False
        commands: dict[str, Callable[[], None]] = {
            "help": lambda: self.view.show_note(HELP),
            "retry": self.retry_answer,
            "reset": self._reset,
            "system": lambda: self._set_system(argument),
            "set": lambda: self._change_setting(argument),
            "save": lambda: self._save(argument),
        }
        if name not in commands:
            similar = find_nearest(name, [*commands, "quit"])
            if similar:
                hint = f"did you mean /{' or /'.join(similar)}?"
            else:
                hint = "/help lists them"
            raise ConfigError(
                f"unknown command /{name}; {hint} (write // to begin a message with /)"
            )
        commands[name]()
        return True

    def _reset(self) -> None:
        self.messages = []
        self.prompt_ids = []
        self.answer_ids = []
        self.is_answer_complete = True
        self.view.show_note("the conversation is cleared")

    def _set_system(self, text: str) -> None:
        if text:
            self.system = None if text == "off" else text
        self.view.show_note(f"system prompt: {self.system}" if self.system else "no system prompt")

    def _change_setting(self, argument: str) -> None:
        name, _, value = argument.replace("=", " ").partition(" ")
        if name:
            if name not in SETTINGS:
                raise build_unknown_name_error("setting", name, SETTINGS)
            values: dict[str, Any] = {name: value.strip()}
            if name == "temperature":
                if value.strip() in ("0", "0.0"):
                    values = {"greedy": True}
                else:
                    values = {**values, "greedy": False}
            changed = read(self.spec, values)
            validate(changed)
            self.spec = changed
        self.view.show_note(self.describe_settings())

    def _save(self, name: str) -> None:
        """Append the conversation as one row to the JSONL file `name`.

        In plain mode, each message and its answer are a separate row. Raises `ConfigError` if
        `name` is empty or if there are no messages.
        """
        if not name:
            raise ConfigError("/save needs the name of a file, such as /save talk.jsonl")
        if not self.messages:
            raise ConfigError("there are no messages yet")
        exchanges = [self.messages[i : i + 2] for i in range(0, len(self.messages), 2)]
        rows = exchanges if self.plain else [self._build_messages()]
        with open_file(Path(name).expanduser(), "a", encoding="utf-8") as file:
            for row in rows:
                model_field = {"model": self.name} if self.name else {}
                file.write(json.dumps({"messages": row, **model_field}, ensure_ascii=False) + "\n")
        self.view.show_note(f"{len(self.messages)} messages appended to {name}")

    # -- answers

    def _build_messages(self, start: int = 0) -> list[dict[str, str]]:
        system_messages = [{"role": "system", "content": self.system}] if self.system else []
        return [*system_messages, *self.messages[start:]]

    def _encode_within_context(self) -> list[int]:
        """Return the token ids of the conversation, without the oldest turns if it is too long.

        Part of the model's context is reserved for the answer: the maximum length of an answer, or
        a quarter of the context if that is less.
        """
        start = oldest_start = 0 if self.history else len(self.messages) - 1
        prompt = self.tokenizer.encode_chat(self._build_messages(start), add_generation_prompt=True)
        if self.context is None:
            return prompt
        limit = self.context - min(self.spec.new_token_limit, self.context // 4)
        while len(prompt) > limit and start + 2 < len(self.messages):
            start += 2
            prompt = self.tokenizer.encode_chat(
                self._build_messages(start), add_generation_prompt=True
            )
        if start > oldest_start:
            self.view.show_note(
                f"the model takes {self.context} tokens: it does not see the oldest {start} "
                f"messages any more"
            )
        return prompt

    def _answer_last_message(self) -> None:
        if self.plain:
            text = self.messages[-1]["content"]
            prompt = self.tokenizer.encode(f"{self.system}\n\n{text}" if self.system else text)
        else:
            prompt = self._encode_within_context()
        if self.context is not None and len(prompt) >= self.context:
            raise ConfigError(
                f"the message has {len(prompt)} tokens, and the model's context is {self.context}, "
                f"including the answer; shorten it"
            )
        self._stream_answer(prompt, [])

    def _stream_answer(self, prompt: list[int], answer_ids: list[int]) -> None:
        """Sample the answer to `prompt`, show it token by token, and store it.

        `prompt` are token ids. `answer_ids` are the tokens of an answer that is continued. Ctrl-C
        keeps the tokens sampled so far.
        """
        from weft.data.tokenizer import StreamDecoder
        from weft.engine.base import Request

        # Decode the part of the answer that exists already.
        decoder = StreamDecoder(self.tokenizer)
        if self.plain:
            decoder.feed(prompt)  # some tokenizers drop the space before the first word of a text
        new_ids = list[int]()
        text = decoder.feed(answer_ids)
        finish: str | None = None
        started = time.perf_counter()
        if self.context is None:
            max_new_tokens = None
        else:
            max_new_tokens = max(1, self.context - len(prompt) - len(answer_ids))
        # Sample, and show each token's text.
        with self.view.open_answer() as answer:
            if self.plain:
                answer.write(self.messages[-1]["content"], style="dim")
            answer.write(text, style="dim")
            try:
                with self.engine.generating(self.spec) as generator:
                    request = Request(
                        "chat",
                        0,
                        [*prompt, *answer_ids],
                        step=self.num_requests,
                        max_new_tokens=max_new_tokens,
                    )
                    generator.submit([request])
                    while not generator.idle:
                        for event in generator.step():
                            new_ids.append(event.token)
                            finish = event.finish
                            text += answer.write(decoder.feed([event.token]))
            except KeyboardInterrupt:
                if not self.view.interactive:
                    raise
                finish = "stopped"
            text += answer.write(decoder.flush())
        # Store the answer.
        self.num_requests += 1
        self.prompt_ids = prompt
        self.answer_ids = [*answer_ids, *new_ids]
        self.is_answer_complete = finish == "stop"
        self.messages.append({"role": "assistant", "content": text if self.plain else text.strip()})
        self._show_answer_end(finish, len(new_ids), time.perf_counter() - started)

    def _show_answer_end(self, finish: str | None, count: int, seconds: float) -> None:
        """Print an answer's token count and speed and, if it is incomplete, the reason.

        Nothing is printed unless the conversation is interactive.
        """
        if not self.view.interactive:
            return
        remarks = {
            "length": "; cut at max_new_tokens, an empty line continues it",
            "stopped": "; stopped, an empty line continues it",
        }
        self.view.show_note(
            f"       {count} tokens, {count / seconds:.0f} per second{remarks.get(str(finish), '')}"
        )


def _collect_limits(spec: GenerationSpec) -> dict[str, float]:
    """Return the values of `top_p`, `top_k` and `min_p` that limit sampling, keyed by name."""
    neutral_values = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    result: dict[str, float] = {}
    for name, value in neutral_values.items():
        if getattr(spec, name) != value:
            result[name] = getattr(spec, name)
    return result


LABEL_WIDTH = 7  # columns for the label of the speaker
MAX_TEXT_WIDTH = 100  # maximum columns of text; longer lines are hard to read


def is_printable(character: str) -> bool:
    """Return whether a character is safe to print.

    Control characters are not safe, because they could move the cursor.
    """
    return ord(character) >= 160 or 32 <= ord(character) < 127


class StreamWrapper:
    """Wrapper that breaks a stream of text into lines at word boundaries.

    `feed` accepts the next piece of the stream and returns the text that can be printed. An
    incomplete word is held back.
    """

    def __init__(self, width: int, indent: int) -> None:
        self.width = max(width, indent + 8)
        self.indent = indent
        self.column = indent
        self._gap = self._word = ""
        self._has_output = False

    def feed(self, text: str) -> str:
        printable = ""
        for character in text.replace("\t", "    "):
            if character == "\n":
                printable += self.flush() + "\n" + " " * self.indent
                self.column = self.indent
            elif character == " ":
                printable += self._place_word()
                self._gap += " " if self._has_output else ""
            elif is_printable(character):
                is_wide = cell_len(character) > 1  # CJK text has no spaces and can break anywhere
                printable += self._place_word() if is_wide else ""
                self._word += character
                if is_wide or self.indent + cell_len(self._word) >= self.width:
                    printable += self._place_word()
        return printable

    def flush(self) -> str:
        """Return the incomplete word that has been held back."""
        printable = self._place_word()
        self._gap = ""
        return printable

    def _place_word(self) -> str:
        word = self._word
        gap = self._gap
        self._word = ""
        if not word:
            return ""
        self._gap = ""
        self._has_output = True
        size = cell_len(word)
        if self.column + len(gap) + size > self.width and self.column > self.indent:
            self.column = self.indent + size
            return "\n" + " " * self.indent + word
        self.column += len(gap) + size
        return gap + word


class StreamedAnswer:
    """Context manager that shows one answer while it is generated; `write` adds text.

    The answer is preceded by `label`, the name of the speaker. If `label` is empty, "model" is
    shown in a terminal, and only the answer is written to a pipe.
    """

    def __init__(self, console: Console, *, interactive: bool, label: str = "") -> None:
        self._console = console
        self._interactive = interactive
        self._label = label
        self._wrap = StreamWrapper(min(console.width, MAX_TEXT_WIDTH), LABEL_WIDTH)

    def __enter__(self) -> StreamedAnswer:
        if self._interactive:
            self._console.print(f"[bold green]{self._label or 'model':{LABEL_WIDTH}}[/]", end="")
        elif self._label:
            self._print(f"{self._label}: ")
        return self

    def write(self, text: str, style: str = "") -> str:
        """Show text, and return it unchanged.

        Text with a `style` (the name of a `rich` style) is shown only in a terminal: it is the
        existing text that the answer continues.
        """
        if self._interactive:
            self._print(self._wrap.feed(text) + (self._wrap.flush() if style else ""), style)
        elif not style:
            self._print(text)
        return text

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._interactive:
            self._print(self._wrap.flush())
        self._print("\n")

    def _print(self, text: str, style: str = "") -> None:
        self._console.out(text, style=style or None, highlight=False, end="")
        self._console.file.flush()


class ChatView:
    """User interface that reads the user's lines from standard input and prints the answers.

    Unless both input and output are terminals, standard output gets only the answers, and notes go
    to standard error.
    """

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._console = Console(highlight=False)
        if self.interactive:
            self._notes = self._console
        else:
            self._notes = Console(stderr=True, highlight=False)
        if self.interactive:
            # line editing and history; absent on some systems
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")

    def read_line(self) -> str | None:
        """Return the user's next line, or None at the end of the input (Ctrl-D).

        Ctrl-C in a terminal only discards the current line.
        """
        while True:
            try:
                return input(self._format_prompt() if self.interactive else "")
            except EOFError:
                if self.interactive:
                    self._console.print()
                return None
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self.show_note("\nCtrl-D or /quit leaves")

    def open_answer(self, label: str = "") -> StreamedAnswer:
        return StreamedAnswer(self._console, interactive=self.interactive, label=label)

    @property
    def width(self) -> int:
        """Number of columns available for text."""
        return self._console.width

    def show(self, content: RenderableType) -> None:
        self._console.print(content)

    def open_live_display(self, content: RenderableType) -> Live:
        """Return a live display of `content`, which is removed from the terminal at its end."""
        return Live(content, console=self._console, transient=True, refresh_per_second=8)

    def show_title(self, text: str) -> None:
        self._notes.print(text, style="bold", markup=False, soft_wrap=True)

    def show_note(self, text: str) -> None:
        self._notes.print(text, style="dim", markup=False, soft_wrap=True)

    def show_error(self, text: str) -> None:
        self._notes.print(text, style="red", markup=False, soft_wrap=True)

    def _format_prompt(self) -> str:
        """Return the input prompt.

        In a terminal with colours, escape sequences are marked as zero-width for readline.
        """
        label = f"{'you':{LABEL_WIDTH}}"
        if self._console.color_system:
            return f"\n\x01\x1b[1;36m\x02{label}\x01\x1b[0m\x02"
        return f"\n{label}"
