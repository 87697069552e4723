"""Child process that parses large JSON bodies: `python -m weft.serve._read_json`.

It does not load torch.

Python's JSON parser holds the GIL until it is done: a list of five million numbers would delay
health checks by a second. A request on standard input consists of the body's length in bytes, as an
8-byte little-endian integer, and the body. The answer on standard output has the same layout; its
content is a pickled ("ok", value) or ("error", message).
"""

from __future__ import annotations

import json
import pickle
import sys
from typing import Any

import numpy as np

MOST_VALUES = 200_000  # limit per body, not counting lists converted to arrays
ARRAYS = ("prompt", "data")  # keys whose lists of numbers become arrays: faster to pickle
SHORT = 64  # shorter lists are not converted


def main() -> None:
    given = sys.stdin.buffer
    out = sys.stdout.buffer
    while head := given.read(8):
        answer: tuple[str, Any]
        try:
            answer = (
                "ok",
                CompactConverter().convert_value(
                    json.loads(given.read(int.from_bytes(head, "little")))
                ),
            )
        except (ValueError, RecursionError) as error:
            answer = "error", f"the body is not JSON: {error}"
        content = pickle.dumps(answer, protocol=5)
        out.write(len(content).to_bytes(8, "little") + content)
        out.flush()


class CompactConverter:
    """Converter of parsed JSON, which turns long lists of numbers into arrays.

    Only lists under the keys "prompt" and "data" (the constant `ARRAYS`) are converted.
    `convert_value` raises `ValueError` if the rest of the JSON has more than `MOST_VALUES` values.
    """

    def __init__(self) -> None:
        self._count = 0

    def convert_value(self, parsed: Any, *, arrays: bool = False) -> Any:
        if isinstance(parsed, dict):
            self._add(len(parsed))
            value = {}
            for key, each in parsed.items():
                value[key] = self.convert_value(each, arrays=arrays or key in ARRAYS)
            return value
        if not isinstance(parsed, list):
            return parsed
        if arrays and len(parsed) >= SHORT and (array := convert_numbers(parsed)) is not None:
            return array
        self._add(len(parsed))
        return [self.convert_value(each, arrays=arrays) for each in parsed]

    def _add(self, count: int) -> None:
        self._count += count
        if self._count > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES:,} values")


def convert_numbers(numbers: list[Any]) -> np.ndarray[Any, Any] | None:
    """Return the numbers as an int64 array, or as float64 if any is a float.

    Returns None if the list contains anything but numbers, or an integer too large for int64.
    """
    kinds = set(map(type, numbers))
    try:
        if kinds == {int}:
            return np.array(numbers, np.int64)
        if kinds in ({float}, {float, int}):
            return np.array(numbers, np.float64)
    except OverflowError:
        return None
    return None


if __name__ == "__main__":
    main()
