"""Display of a conversation: speaker labels and wrapped text in a terminal.

If the output is piped, only the answers are printed.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import TracebackType

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.live import Live

LABEL_WIDTH = 7  # columns of the speaker's label
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
        out = ""
        for character in text.replace("\t", "    "):
            if character == "\n":
                out += self.flush() + "\n" + " " * self.indent
                self.column = self.indent
            elif character == " ":
                out += self._place_word()
                self._gap += " " if self._has_output else ""
            elif is_printable(character):
                wide = cell_len(character) > 1  # scripts written without spaces break anywhere
                out += self._place_word() if wide else ""
                self._word += character
                if wide or self.indent + cell_len(self._word) >= self.width:
                    out += self._place_word()
        return out

    def flush(self) -> str:
        """Return the incomplete word that has been held back."""
        out = self._place_word()
        self._gap = ""
        return out

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

    The answer is preceded by `label`, the name of the speaker. If `label` is empty, a terminal
    shows "model" instead, and a pipe gets only the answer.
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

        With a `style` (the name of a `rich` style), the text is shown only on a terminal. This is
        used for existing text that the answer continues.
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
    """Terminal interface of a chat, which reads the user's lines and shows the answers.

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

    def show(self, what: RenderableType) -> None:
        self._console.print(what)

    def open_live_display(self, what: RenderableType) -> Live:
        """Return a live display of `what`, which disappears from the terminal when it is closed."""
        return Live(what, console=self._console, transient=True, refresh_per_second=8)

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
