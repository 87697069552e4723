"""The plan of a run as people read it before the first step: a short table, and everything else for those who ask."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LABEL = 14  # columns that labels take at most; a longer one pushes its own text to the right
ROW_LINES = 2  # that a row of the table takes on a terminal; what is longer ends in an ellipsis
ARROW, GLUED = " -> ", " ->\N{NO-BREAK SPACE}"  # a line never ends in an arrow's middle


@dataclass(frozen=True)
class Plan:
    """`rows` are (label, text) of the table; `notes` stand below it; `details` are for the log and for `--verbose`."""

    rows: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    details: Sequence[str] = ()

    def short(self, width: int | None = None) -> list[str]:
        """The table and the notes. `width` is the terminal's; None cuts and wraps nothing."""
        return [*self._table(width, ROW_LINES), *self.notes]

    def whole(self, width: int | None = None) -> list[str]:
        """Everything."""
        return [*self._table(width), *self.notes, *self.details]

    def _table(self, width: int | None, most: int | None = None) -> Iterator[str]:
        column = min(LABEL, max((len(label) for label, _ in self.rows), default=0))
        for label, text in self.rows:
            begin = f"{label:<{column}}  "
            lines = [text] if width is None else _wrapped(text, width, len(begin), column + 2)
            if most is not None and len(lines) > most:
                lines = [*lines[: most - 1], f"{lines[most - 1][: (width or 0) - column - 4]} …"]
            yield from (f"{begin if at == 0 else ' ' * (column + 2)}{line}" for at, line in enumerate(lines))


def _wrapped(text: str, width: int, first: int, others: int) -> list[str]:
    """Lines for a terminal of `width` columns, of which the first line has `first` taken and the others `others`."""
    filler = textwrap.TextWrapper(
        max(width, others + 20), initial_indent=" " * first, subsequent_indent=" " * others, break_on_hyphens=False
    )
    lines = filler.wrap(text.replace(ARROW, GLUED)) or [""]
    return [line.strip(" ").replace("\N{NO-BREAK SPACE}", " ") for line in lines]
