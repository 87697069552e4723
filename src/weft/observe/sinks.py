"""Loggers to which a run can write, in addition to its own files.

Each third-party package is imported only in the functions of its logger, and only if that logger is
enabled.
"""

from __future__ import annotations

import html
import importlib.util
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from weft.errors import ConfigError, UserError, build_unknown_name_error
from weft.extras import install
from weft.writing import write


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
        last_logged_step: last step that earlier processes of the run wrote to metrics.jsonl; 0 for
            a new run; set by `RunObserver.open`
    """

    directory: Path
    experiment_name: str
    trial_name: str
    config: Mapping[str, Any]
    resumed_step: int = 0
    last_logged_step: int = 0


def check_sinks(loggers: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that all loggers can be used, before the run starts. Writes nothing.

    `loggers` maps the name of each logger to its options, as returned by
    `LoggerSpec.get_enabled()`. Raises `UserError` for an unknown logger, a missing package, or a
    failed login.
    """
    for name, options in loggers.items():
        if name not in LOGGERS:
            raise build_unknown_name_error("logger", name, LOGGERS)
        if importlib.util.find_spec(name) is None:
            raise build_missing_error(name)
        check, _ = LOGGERS[name]
        check(options)


def make_sinks(loggers: Mapping[str, Mapping[str, Any]], run: RunInfo) -> list[LoggerSink]:
    """Check and start every logger in `loggers`, for a run whose directory exists.

    Raises `UserError` for an unknown logger, a missing package or a failed login, or if a logger
    cannot start.
    """
    check_sinks(loggers)
    sinks = []
    for name, options in loggers.items():
        _, start = LOGGERS[name]
        sinks.append(start(options, run))
    return sinks


def build_missing_error(name: str) -> UserError:
    """Return the error to raise if a logger's package is not installed."""
    return ConfigError(
        f"logger.{name}: the package {name!r} is not installed; run: {install(name)}"
    )


