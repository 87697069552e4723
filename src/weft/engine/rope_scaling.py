"""Checking and reading of the option `rope_scaling`, such as `{type: linear, factor: 2}`.

The option extends a model's context beyond the positions it was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# name of the number that each type needs
NUMBERS = {"linear": "factor", "dynamic": "factor", "ntk": "alpha"}

MOST = 1_000_000


def find_problem(value: Any) -> str | None:
    """Return an error message if `value` is invalid for the option `rope_scaling`, else None."""
    if value is None:
        return None
    kinds = ", ".join(f"{{type: {kind}, {number}: 2}}" for kind, number in NUMBERS.items())
    if not isinstance(value, Mapping) or value.get("type") not in list(NUMBERS):
        return f"rope_scaling={value!r}: must be one of {kinds}"
    name = NUMBERS[value["type"]]
    number = value.get(name)
    if (
        set(value) != {"type", name}
        or isinstance(number, bool)
        or not isinstance(number, int | float)
        or not 1 <= number <= MOST
    ):
        return f"rope_scaling={value!r}: type {value['type']} takes {name}, a number from 1 to {MOST:,}, and nothing else"
    return None


def read_factor(value: Mapping[str, Any]) -> float:
    """Return the scaling factor in a value of the option `rope_scaling`.

    Its key is `factor` or `alpha`, depending on the type of scaling.
    """
    return float(value[NUMBERS[value["type"]]])


def compute_context(value: Mapping[str, Any] | None, positions: int) -> int:
    """Return the context length after RoPE scaling.

    `positions` is the context length that the model was trained with. `value` is the value of the
    option `rope_scaling`, or None for no scaling.
    """
    return positions if value is None else int(positions * read_factor(value))
