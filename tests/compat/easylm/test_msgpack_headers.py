"""Headers against the library msgpack, at every size where their form changes."""

from __future__ import annotations

import io
from typing import Any

import msgpack
import pytest

from weft.compat.easylm.msgpack_headers import CODES, MessageCursor, pack, pack_text
from weft.errors import CheckpointError

EDGES = sorted(
    {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17}
    | {edge + step for edge in (2**5, 2**7, 2**8, 2**16) for step in (-1, 0, 1)}
)
LARGE = [2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1]


def encode(kind: str, size: int) -> bytes:
    """Return the header that the library writes."""
    packer = msgpack.Packer()
    if kind in ("array", "map"):
        return getattr(packer, f"pack_{kind}_header")(size)
    values: dict[str, Any] = {
        "integer": size,
        "text": "a" * size if kind == "text" else "",
        "binary": bytes(size) if kind == "binary" else b"",
        "extension": msgpack.ExtType(1, bytes(size)) if kind == "extension" else None,
    }
    packed = packer.pack(values[kind])
    return packed if kind == "integer" else packed[: len(packed) - size]


def cursor_of(content: bytes) -> MessageCursor:
    return MessageCursor(io.BytesIO(content), "FILE", 0, len(content))


@pytest.mark.parametrize("kind", CODES)
def test_headers_are_those_of_the_library(kind: Any) -> None:
    for size in [*EDGES, *(LARGE if kind == "integer" else [])]:
        header = pack(kind, size, 1)
        assert header == encode(kind, size), size
        cursor = cursor_of(header)
        assert cursor.read_header() == (kind, size, 1 if kind == "extension" else 0)
        assert cursor.position == len(header)
        for length in range(len(header)):
            with pytest.raises(CheckpointError, match=r"FILE: at byte"):
                cursor_of(header[:length]).read_header()


def test_sizes_without_a_header_are_refused() -> None:
    for kind, size in (("binary", 2**32), ("array", 2**32), ("integer", 2**64)):
        with pytest.raises(ValueError, match="msgpack has no header"):
            pack(kind, size)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1, -33, -(2**40), 1.5, None, True, False])
def test_other_values_are_skipped_or_refused(value: Any) -> None:
    packed = msgpack.packb(value)
    cursor = cursor_of(packed)
    if value == -1:  # a negative fixint, which no stream contains
        with pytest.raises(CheckpointError, match="0xff begins no msgpack value"):
            cursor.read_header()
    else:
        assert cursor.read_header().kind in ("number", "constant")
        assert cursor.position == len(packed)


def test_names_are_texts_or_bytes() -> None:
    for packed in (pack_text("größe"), msgpack.packb("größe".encode())):
        assert cursor_of(packed).read_name("a name") == "größe"
    for wrong in ("a\nb", "a/b", "a" * 300, 3, b"\xff"):
        with pytest.raises(CheckpointError, match="a name is"):
            cursor_of(msgpack.packb(wrong)).read_name("a name")
