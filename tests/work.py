"""How much Python a call does, counted: the same on a busy machine as on an idle one."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls_of(function: Callable[[], Any]) -> int:
    """Return the number of calls of Python and C functions inside `function()`.

    Garbage collection is off meanwhile, because Hypothesis adds calls to each collection.
    """
    count = 0

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return count
