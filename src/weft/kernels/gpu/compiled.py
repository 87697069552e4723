"""Pointwise functions as single GPU kernels, compiled by torch once for any number of rows.

A compiled kernel computes intermediate values in float32 and rounds only its results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.kernels.gpu import flex


def serves(*tensors: Tensor) -> bool:
    """Return whether kernels can be compiled for these tensors.

    The tensors must be on a GPU and not be float64, and Triton must have a compiler and Python's
    headers.
    """
    fit = all(x.device.type == "cuda" and x.dtype != torch.float64 for x in tensors)
    return fit and flex._can_compile()


def compile_as_one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `function` that torch compiles at its first call.

    Shapes are dynamic, so packs of other sizes do not cause a recompilation.
    """

    @functools.wraps(function)
    def call(*given: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=flex.RECOMPILE_LIMIT):
            return compile_dynamic(function)(*given)

    return call


@functools.cache
def compile_dynamic(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True)
