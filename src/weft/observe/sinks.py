"""Loggers to which a run can write, in addition to its own files.

Each third-party package is imported only in the module of its logger, and only if that logger is
enabled.
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
    """Logger of metrics and samples.

    The `step` of its methods is the number of completed steps, starting from 1. It never decreases
    within a process.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the finite metrics of one step. `metrics` maps names to values."""
        ...

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log completions of one step, with the keys `prompt`, `completion` and possibly `reward`."""
        ...

    def close(self) -> None:
        """Send all data that are still buffered, and close the logger."""
        ...


@dataclass(frozen=True)
class RunInfo:
    """Information about the run for loggers.

    Attributes:
        directory: the run's directory
        experiment_name: name of the experiment
        trial_name: name of the trial
        config: the run's options
        resumed_step: step from which the run resumes; 0 for a new run
        logged: last step that earlier processes of the run wrote to metrics.jsonl; 0 for a new run;
            set by `RunObserver.open`
    """

    directory: Path
    experiment_name: str
    trial_name: str
    config: Mapping[str, Any]
    resumed_step: int = 0
    logged: int = 0


def check_sinks(loggers: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that all loggers can be used, before the run starts. Writes nothing.

    `loggers` maps the name of each logger to its options, as returned by
    `LoggerSpec.get_enabled()`. Raises `UserError` for an unknown logger, a missing package, or a
    failed login.
    """
    for name, options in loggers.items():
        if name not in NAMES:
            raise build_unknown_name_error("logger", name, NAMES)
        if importlib.util.find_spec(name) is None:
            raise build_missing_error(name)
        _import_sink(name).check(options)


def make_sinks(loggers: Mapping[str, Mapping[str, Any]], run: RunInfo) -> list[LoggerSink]:
    """Check and start every logger in `loggers`, for a run whose directory exists.

    Raises `UserError` for an unknown logger, a missing package or a failed login, or if a logger
    cannot start.
    """
    check_sinks(loggers)
    return [_import_sink(name).start(options, run) for name, options in loggers.items()]


def build_missing_error(name: str) -> UserError:
    """Return the error to raise if a logger's package is not installed."""
    return ConfigError(
        f"logger.{name}: the package {name!r} is not installed; run: {install(name)}"
    )


def _import_sink(name: str) -> Any:
    """Return the module of a logger, which defines `check(options)` and `start(options, run)`."""
    return importlib.import_module(f"weft.observe.sinks_{name}")


def build_table(samples: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[list[str]]:
    """Return one row of strings per sample, with the given columns, for loggers that show tables.

    Missing values are empty strings.
    """
    table: list[list[str]] = []
    for row in samples:
        table.append(["" if row.get(column) is None else str(row[column]) for column in columns])
    return table
