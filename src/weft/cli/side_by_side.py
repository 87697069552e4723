"""`weft chat A B`: two models answer the same lines in separate conversations.

The answers are shown side by side if the terminal is wide enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from weft.cli.conversation import HELP as HELP_OF_ONE
from weft.cli.conversation import LABELS, AnswerDisplay, Conversation
from weft.errors import RunError, UserError

if TYPE_CHECKING:
    from weft.cli.conversation import ChatView

MIN_TERMINAL_WIDTH = 80  # minimum terminal width for answers side by side
HELP = "/a LINE, /b LINE a message or a command for one model; other lines are for both"


class AnswerColumn:
    """Display of a streamed answer in one column of the terminal."""

    def __init__(self, side: ColumnView) -> None:
        self._side = side

    def __enter__(self) -> AnswerColumn:
        return self

    def write(self, text: str, style: str = "") -> str:
        from weft.cli.conversation import is_printable

        printable_text = "".join(
            each for each in text.replace("\t", "    ") if each == "\n" or is_printable(each)
        )
        self._side.answer_text.append(printable_text, style=style or None)
        self._side.both.refresh()
        return text

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._side.answer_text.rstrip()


class ColumnView:
    """User interface of one of two conversations that are shown side by side.

    Notes to the user are held back until both models have answered the current line.
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
        if self.both.columns:
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
    """Chat with two models at once, each in its own conversation.

    Both models answer the lines that the user types.
    """

    def __init__(self, chats: Sequence[Conversation], view: ChatView) -> None:
        self.view = view
        self.columns = view.interactive and view.width >= MIN_TERMINAL_WIDTH
        self._sides = [ColumnView(self, label) for label in LABELS]
        self._chats = list(chats)
        for chat, side in zip(self._chats, self._sides, strict=True):
            chat.view = side
        self._live = None if not self.columns else view.open_live_display(Text())

    def converse(self) -> None:
        """Read and handle lines until the input ends or the user quits.

        On a terminal, errors are shown and the chat continues. Otherwise, an error ends the
        program.
        """
        while (line := self.view.read_line()) is not None:
            if not self.handle_line(line):
                return

    def handle_line(self, line: str) -> bool:
        """Handle one line of input, and return False if the user wants to leave."""
        self.columns = self.view.interactive and self.view.width >= MIN_TERMINAL_WIDTH
        for side in self._sides:
            side.reset()
        indices, line = self._parse_address(line)
        if line.strip() == "/help":
            self.view.show_note(f"{HELP_OF_ONE}\n{HELP}")
            return True
        if not self.columns:
            stays = self._answer_line(indices, line)
            self._show_remaining_notes()
            return stays
        self._live = self.view.open_live_display(Text())
        with self._live:
            stays = self._answer_line(indices, line)
        if any(side.answered for side in self._sides):
            self.view.show(self._build_table())
        else:
            self._show_remaining_notes()
        return stays

    def refresh(self) -> None:
        """Redraw the display with the answers received so far."""
        if self._live is not None:
            self._live.update(self._build_table())

    def _parse_address(self, line: str) -> tuple[list[int], str]:
        """Return the indices of the models that a line addresses, and the line without the address.

        A line that begins with `/a` or `/b` addresses one model. Other lines address both.
        """
        for index, label in enumerate(LABELS):
            name, _, rest = line.strip().partition(" ")
            if name == f"/{label.lower()}" and rest.strip():
                return [index], rest.strip()
        return [0, 1], line

    def _answer_line(self, indices: Sequence[int], line: str) -> bool:
        stays = True
        for index in indices:
            chat = self._chats[index]
            side = self._sides[index]
            try:
                stays = chat.handle_line(line) and stays
            except (UserError, RunError, OSError) as error:
                if not self.view.interactive:
                    raise
                side.show_error(str(error))
            if side.answered and not self.columns:
                self._show_notes(side)
        return stays

    def _show_remaining_notes(self) -> None:
        """Show the notes that have not been shown yet.

        If both conversations have the same notes, these are shown only once.
        """
        one, other = self._sides
        if one.notes == other.notes:
            for text, style in one.notes:
                (self.view.show_error if style == "red" else self.view.show_note)(text)
            one.notes = []
            other.notes = []
        for side in self._sides:
            self._show_notes(side)

    def _show_notes(self, side: ColumnView) -> None:
        for text, style in side.notes:
            (self.view.show_error if style == "red" else self.view.show_note)(
                f"{side.label}      {text.strip()}"
            )
        side.notes = []

    def _build_table(self) -> Table:
        grid = Table(
            box=None, expand=True, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold green"
        )
        for label in LABELS:
            grid.add_column(label, ratio=1, overflow="fold")
        grid.add_row(*(side.format_cell() for side in self._sides))
        return grid
