"""Loggers a run can write to besides its own files.

A third-party package is imported in its one file, when asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from weft.errors import ConfigError, UserError, unknown_name
from weft.extras import install

NAMES = ("tensorboard", "wandb", "trackio")


class Sink(Protocol):
    """A logger. `step` counts completed steps from 1 and never goes back within one process."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The finite numbers of one step by name."""
        ...

    def text(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Completions of one step: mappings with `prompt`, `completion` and, where there is one,
        `reward`.
        """
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


@dataclass(frozen=True)
class RunInfo:
    """What a logger is told about the run.

    Of a run that goes on, `resumed_step` is the step it goes on from and `logged` the last one in
    its metrics.jsonl (`Observer.open` reads it there); both are 0 for a new run.
    """

    directory: Path
    experiment_name: str
    trial_name: str
    config: Mapping[str, Any]
    resumed_step: int = 0
    logged: int = 0


def check_sinks(loggers: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse in the first second what cannot work: an unknown logger, a missing package, a login
    that fails.

    `loggers` maps a logger's name to its options (`LoggerSpec.enabled()`). Writes nothing. Raises
    `UserError`.
    """
    for name, options in loggers.items():
        if name not in NAMES:
            raise unknown_name("logger", name, NAMES)
        if importlib.util.find_spec(name) is None:
            raise missing(name)
        _module(name).check(options)


def make_sinks(loggers: Mapping[str, Mapping[str, Any]], run: RunInfo) -> list[Sink]:
    """Start every logger in `loggers` for a run whose directory exists.

    Raises `UserError` as `check_sinks` does.
    """
    check_sinks(loggers)
    return [_module(name).start(options, run) for name, options in loggers.items()]


def missing(name: str) -> UserError:
    """The error for a logger whose package is not installed."""
    return ConfigError(
        f"logger.{name}: the package {name!r} is not installed; run: {install(name)}"
    )


def _module(name: str) -> Any:
    """The module of one logger: `check(options)` and `start(options, run) -> Sink`."""
    return importlib.import_module(f"weft.observe.sinks_{name}")


def table(samples: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[list[str]]:
    """Rows of text for loggers that show tables; an absent value is an empty cell."""
    return [
        ["" if row.get(column) is None else str(row[column]) for column in columns]
        for row in samples
    ]
