"""Loggers that a run can write to, in addition to its own files.

Each third-party package is imported only in its own file, and only if its logger is enabled.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from weft.errors import ConfigError, UserError, build_unknown_name_error
from weft.extras import install

NAMES = ("tensorboard", "wandb", "trackio")


class LoggerSink(Protocol):
    """A logger.

    `step` counts completed steps from 1 and never decreases within one process.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the finite metrics of one step, by name."""
        ...

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log completions of one step: mappings with `prompt`, `completion` and maybe `reward`."""
        ...

    def close(self) -> None:
        """Send what is still buffered and end the logger."""
        ...


@dataclass(frozen=True)
class RunInfo:
    """Information on the run for loggers.

    For a resumed run, `resumed_step` is the step that it resumes from, and `logged` the last step
    in its metrics.jsonl, set by `RunObserver.open`. Both are 0 for a new run.
    """

    directory: Path
    experiment_name: str
    trial_name: str
    config: Mapping[str, Any]
    resumed_step: int = 0
    logged: int = 0


def check_sinks(loggers: Mapping[str, Mapping[str, Any]]) -> None:
    """Check the loggers before the run starts; writes nothing.

    `loggers` maps a logger's name to its options (`LoggerSpec.enabled()`). Raises `UserError` for
    an unknown logger, a missing package, or a login that fails.
    """
    for name, options in loggers.items():
        if name not in NAMES:
            raise build_unknown_name_error("logger", name, NAMES)
        if importlib.util.find_spec(name) is None:
            raise build_missing_error(name)
        _import_sink(name).check(options)


def make_sinks(loggers: Mapping[str, Mapping[str, Any]], run: RunInfo) -> list[LoggerSink]:
    """Check and start every logger in `loggers`, for a run whose directory exists.

    Raises `UserError` like `check_sinks`.
    """
    check_sinks(loggers)
    return [_import_sink(name).start(options, run) for name, options in loggers.items()]


def build_missing_error(name: str) -> UserError:
    """Return the error for a logger whose package is not installed."""
    return ConfigError(
        f"logger.{name}: the package {name!r} is not installed; run: {install(name)}"
    )


def _import_sink(name: str) -> Any:
    """Return the module of a logger, which has `check(options)` and `start(options, run)`."""
    return importlib.import_module(f"weft.observe.sinks_{name}")


def build_table(samples: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[list[str]]:
    """Return rows of strings for loggers that show tables; missing values are empty strings."""
    table: list[list[str]] = []
    for row in samples:
        table.append(["" if row.get(column) is None else str(row[column]) for column in columns])
    return table
