"""The plan of a run as people read it before the first step: a short table, and everything else for
those who ask.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LABEL = 14  # columns that labels take at most; a longer one pushes its own text to the right
ROW_LINES = 2  # that a row of the table takes on a terminal; what is longer ends in an ellipsis
LINES = 10  # of the whole table on a terminal
ARROW = " -> "
GLUED = " ->\N{NO-BREAK SPACE}"  # a line never ends in an arrow's middle


@dataclass(frozen=True)
class Plan:
    """`rows` are (label, text) of the table; `notes` stand below it; `details` are for the log and
    for `--verbose`. Rows with a `hidden` label are left out.
    """

    rows: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    details: Sequence[str] = ()
    hidden: Sequence[str] = ()

    def short(self, width: int | None = None) -> list[str]:
        """The table and the notes. `width` is the terminal's; None cuts and wraps nothing."""
        return [*self._table(width, short=True), *self.notes]

    def whole(self, width: int | None = None) -> list[str]:
        """Everything."""
        return [*self._table(width), *self.notes, *self.details]

    def _table(self, width: int | None, *, short: bool = False) -> Iterator[str]:
        column = min(LABEL, max((len(label) for label, _ in self.rows), default=0))
        rows = [row for row in self.rows if row[0] not in self.hidden]
        begins = [f"{label:<{column}}  " for label, _ in rows]
        texts = [text for _, text in rows]
        cells = [
            [text] if width is None else _wrapped(text, width, len(begin), column + 2)
            for begin, text in zip(begins, texts, strict=True)
        ]
        if short and width is not None:
            rooms = _rooms([len(lines) for lines in cells])
            cells = [
                lines
                if len(lines) <= room
                else _cut(lines, room, width - (len(begin) if room == 1 else column + 2))
                for begin, lines, room in zip(begins, cells, rooms, strict=True)
            ]
        for begin, lines in zip(begins, cells, strict=True):
            yield from (
                f"{begin if at == 0 else ' ' * (column + 2)}{line}" for at, line in enumerate(lines)
            )


def _rooms(needed: Sequence[int]) -> list[int]:
    """Lines that each row gets: what it needs, at most two; where all are too many, the last rows
    get one first.
    """
    rooms = [min(lines, ROW_LINES) for lines in needed]
    for at in reversed(range(len(rooms))):
        if sum(rooms) <= LINES:
            break
        rooms[at] = 1
    return rooms


def _cut(lines: Sequence[str], room: int, width: int) -> list[str]:
    """The first lines, of which the last ends in an ellipsis."""
    *kept, last = lines[:room]
    return [*kept, f"{last[: max(0, width - 2)].rstrip()} …"]


def _wrapped(text: str, width: int, first: int, others: int) -> list[str]:
    """Lines for a terminal of `width` columns, of which the first line has `first` taken and the
    others `others`.
    """
    filler = textwrap.TextWrapper(
        max(width, others + 20),
        initial_indent=" " * first,
        subsequent_indent=" " * others,
        break_on_hyphens=False,
    )
    lines = filler.wrap(text.replace(ARROW, GLUED)) or [""]
    return [line.strip(" ").replace("\N{NO-BREAK SPACE}", " ") for line in lines]
