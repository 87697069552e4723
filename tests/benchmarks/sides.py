"""Functions that run in a side's process, for the tests of benchmarks/pairs.py."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.pairs import Pause


def answer(settings: Mapping[str, Any], pause: Pause) -> dict[str, Any]:
    return {"twice": 2 * settings["value"], "pid": os.getpid()}


def steps(settings: Mapping[str, Any], pause: Pause) -> dict[str, Any]:
    """Counts, and says after every step what it has counted."""
    for step in range(settings["steps"]):
        pause({"step": step})
    return {"done": True}


def clock(settings: Mapping[str, Any], pause: Pause) -> dict[str, Any]:
    return {"time": time.monotonic()}


def fails(settings: Mapping[str, Any], pause: Pause) -> dict[str, Any]:
    raise ValueError("no such luck")


def dies(settings: Mapping[str, Any], pause: Pause) -> dict[str, Any]:
    os._exit(3)


def prints(settings: Mapping[str, Any], pause: Pause) -> dict[str, Any]:
    os.write(1, b"to the log\n")
    return {}


def remembers(settings: Mapping[str, Any], pause: Pause) -> dict[str, Any]:
    """Peak memory of 64 MiB that are given back before the end."""
    from benchmarks.memory import PeakMemory

    memory = PeakMemory()
    block = bytearray(os.urandom(1)) * 2**26
    del block
    return {"peak": memory.bytes}
