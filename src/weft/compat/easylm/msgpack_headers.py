"""Reader and writer of the headers of msgpack values.

A msgpack value is a header (its kind and size) and, for texts, bytes and extensions, that many
bytes of content. The library `msgpack` returns values with their contents, which takes three copies
of a tensor in memory. This module handles only the headers. The bytes of a tensor are skipped, or
copied directly between the file and the tensor.

    cursor = MessageCursor(file, "PATH", 0, size)
    cursor.read("array", "an entry")      # number of elements
    cursor.read_name("a key")
    cursor.skip(num_bytes)
    pack("array", 2) + pack_text("transformer")

Specification: github.com/msgpack/msgpack, spec.md.
"""

from __future__ import annotations

from typing import BinaryIO, Literal, NamedTuple

from weft.errors import CheckpointError

Kind = Literal["integer", "map", "array", "text", "binary", "extension", "number", "constant"]

LONGEST_TEXT = 200  # bytes; longer names occur in damaged files only


class KindCodes(NamedTuple):
    """Header bytes of a kind of value.

    If the size is at most `max_fixed`, the header is the single byte `fixed` + size. Otherwise, it
    is the code of a pair (code, width) in `sized`, followed by the size as a big-endian integer of
    `width` bytes.
    """

    fixed: int
    max_fixed: int
    sized: tuple[tuple[int, int], ...]


class MessageHeader(NamedTuple):
    """Kind and size of a value.

    `size` is the number of bytes of a text, binary or extension, the number of elements of an array
    or of pairs of a map, or the integer itself. `tag` is the type code of an extension.
    """

    kind: Kind
    size: int
    tag: int = 0


CODES: dict[Kind, KindCodes] = {
    "integer": KindCodes(0x00, 127, ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8))),
    "map": KindCodes(0x80, 15, ((0xDE, 2), (0xDF, 4))),
    "array": KindCodes(0x90, 15, ((0xDC, 2), (0xDD, 4))),
    "text": KindCodes(0xA0, 31, ((0xD9, 1), (0xDA, 2), (0xDB, 4))),
    "binary": KindCodes(0xC4, -1, ((0xC4, 1), (0xC5, 2), (0xC6, 4))),
    "extension": KindCodes(0xC7, -1, ((0xC7, 1), (0xC8, 2), (0xC9, 4))),
}
FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}  # code -> bytes
# Values that occur only in skipped entries of weight streams: code -> bytes of signed integers and
# floats, and the codes of nil and Booleans.
NUMBERS = {0xCA: 4, 0xCB: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
CONSTANTS = (0xC0, 0xC2, 0xC3)
SIZED: dict[int, tuple[Kind, int]] = {
    code: (kind, width) for kind, codes in CODES.items() for code, width in codes.sized
}


class MessageCursor:
    """Position in a file of msgpack values.

    Bytes at and after the position `end` are not read. Error messages begin with `where`, and the
    argument `label` of a method names the value in them. All methods raise `CheckpointError` for a
    file that is cut short or damaged.
    """

    def __init__(self, file: BinaryIO, where: str, position: int, end: int) -> None:
        self.file = file
        self.where = where
        self.position = position
        self.end = end

    def fail(self, problem: str) -> CheckpointError:
        """Return the error for a problem at the current position."""
        return CheckpointError(
            f"{self.where}: at byte {self.position:,}: {problem}; the file is damaged, or was not "
            f"copied completely"
        )

    def check_room(self, size: int, label: str) -> None:
        """Raise `CheckpointError` if fewer than the `size` bytes of a value are left."""
        room = self.end - self.position
        if size > room:
            raise self.fail(f"{label} takes {size:,} bytes, and {room:,} are left")

    def read_bytes(self, size: int, label: str = "a value") -> bytes:
        self.check_room(size, label)
        content = self.file.read(size)
        if len(content) < size:
            raise self.fail("the file ended while it was read")
        self.position += size
        return content

    def skip(self, size: int, label: str = "a value") -> int:
        """Skip `size` bytes and return the position of the first one."""
        self.check_room(size, label)
        start = self.position
        self.position += size
        self.file.seek(self.position)
        return start

    def move_to(self, position: int) -> None:
        """Move to an earlier position, or to the end of a value that was read."""
        self.position = position
        self.file.seek(position)

    def read_header(self) -> MessageHeader:
        code = self.read_bytes(1)[0]
        for kind, codes in CODES.items():
            if codes.fixed <= code <= codes.fixed + codes.max_fixed:
                return MessageHeader(kind, code - codes.fixed)
        if code in FIXED_EXTENSIONS:
            return MessageHeader("extension", FIXED_EXTENSIONS[code], self.read_bytes(1)[0])
        if code in SIZED:
            kind, width = SIZED[code]
            size = int.from_bytes(self.read_bytes(width), "big")
            return MessageHeader(kind, size, self.read_bytes(1)[0] if kind == "extension" else 0)
        if code in NUMBERS:
            self.skip(NUMBERS[code])
            return MessageHeader("number", 0)
        if code in CONSTANTS:
            return MessageHeader("constant", 0)
        self.position -= 1
        raise self.fail(f"0x{code:02x} begins no msgpack value")

    def read(self, kind: Kind, label: str) -> int:
        """Read the header of a value of the given kind, and return its size."""
        start = self.position
        header = self.read_header()
        if header.kind != kind:
            self.position = start
            raise self.fail(f"{label} is of kind {header.kind}, not {kind}")
        return header.size

    def read_name(self, label: str) -> str:
        """Read a text without slashes and line breaks.

        A value of the kind "binary" is accepted too, because old versions of msgpack wrote texts
        so.
        """
        start = self.position
        header = self.read_header()
        if header.kind not in ("text", "binary") or header.size > LONGEST_TEXT:
            self.position = start
            raise self.fail(f"{label} is of kind {header.kind}, size {header.size:,}, not a name")
        try:
            text = self.read_bytes(header.size, label).decode()
        except UnicodeDecodeError:
            raise self.fail(f"{label} is not UTF-8 text") from None
        if not text.isprintable() or "/" in text:
            raise self.fail(f"{label} is {text!r}, not a name")
        return text


def pack(kind: Kind, size: int, tag: int = 0) -> bytes:
    """Return the shortest header of a value, as the library `msgpack` writes it."""
    codes = CODES[kind]
    if size <= codes.max_fixed:
        return bytes([codes.fixed + size])
    if kind == "extension" and size in FIXED_EXTENSIONS.values():
        return bytes([0xD4 + size.bit_length() - 1, tag])
    for code, width in codes.sized:
        if size < 1 << 8 * width:
            ending = bytes([tag]) if kind == "extension" else b""
            return bytes([code]) + size.to_bytes(width, "big") + ending
    raise ValueError(f"{kind} of size {size:,}: msgpack has no header for it")


def pack_text(text: str) -> bytes:
    encoded = text.encode()
    return pack("text", len(encoded)) + encoded
