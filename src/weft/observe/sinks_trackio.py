"""Logger for Trackio, which tracks experiments locally (`trackio show`) or in a Hugging Face Space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.errors import ConfigError
from weft.observe.sinks import LoggerSink, RunInfo, build_table

COLUMNS = ["step", "id", "prompt", "completion", "reward"]


def check(options: Mapping[str, Any]) -> None:
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


def start(options: Mapping[str, Any], run: RunInfo) -> LoggerSink:
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
    return Trackio(session, run.logged)


class Trackio:
    """Logger for Trackio.

    Steps up to `logged` are skipped: an earlier process of the resumed run has already sent them.
    """

    def __init__(self, session: Any, logged: int = 0) -> None:
        self._session = session
        self._logged = logged

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._logged:
            self._session.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        import trackio

        if step > self._logged:
            rows = build_table([{**sample, "step": step} for sample in samples], COLUMNS)
            self._session.log({"samples": trackio.Table(columns=COLUMNS, data=rows)}, step=step)

    def close(self) -> None:
        self._session.finish()
