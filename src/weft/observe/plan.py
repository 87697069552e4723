"""Plan of a run, shown to the user before the first step: a short table, with details."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LABEL = 14  # maximum columns of the label column; a longer label moves its text to the right
ROW_LINES = 2  # maximum lines of a row on a terminal; longer text ends in an ellipsis
LINES = 10  # maximum lines of the whole table on a terminal
ARROW = " -> "
GLUED = " ->\N{NO-BREAK SPACE}"  # keeps an arrow on the line of the text after it


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run as text.

    `rows` are the rows of a table, each with a label and a text. `notes` are lines below the table.
    `details` are lines that appear only in the log and with `--verbose`. `hidden` lists the labels
    of rows that are not shown, for example because other output repeats them.
    """

    rows: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    details: Sequence[str] = ()
    hidden: Sequence[str] = ()

    def format_short(self, width: int | None = None) -> list[str]:
        """Return the lines of the table and the notes.

        `width` is the number of columns of the terminal; if it is None, nothing is cut or wrapped.
        """
        return [*self._format_table(width, short=True), *self.notes]

    def format_whole(self, width: int | None = None) -> list[str]:
        """Return the lines of the table, the notes and the details.

        `width` is the number of columns of the terminal; if it is None, nothing is wrapped.
        """
        return [*self._format_table(width), *self.notes, *self.details]

    def _format_table(self, width: int | None, *, short: bool = False) -> Iterator[str]:
        column = min(LABEL, max((len(label) for label, _ in self.rows), default=0))
        rows = [row for row in self.rows if row[0] not in self.hidden]
        begins = [f"{label:<{column}}  " for label, _ in rows]
        texts = [text for _, text in rows]
        cells = []
        for begin, text in zip(begins, texts, strict=True):
            cells.append(
                [text] if width is None else _wrap_text(text, width, len(begin), column + 2)
            )
        if short and width is not None:
            rooms = _allot_lines([len(lines) for lines in cells])
            for at, (begin, lines, room) in enumerate(zip(begins, cells, rooms, strict=True)):
                if len(lines) > room:
                    indent = len(begin) if room == 1 else column + 2
                    cells[at] = _cut_lines(lines, room, width - indent)
        for begin, lines in zip(begins, cells, strict=True):
            yield from (
                f"{begin if at == 0 else ' ' * (column + 2)}{line}" for at, line in enumerate(lines)
            )


def _allot_lines(needed: Sequence[int]) -> list[int]:
    """Return the number of lines for each row: the number in `needed`, but at most `ROW_LINES`.

    If the table would then have more than `LINES` lines, rows are reduced to one line each,
    starting with the last row, until the table is short enough.
    """
    rooms = [min(lines, ROW_LINES) for lines in needed]
    for at in reversed(range(len(rooms))):
        if sum(rooms) <= LINES:
            break
        rooms[at] = 1
    return rooms


def _cut_lines(lines: Sequence[str], room: int, width: int) -> list[str]:
    """Return the first `room` lines, with an ellipsis at the end of the last one.

    The last line is cut so that it fits in `width` columns together with the ellipsis.
    """
    *head, last = lines[:room]
    return [*head, f"{last[: max(0, width - 2)].rstrip()} …"]


def _wrap_text(text: str, width: int, first: int, others: int) -> list[str]:
    """Wrap text for a terminal of `width` columns.

    Space is left free at the start of each line for a label or indentation: `first` columns in the
    first line, and `others` columns in all other lines.
    """
    filler = textwrap.TextWrapper(
        max(width, others + 20),
        initial_indent=" " * first,
        subsequent_indent=" " * others,
        break_on_hyphens=False,
    )
    lines = filler.wrap(text.replace(ARROW, GLUED)) or [""]
    return [line.strip(" ").replace("\N{NO-BREAK SPACE}", " ") for line in lines]
