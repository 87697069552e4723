"""Logger for TensorBoard, which writes event files to `{run}/tensorboard/`."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.observe.sinks import LoggerSink, RunInfo, build_table

FOLDER = "tensorboard"
COLUMNS = ("prompt", "completion", "reward")


def check(options: Mapping[str, Any]) -> None:
    """Do nothing, because there are no options and no login is needed."""


def start(options: Mapping[str, Any], run: RunInfo) -> LoggerSink:
    """Start a TensorBoard logger that writes to the run's directory."""
    return TensorBoard(run.directory / FOLDER, run.resumed_step)


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

        self._event = Event
        self._summary = Summary
        self._text = text_pb
        earlier = folder.is_dir() and any(folder.iterdir())
        self._writer = EventFileWriter(str(folder))
        if earlier:
            self._add(resumed_step + 1, session_log=SessionLog(status=SessionLog.START))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = []
        for name, value in metrics.items():
            values.append(self._summary.Value(tag=name, simple_value=value))
        self._add(step, summary=self._summary(value=values))
        self._writer.flush()

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._add(
            step, summary=self._text("samples", _render_markdown(build_table(samples, COLUMNS)))
        )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event(step=step, wall_time=time.time(), **content))


def _render_markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of the rows, with escaped text."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for row in rows:
        cells = (html.escape(cell).replace("|", "&#124;").replace("\n", "<br>") for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
