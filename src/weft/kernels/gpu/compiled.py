"""Pointwise functions as one kernel each on a GPU: torch compiles them, for any number of rows at
once.

What a compiled kernel computes between its inputs and its results is float32, and rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.kernels.gpu import flex


def serves(*tensors: Tensor) -> bool:
    """Whether such kernels can be made for these tensors: on a GPU, of float32 or less, where
    Triton has what it needs.
    """
    fit = all(x.device.type == "cuda" and x.dtype != torch.float64 for x in tensors)
    return fit and flex._compiles()


def one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled, where it is first called; sizes are inputs, so that no pack brings
    another compilation.
    """

    @functools.wraps(function)
    def call(*given: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=flex.RECOMPILE_LIMIT):
            return compiled(function)(*given)

    return call


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True)
