"""Compilation of parts of a network and of single functions with torch, for any number of rows."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from weft.kernels.gpu import flex

ROWS = 0  # dimension whose size varies between calls


def find_obstacle(device: torch.device) -> str | None:
    """Return the reason why torch cannot compile for the device, or None if it can."""
    if device.type == "cuda":
        if flex.can_compile():
            return None
        return "Triton, a C compiler or Python's header files are missing"
    commands = os.environ.get("CXX"), "g++", "clang++"
    has_compiler = any(
        shutil.which(command.split()[0]) for command in commands if command and command.strip()
    )
    return None if has_compiler else "there is no C++ compiler (CXX, g++ or clang++)"


def compile_by_rows(
    function: Callable[..., Any], backend: Any = "inductor", *, full_graph: bool = True
) -> Callable[..., Any]:
    """Return a version of `function` that is compiled at its first call, for any number of rows.

    Rows are the first dimension of all tensor arguments, and of all tensors in dataclass arguments.
    Calls with a single row use a separate compiled version. Callers in the same process share the
    compiled code if their arguments have the same structure, for example modules with equal sizes.
    If `full_graph` is False, the function may call code that cannot be compiled; only the code
    between these calls is then compiled.
    """

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        fields = [
            value
            for argument in arguments
            if is_dataclass(argument)
            for value in vars(argument).values()
        ]
        for value in (*arguments, *fields):
            if isinstance(value, Tensor) and value.dim():
                torch._dynamo.maybe_mark_dynamic(value, ROWS)
        with torch._dynamo.config.patch(recompile_limit=flex.RECOMPILE_LIMIT):
            return _compile(function, backend, full_graph)(*arguments)

    return call


@functools.cache
def _compile(function: Callable[..., Any], backend: Any, full_graph: bool) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=full_graph, backend=backend)


def serves(*tensors: Tensor) -> bool:
    """Return whether kernels can be compiled for these tensors.

    The tensors must be on a GPU and not be float64, and Triton must have a compiler and Python's
    headers.
    """
    are_supported = all(x.device.type == "cuda" and x.dtype != torch.float64 for x in tensors)
    return are_supported and flex.can_compile()


def compile_as_one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `function` that torch compiles at its first call.

    Shapes are dynamic, so packs of other sizes do not cause a recompilation.
    """

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=flex.RECOMPILE_LIMIT):
            return compile_dynamic(function)(*arguments)

    return call


@functools.cache
def compile_dynamic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled for dynamic shapes, the same object for every call."""
    return torch.compile(function, dynamic=True, fullgraph=True)
