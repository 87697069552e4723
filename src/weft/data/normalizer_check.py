"""Check for tokenizer.json normalizers and decoders that make texts grow without bound.

A chain of forty steps that each replace one space by two would need a terabyte for one row, and the
`tokenizers` library would abort the process.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.errors import UserError
from weft.reading import read_text

MAX_GROWTH = 100  # maximum growth factor of a text; known tokenizers reach about 20
MAX_PREPENDED = 1000  # maximum number of characters that a normalizer may prepend
# Maximum growth factor by kind: bytes are written as two-byte letters; a character map such as
# NFKC can replace one character by many.
GROWTH = {"ByteLevel": 2.0, "Precompiled": 20.0}
PARTS = re.compile(r'(?<!\\)"(normalizer|decoder)"\s*:\s*(?=\{)')


def check_growth(file: Path, what: str) -> None:
    """Raise `UserError` if a tokenizer.json can make a text more than `MAX_GROWTH` times longer.

    The limit applies to its normalizer and to its decoder. `what` is the beginning of the error
    message.
    """
    for part, values in _parse_components(read_text(file, what)):
        grown = compute_growth(values)
        if grown > MAX_GROWTH:
            raise UserError(
                f"{what}: its {part} makes a text up to {grown:.3g} times longer, and at most "
                f"{MAX_GROWTH} are allowed; use "
                "another tokenizer"
            )


def _parse_components(text: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for the normalizer and the decoder in the text of a tokenizer.json.

    The rest of the file, which is large, is not parsed.
    """
    decoder = json.JSONDecoder()
    for match in PARTS.finditer(text):
        try:
            yield match[1], decoder.raw_decode(text, match.end())[0]
        except (ValueError, RecursionError):  # the library refuses the file
            continue


def compute_growth(values: Any) -> float:
    """Return the maximum factor by which a normalizer or decoder makes a text longer.

    `values` describes the normalizer or decoder in the format of tokenizer.json. The factor is
    infinite if a step prepends more than `MAX_PREPENDED` characters.
    """
    if not isinstance(values, Mapping):
        return 1.0
    chain = next(
        (
            values[name]
            for name in ("normalizers", "decoders")
            if isinstance(values.get(name), list)
        ),
        None,
    )
    # A sequence of steps.
    if chain is not None:
        return math.prod(compute_growth(each) for each in chain)
    if values.get("type") == "Prepend":
        if len(str(values.get("prepend"))) <= MAX_PREPENDED:
            return 1.0
        return math.inf
    if values.get("type") != "Replace":
        return GROWTH.get(str(values.get("type")), 1.0)
    # A replacement of a text or a regular expression.
    content = str(values.get("content") or "")
    pattern = values.get("pattern")
    if not isinstance(pattern, Mapping):
        return 1.0
    text = pattern.get("String")
    rule = pattern.get("Regex")
    if isinstance(text, str) and text:
        return max(1.0, len(content) / len(text))
    if _has_empty_match(rule):
        return 1.0 + len(content)
    return max(1.0, float(len(content)))


def _has_empty_match(rule: Any) -> bool:
    """Return whether a regular expression can match the empty string.

    Also returns True for an expression that Python cannot compile.
    """
    try:
        return re.match(str(rule or ""), "") is not None
    except (re.error, RecursionError, OverflowError):  # syntax that only the library knows
        return True
