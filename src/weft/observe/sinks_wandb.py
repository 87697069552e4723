"""Logger for Weights & Biases.

The API key comes from the environment or the login. weft neither reads nor writes the key.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, UserError
from weft.observe.sinks import LoggerSink, RunInfo, build_table
from weft.writing import write

ID_FILE = "wandb-id.txt"
COLUMNS = ["step", "id", "prompt", "completion", "reward"]
ONLINE = "online"
MODES = ("online", "offline", "disabled")


def find_mode(options: Mapping[str, Any]) -> str:
    """Return the option `mode`, or else the environment variable WANDB_MODE, or else "online".

    Raises `UserError` if the variable has an invalid value.
    """
    mode = options.get("mode") or os.environ.get("WANDB_MODE") or ONLINE
    if mode not in MODES:
        raise ConfigError(
            f"WANDB_MODE={mode!r}: must be one of {', '.join(MODES)}; set or unset the variable"
        )
    return str(mode)


def check(options: Mapping[str, Any]) -> None:
    """Log in, unless the mode is offline or disabled.

    Raises `UserError` if there is no key or the server rejects the key.
    """
    if find_mode(options) != ONLINE:
        return
    import wandb

    try:
        known = wandb.login(verify=True, timeout=60)
    except wandb.Error as error:
        raise _build_error("the login failed", error) from error
    if not known:
        raise _build_error("not logged in", "no key was found")


def start(options: Mapping[str, Any], run: RunInfo) -> LoggerSink:
    """Start the run, or resume the run whose id is stored in the run's directory.

    Raises `UserError` if wandb cannot start the run.
    """
    import wandb

    mode = find_mode(options)
    identity = options.get("id") or _get_run_id(run.directory / ID_FILE)
    try:
        session = wandb.init(
            entity=options.get("entity"),
            project=options.get("project") or run.experiment_name,
            name=options.get("name") or run.trial_name,
            id=identity,
            dir=str(options.get("dir") or run.directory),
            mode=mode,
            config=dict(run.config),
            resume="allow",
        )
    except wandb.Error as error:
        raise _build_error("the run could not be started", error) from error
    known = session.step if mode == ONLINE else run.logged + 1
    return Wandb(session, options.get("prefix") or "", known)


class Wandb:
    """Logger for Weights & Biases.

    Steps before `first` are skipped: after a resume, the server already has these steps and cannot
    overwrite them.
    """

    def __init__(self, session: Any, prefix: str, first: int) -> None:
        self._session = session
        self._first = first
        self._prefix = f"{prefix.rstrip('/')}/" if prefix else ""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step >= self._first:
            self._session.log(
                {f"{self._prefix}{name}": value for name, value in metrics.items()}, step=step
            )

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        if step >= self._first:
            rows = build_table([{**sample, "step": step} for sample in samples], COLUMNS)
            self._session.log(
                {f"{self._prefix}samples": wandb.Table(columns=COLUMNS, data=rows)}, step=step
            )

    def close(self) -> None:
        self._session.finish()


def _get_run_id(path: Path) -> str:
    """Return the run's W&B id, which is stored in the file `path`.

    If the file does not exist or is empty, a new id is created and stored.
    """
    if path.is_file() and (known := path.read_text(encoding="utf-8").strip()):
        return known
    run_id = secrets.token_hex(4)
    write(path, run_id + "\n")
    return run_id


def _build_error(what: str, why: object) -> UserError:
    return ConfigError(
        f"logger.wandb: {what}: {str(why).rstrip('.')}; run `wandb login` or set WANDB_API_KEY, "
        f"or write "
        "logger.wandb.mode=offline (`wandb sync` sends it later)"
    )