def build_table(samples: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[list[str]]:
    """Return one row of strings per sample, with the given columns, for loggers with tables.

    Missing values are empty strings.
    """
    table: list[list[str]] = []
    for row in samples:
        table.append(["" if row.get(column) is None else str(row[column]) for column in columns])
    return table


TENSORBOARD_FOLDER = "tensorboard"
TENSORBOARD_COLUMNS = ("prompt", "completion", "reward")


def check_tensorboard(options: Mapping[str, Any]) -> None:
    """Do nothing, because there are no options and no login is needed."""


def start_tensorboard(options: Mapping[str, Any], run: RunInfo) -> LoggerSink:
    """Start a TensorBoard logger that writes to the run's directory."""
    return TensorBoard(run.directory / TENSORBOARD_FOLDER, run.resumed_step)


class TensorBoard:
    """Logger that uses TensorBoard's own writer of event files, without torch or TensorFlow.

    If the run is resumed from `resumed_step`, the events that earlier processes wrote for later
    steps are marked as superseded, so that each metric has a single curve.
    """

    def __init__(self, folder: Path, resumed_step: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._make_event = Event
        self._summary = Summary
        self._make_text_summary = text_pb
        has_events = folder.is_dir() and any(folder.iterdir())
        self._writer = EventFileWriter(str(folder))
        if has_events:
            self._add_event(resumed_step + 1, session_log=SessionLog(status=SessionLog.START))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = []
        for name, value in metrics.items():
            values.append(self._summary.Value(tag=name, simple_value=value))
        self._add_event(step, summary=self._summary(value=values))
        self._writer.flush()

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._add_event(
            step,
            summary=self._make_text_summary(
                "samples", _render_markdown(build_table(samples, TENSORBOARD_COLUMNS))
            ),
        )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add_event(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._make_event(step=step, wall_time=time.time(), **content))


def _render_markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of the rows, with escaped text."""
    lines = [f"| {' | '.join(TENSORBOARD_COLUMNS)} |", f"|{'---|' * len(TENSORBOARD_COLUMNS)}"]
    for row in rows:
        cells = (html.escape(cell).replace("|", "&#124;").replace("\n", "<br>") for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


WANDB_ID_FILE = "wandb-id.txt"
TABLE_COLUMNS = ["step", "id", "prompt", "completion", "reward"]
WANDB_ONLINE = "online"
WANDB_MODES = ("online", "offline", "disabled")


def find_wandb_mode(options: Mapping[str, Any]) -> str:
    """Return the option `mode`, or else the environment variable WANDB_MODE, or else "online".

    Raises `UserError` if the variable has an invalid value.
    """
    mode = options.get("mode") or os.environ.get("WANDB_MODE") or WANDB_ONLINE
    if mode not in WANDB_MODES:
        raise ConfigError(
            f"WANDB_MODE={mode!r}: must be one of {', '.join(WANDB_MODES)}; set or unset the variable"
        )
    return str(mode)


def check_wandb(options: Mapping[str, Any]) -> None:
    """Log in, unless the mode is offline or disabled.

    The API key comes from the environment or the login. weft neither reads nor writes the key.
    Raises `UserError` if there is no key or the server rejects the key.
    """
    if find_wandb_mode(options) != WANDB_ONLINE:
        return
    import wandb

    try:
        is_logged_in = wandb.login(verify=True, timeout=60)
    except wandb.Error as error:
        raise _build_wandb_error("the login failed", error) from error
    if not is_logged_in:
        raise _build_wandb_error("not logged in", "no key was found")


def start_wandb(options: Mapping[str, Any], run: RunInfo) -> LoggerSink:
    """Start the run, or resume the run whose id is stored in the run's directory.

    Raises `UserError` if wandb cannot start the run.
    """
    import wandb

    mode = find_wandb_mode(options)
    run_id = options.get("id") or _get_wandb_id(run.directory / WANDB_ID_FILE)
    try:
        session = wandb.init(
            entity=options.get("entity"),
            project=options.get("project") or run.experiment_name,
            name=options.get("name") or run.trial_name,
            id=run_id,
            dir=str(options.get("dir") or run.directory),
            mode=mode,
            config=dict(run.config),
            resume="allow",
        )
    except wandb.Error as error:
        raise _build_wandb_error("the run could not be started", error) from error
    first_step = session.step if mode == WANDB_ONLINE else run.last_logged_step + 1
    return Wandb(session, options.get("prefix") or "", first_step)


class Wandb:
    """Logger for Weights & Biases.

    Steps before `first_step` are skipped: after a resume, the server already has these steps and
    cannot overwrite them.
    """

    def __init__(self, session: Any, prefix: str, first_step: int) -> None:
        self._session = session
        self._first_step = first_step
        self._prefix = f"{prefix.rstrip('/')}/" if prefix else ""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step >= self._first_step:
            self._session.log(
                {f"{self._prefix}{name}": value for name, value in metrics.items()}, step=step
            )

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        if step >= self._first_step:
            rows = build_table([{**sample, "step": step} for sample in samples], TABLE_COLUMNS)
            self._session.log(
                {f"{self._prefix}samples": wandb.Table(columns=TABLE_COLUMNS, data=rows)}, step=step
            )

    def close(self) -> None:
        self._session.finish()


def _get_wandb_id(path: Path) -> str:
    """Return the run's W&B id, which is stored in the file `path`.

    If the file does not exist or is empty, a new id is created and stored.
    """
    if path.is_file() and (run_id := path.read_text(encoding="utf-8").strip()):
        return run_id
    run_id = secrets.token_hex(4)
    write(path, run_id + "\n")
    return run_id


def _build_wandb_error(problem: str, reason: object) -> UserError:
    return ConfigError(
        f"logger.wandb: {problem}: {str(reason).rstrip('.')}; run `wandb login` or set WANDB_API_KEY, "
        f"or write "
        "logger.wandb.mode=offline (`wandb sync` sends it later)"
    )


def check_trackio(options: Mapping[str, Any]) -> None:
    """Check that there is a Hugging Face login if the options name a Space.

    Raises `UserError` if there is no login.
    """
    import huggingface_hub

    if options.get("space_id") and huggingface_hub.get_token() is None:
        raise ConfigError(
            f"logger.trackio.space_id={options['space_id']!r}: not logged in to Hugging Face; "
            f"run `hf auth login` or set "
            "HF_TOKEN, or leave the option out to write on this machine"
        )


def start_trackio(options: Mapping[str, Any], run: RunInfo) -> LoggerSink:
    """Start the run in Trackio, or resume the run with the same name."""
    import trackio

    session = trackio.init(
        project=options.get("project") or run.experiment_name,
        name=options.get("name") or run.trial_name,
        space_id=options.get("space_id"),
        config=dict(run.config),
        resume="allow",
        embed=False,
    )
    return Trackio(session, run.last_logged_step)


class Trackio:
    """Logger for Trackio.

    Steps up to `last_logged_step` are skipped: an earlier process of the run has sent them.
    """

    def __init__(self, session: Any, last_logged_step: int = 0) -> None:
        self._session = session
        self._last_logged_step = last_logged_step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._last_logged_step:
            self._session.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        import trackio

        if step > self._last_logged_step:
            rows = build_table([{**sample, "step": step} for sample in samples], TABLE_COLUMNS)
            self._session.log(
                {"samples": trackio.Table(columns=TABLE_COLUMNS, data=rows)}, step=step
            )

    def close(self) -> None:
        self._session.finish()


# Name of each logger -> (function that checks its options, function that starts it).
LOGGERS = {
    "tensorboard": (check_tensorboard, start_tensorboard),
    "wandb": (check_wandb, start_wandb),
    "trackio": (check_trackio, start_trackio),
}
