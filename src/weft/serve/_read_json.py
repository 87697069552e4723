"""A process that reads large JSON bodies for the server: `python -m weft.serve._read_json`.

Loads no torch.

Python reads JSON in one go, during which no other thread of its process runs: a list of five
million numbers would keep health checks waiting for a second. Bodies come from standard input,
eight bytes of length before each; answers go to standard output in the same way, pickled: ("ok",
value), or ("error", what is wrong).
"""

from __future__ import annotations

import json
import pickle
import sys
from typing import Any

import numpy as np

MOST_VALUES = 200_000  # in one body, numbers in lists below `ARRAYS` apart
ARRAYS = ("prompt", "data")  # keys whose lists of numbers become arrays, which travel fast
SHORT = 64  # numbers of a list that stays one


def main() -> None:
    given = sys.stdin.buffer
    out = sys.stdout.buffer
    while head := given.read(8):
        answer: tuple[str, Any]
        try:
            answer = "ok", Compact().value(json.loads(given.read(int.from_bytes(head, "little"))))
        except (ValueError, RecursionError) as error:
            answer = "error", f"the body is not JSON: {error}"
        content = pickle.dumps(answer, protocol=5)
        out.write(len(content).to_bytes(8, "little") + content)
        out.flush()


class Compact:
    """Turns lists of numbers into arrays, and counts all else.

    Raises `ValueError` for too much of it.
    """

    def __init__(self) -> None:
        self._count = 0

    def value(self, found: Any, *, arrays: bool = False) -> Any:
        if isinstance(found, dict):
            self._add(len(found))
            return {
                key: self.value(each, arrays=arrays or key in ARRAYS) for key, each in found.items()
            }
        if not isinstance(found, list):
            return found
        if arrays and len(found) >= SHORT and (array := as_array(found)) is not None:
            return array
        self._add(len(found))
        return [self.value(each, arrays=arrays) for each in found]

    def _add(self, count: int) -> None:
        self._count += count
        if self._count > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES:,} values")


def as_array(numbers: list[Any]) -> np.ndarray[Any, Any] | None:
    """The numbers as int64 or, where some have a fraction, float64; None for a list that holds
    anything else.
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
