"""Functions of whole parts of a network, compiled by torch for any number of rows."""

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

ROWS = 0  # the dimension whose size differs from call to call


def obstacle(device: torch.device) -> str | None:
    """What keeps torch from compiling for the device; None where nothing does."""
    if device.type == "cuda":
        if flex._compiles():
            return None
        return "Triton, a C compiler or Python's header files are missing"
    commands = os.environ.get("CXX"), "g++", "clang++"
    found = any(
        shutil.which(command.split()[0]) for command in commands if command and command.strip()
    )
    return None if found else "there is no C++ compiler (CXX, g++ or clang++)"


def by_rows(
    function: Callable[..., Any], backend: Any = "inductor", *, whole: bool = True
) -> Callable[..., Any]:
    """The function compiled where it is first called, for tensors of any number of rows (one row
    apart).

    The first dimension of tensors among its arguments, and in dataclasses among them, is that of
    rows. What is compiled serves all callers in the process whose arguments are alike: modules of
    one form, say. Not `whole`: it may call what is not compiled, and is compiled in the parts
    between.
    """

    @functools.wraps(function)
    def call(*given: Any) -> Any:
        inside = [value for each in given if is_dataclass(each) for value in vars(each).values()]
        for each in (*given, *inside):
            if isinstance(each, Tensor) and each.dim():
                torch._dynamo.maybe_mark_dynamic(each, ROWS)
        with torch._dynamo.config.patch(recompile_limit=flex.RECOMPILE_LIMIT):
            return _compiled(function, backend, whole)(*given)

    return call


@functools.cache
def _compiled(function: Callable[..., Any], backend: Any, whole: bool) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=whole, backend=backend)
