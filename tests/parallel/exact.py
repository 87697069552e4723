"""A run of one process in float64, and how far a run in float32 of the same may lie from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from tests.bounds import assert_within
from tests.roundings import LIKELY, exactly

Values = dict[str, Tensor]
# Of what is computed in float64 in two ways: a tiny network's few thousand roundings of 1e-16 each,
# and far below any mistake.
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def bound(compute: Callable[[], Any]) -> tuple[Any, Any]:
    """A run of `compute`, which is in float64, and one whose values are the largest probable errors
    of float32. A run is a dataclass with outputs, gradients and parameters.
    """
    runs: list[Any] = []

    def list_values() -> list[Tensor]:
        runs.append(made := compute())
        each = (*made.outputs, made.gradients, made.parameters)
        return [value for values in each for value in values.values()]

    found = iter(exactly(list_values))

    def largest(values: Values) -> Values:
        return {name: torch.tensor(LIKELY * next(found).deviation) for name in values}

    first = runs[0]
    outputs = [largest(values) for values in first.outputs]
    gradients = largest(first.gradients)
    return first, replace(
        first, outputs=outputs, gradients=gradients, parameters=largest(first.parameters)
    )


def same(found: Values, expected: Values, bounds: Values | None = None, name: str = "") -> None:
    """To float64's precision, or within `bounds`."""
    assert found.keys() == expected.keys(), name
    for key, value in expected.items():
        if bounds is None:
            assert_close(found[key], value, **EXACT, msg=lambda m, key=key: f"{name} {key}: {m}")
        else:
            assert_within(found[key], value, bounds[key], f"{name} {key}")
