"""Sides measured in turn: A B A B, each in a process of its own, compared pair by pair.

Other work on the machine slows both parts of a pair alike, so the median of the pairs' ratios says
more than the ratio of two medians taken one after the other. The shorter the parts, the better:
training runs take turns after every step. What a side leaves behind for the host of a virtual
machine to do is no part of the other's time, so turns begin after a rest.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from types import TracebackType
from typing import Any

# how sides start: with nothing imported or allocated yet
CONTEXT: BaseContext = multiprocessing.get_context("spawn")
Measured = dict[str, Any]
Pause = Callable[[Measured], None]


class SideFailed(Exception):
    """A side's process raised or ended; the message holds its traceback."""


@dataclass(frozen=True)
class Spread:
    """Median, least and most of some numbers."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"


class Side:
    """A process that runs `target(settings, pause)` until it is closed.

    `target` is `module:function`; `log` takes its prints.

    Where the function calls `pause(measured)`, the other side has its turn: `begin` and `advance`
    return at the next pause. `rest` is the time before each turn, in seconds, in which no side does
    anything. `path` comes first in its `sys.path`, for a library of another version than the
    installed one.
    """

    def __init__(
        self, target: str, log: Path, path: Path | None = None, *, rest: float = 0.0
    ) -> None:
        self._connection, theirs = CONTEXT.Pipe()
        self._target, self._rest = target, rest
        self._process = CONTEXT.Process(
            target=_serve, args=(theirs, target, str(log), str(path or ""))
        )
        self._process.start()
        theirs.close()

    def begin(self, settings: Mapping[str, Any]) -> Measured:
        """Call the function; returns what it gives its first pause, or its value where it makes
        none. Raises `SideFailed`.
        """
        return self._exchange(dict(settings))

    def advance(self) -> Measured:
        """Go on after a pause; returns what the next one is given, or the function's value.

        Raises `SideFailed`.
        """
        return self._exchange(None)

    def _exchange(self, message: Any) -> Measured:
        time.sleep(self._rest)
        try:
            self._connection.send(message)
            answered, value = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            raise SideFailed(
                f"{self._target}: the process ended with exit code {self._process.exitcode}"
            ) from error
        if not answered:
            raise SideFailed(f"{self._target}:\n{value}")
        return value

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()
        self._process.join(0 if error else 10)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()


def alternate(
    sides: Mapping[str, Side], settings: Mapping[str, Any], repeats: int
) -> dict[str, list[Measured]]:
    """Let every side begin once, then again, `repeats` times.

    Each list is in the order of the rounds.
    """
    runs: dict[str, list[Measured]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            runs[name].append(side.begin(settings))
    return runs


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """ours / theirs, pair by pair."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def _serve(connection: Connection, target: str, log: str, path: str) -> None:
    """The life of a side's process."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if path:
        sys.path.insert(0, path)
    module, function = target.split(":")
    try:
        call = getattr(importlib.import_module(module), function)
    except BaseException:
        call = _failing(traceback.format_exc())

    def pause(measured: Measured) -> None:
        connection.send((True, measured))
        connection.recv()

    while True:
        try:
            settings = connection.recv()
            connection.send((True, call(settings, pause)))
        except EOFError:  # closed from the other end
            return
        except BaseException:
            connection.send((False, traceback.format_exc()))


def _failing(trace: str) -> Callable[[Any, Pause], Any]:
    def call(settings: Any, pause: Pause) -> Any:
        raise RuntimeError(trace)

    return call
