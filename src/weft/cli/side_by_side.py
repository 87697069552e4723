"""`weft chat A B`: two models answer the same lines in separate conversations.

They are shown side by side if the terminal is wide enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from weft.cli.conversation import HELP as HELP_OF_ONE
from weft.cli.conversation import LABELS, Chat, Shown
from weft.errors import RunError, UserError

if TYPE_CHECKING:
    from weft.cli.chat_view import View

COLUMNS = 80  # minimum terminal width for answers side by side
HELP = "/a LINE, /b LINE a message or a command for one model; other lines are for both"


class Cell:
    """A growing answer in its column."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def __enter__(self) -> Cell:
        return self

    def write(self, text: str, style: str = "") -> str:
        from weft.cli.chat_view import harmless

        kept = "".join(
            each for each in text.replace("\t", "    ") if each == "\n" or harmless(each)
        )
        self._side.said.append(kept, style=style or None)
        self._side.both.refresh()
        return text

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._side.said.rstrip()


class Side:
    """View of one of the two conversations.

    Notes are held until both models have handled a line.
    """

    def __init__(self, both: SideBySide, label: str) -> None:
        self.both = both
        self.label = label
        self.interactive = both.view.interactive
        self.said = Text()
        self.notes = list[tuple[str, str]]()
        self.answered = False

    def ask(self) -> str | None:
        return self.both.view.ask()

    def answer(self) -> Shown:
        self.answered = True
        if self.both.columns:
            return Cell(self)
        return self.both.view.answer(self.label)

    def note(self, text: str) -> None:
        self.notes.append((text, "dim"))

    def error(self, text: str) -> None:
        self.notes.append((text, "red"))

    def begin(self) -> None:
        self.said = Text()
        self.notes = []
        self.answered = False

    def cell(self) -> Text:
        """Return the answer, with its notes below."""
        lines = [Text(text.strip(), style=style) for text, style in self.notes]
        return Text("\n").join([*([self.said] if self.answered else []), *lines])


class SideBySide:
    """Two conversations with one user."""

    def __init__(self, chats: Sequence[Chat], view: View) -> None:
        self.view = view
        self.columns = view.interactive and view.width >= COLUMNS
        self._sides = [Side(self, label) for label in LABELS]
        self._chats = list(chats)
        for chat, side in zip(self._chats, self._sides, strict=True):
            chat.view = side
        self._live = None if not self.columns else view.live(Text())

    def converse(self) -> None:
        """Read and handle lines until the input ends.

        In a pipe an error ends the conversation, as with one model.
        """
        while (line := self.view.ask()) is not None:
            if not self.take(line):
                return

    def take(self, line: str) -> bool:
        """Handle one line; return False to leave."""
        self.columns = self.view.interactive and self.view.width >= COLUMNS
        for side in self._sides:
            side.begin()
        asked, line = self._asked(line)
        if line.strip() == "/help":
            self.view.note(f"{HELP_OF_ONE}\n{HELP}")
            return True
        if not self.columns:
            stays = self._both(asked, line)
            self._rest()
            return stays
        self._live = self.view.live(Text())
        with self._live:
            stays = self._both(asked, line)
        if any(side.answered for side in self._sides):
            self.view.show(self._table())
        else:
            self._rest()
        return stays

    def refresh(self) -> None:
        """Redraw the answers received so far."""
        if self._live is not None:
            self._live.update(self._table())

    def _asked(self, line: str) -> tuple[list[int], str]:
        """Return (indices of the addressed models, the line without the address)."""
        for index, label in enumerate(LABELS):
            name, _, rest = line.strip().partition(" ")
            if name == f"/{label.lower()}" and rest.strip():
                return [index], rest.strip()
        return [0, 1], line

    def _both(self, asked: Sequence[int], line: str) -> bool:
        stays = True
        for index in asked:
            chat = self._chats[index]
            side = self._sides[index]
            try:
                stays = chat.take(line) and stays
            except (UserError, RunError, OSError) as error:
                if not self.view.interactive:
                    raise
                side.error(str(error))
            if side.answered and not self.columns:
                self._tell(side)
        return stays

    def _rest(self) -> None:
        """Show notes of a line that no model answered; equal notes are shown once."""
        one, other = self._sides
        if one.notes == other.notes:
            for text, style in one.notes:
                (self.view.error if style == "red" else self.view.note)(text)
            one.notes = []
            other.notes = []
        for side in self._sides:
            self._tell(side)

    def _tell(self, side: Side) -> None:
        for text, style in side.notes:
            (self.view.error if style == "red" else self.view.note)(
                f"{side.label}      {text.strip()}"
            )
        side.notes = []

    def _table(self) -> Table:
        grid = Table(
            box=None, expand=True, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold green"
        )
        for label in LABELS:
            grid.add_column(label, ratio=1, overflow="fold")
        grid.add_row(*(side.cell() for side in self._sides))
        return grid
