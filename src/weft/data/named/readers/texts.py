"""Reader of plain text. All of the text is trained on, to reduce forgetting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.data.named.example import Example, ReaderContext
from weft.data.rows import Row
from weft.registry import register_reader

CHUNK = 64 * 1024


@register_reader("plain_text")
def plain_text(
    rows: Iterable[Row], use: ReaderContext, *, column: str = "text", max_chunk_size: int = CHUNK
) -> Iterator[Example]:
    """Read a column of plain text, cut into pieces of at most `max_chunk_size` characters.

    The pieces of a row are never split between training and validation.
    """
    for index, row in enumerate(rows):
        text = str(row[column] or "")
        if not text.strip():
            use.skip("an empty text")
            continue
        for start in range(0, len(text), max_chunk_size):
            yield Example(text=text[start : start + max_chunk_size], group=str(index))
