"""Observer of a run: writes the run's files, and updates the terminal view and the loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.errors import RunError, UserError
from weft.observe.completions import is_dataset_row
from weft.observe.jsonl import StepFile, format_ranges, read_json, read_rows
from weft.observe.logs import RUN_LOG, append
from weft.observe.memory import measure_peak_memory_gb
from weft.observe.metrics import is_finite
from weft.observe.predicted import PredictedStep, format_end_line
from weft.observe.progress import OUTCOMES, ProgressView, make_view
from weft.observe.report import ReportRenewal
from weft.observe.run_files import METRICS, RECORD, TIMELINE, RunRecord
from weft.observe.run_list import diagnose
from weft.observe.sample_rows import SAMPLES
from weft.observe.sinks import LoggerSink, RunInfo, make_sinks
from weft.observe.timeline import RUN, Timeline
from weft.redaction import redact
from weft.writing import resolve_destination

LOG = RUN_LOG


class RunObserver:
    """Observer that records the progress of a run, without affecting the computation.

    It is not thread-safe: call its methods only from the thread that drives the run. `memory`
    returns the peak memory of the run in GiB, which is recorded as `peak_memory_gb` of steps
    without this metric. Every `log_freq_steps` steps, a step is shown and sent to the loggers.
    """

    def __init__(
        self,
        directory: Path,
        sinks: Sequence[LoggerSink] = (),
        view: ProgressView | None = None,
        *,
        log_freq_steps: int = 1,
        memory: Callable[[], float] = measure_peak_memory_gb,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._sinks = list(sinks)
        self.view = view or make_view("", progress=False)
        self._log_freq_steps = log_freq_steps
        self._measure_memory = memory
        self._metrics = StepFile(directory / METRICS)
        self._samples = StepFile(directory / SAMPLES)
        self.timeline = Timeline(directory / TIMELINE)
        self.report = ReportRenewal(directory, self.note)
        self._closed = False

    @classmethod
    def open(
        cls,
        run: RunInfo,
        loggers: Mapping[str, Mapping[str, Any]],
        *,
        progress: bool = True,
        log_freq_steps: int = 1,
        memory: Callable[[], float] = measure_peak_memory_gb,
        view: ProgressView | None = None,
    ) -> RunObserver:
        """Start the loggers and the terminal view of a run, and return its observer.

        The run's directory must exist. Lines of steps after `run.resumed_step` are removed from the
        files in this directory. Without `view`, a live view is used if the output is a terminal and
        `progress` is True; otherwise plain lines are printed. Raises `UserError` if a logger cannot
        start, or if the path of a file exists but is not a regular file.
        """
        # Check the files before a logger starts.
        last_logged_step = max(
            (int(row["step"]) for row in read_rows(run.directory / METRICS) if "step" in row),
            default=0,
        )
        for name in (METRICS, SAMPLES):
            resolve_destination(run.directory / name)  # raises now instead of at the first step
        run = replace(run, last_logged_step=last_logged_step)
        view = view or make_view(f"{run.experiment_name}/{run.trial_name}", progress=progress)
        observer = cls(
            run.directory,
            make_sinks(loggers, run),
            view,
            log_freq_steps=log_freq_steps,
            memory=memory,
        )
        observer.truncate(run.resumed_step)
        view.start()
        observer._report_lost_lines(run)
        return observer

    def _report_lost_lines(self, run: RunInfo) -> None:
        """Print a warning if completed steps of this run have no readable line in metrics.jsonl."""
        starts = RunRecord.read(run.directory).starts
        # A run that started from another run's recovery point has no lines of the earlier steps.
        start_step = starts[0].step if starts else 0
        missing = self._metrics.find_missing(start_step + 1, run.resumed_step)
        if missing:
            self.note(
                f"warning: {METRICS} is damaged: no readable line for step {format_ranges(missing)} "
                f"({len(missing)} of "
                f"{run.resumed_step - start_step} steps). Training is not affected; reports lack "
                f"these steps"
            )

    def expect(self, total_steps: int | None, done: int = 0) -> None:
        """Set the total number of steps (None if unknown), and the number of steps already done.

        `done` counts the steps that earlier processes of the run have completed.
        """
        earlier_rows = []
        if done:
            for row in read_rows(self.directory / METRICS):
                if is_finite(row.get("step")):
                    earlier_rows.append(_select_finite(row))
        self.view.expect(total_steps, done, earlier_rows)

    def record_step(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Record the metrics of a completed step and return the line written to metrics.jsonl.

        `metrics` must include `step`.
        """
        line = dict(metrics)
        line.setdefault("peak_memory_gb", round(self._measure_memory(), 4))
        with self._explain_write_errors(METRICS):
            self._metrics.append(line)
        numbers = _select_finite(line)
        step = int(line["step"])
        is_shown = step % self._log_freq_steps == 0
        for text in self.view.record_step(numbers, is_shown=is_shown):
            self.log(text)
        if is_shown:
            for sink in self._sinks:
                sink.log(step, {name: value for name, value in numbers.items() if name != "step"})
        return line

    def amend(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics of an already recorded step to metrics.jsonl, and send them to the loggers.

        Called if the run's last evaluation takes place after its last step has been recorded.
        """
        with self._explain_write_errors(METRICS):
            self._metrics.amend(step, metrics)
        for sink in self._sinks:
            sink.log(step, _select_finite(metrics))

    def record_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record samples of a step in samples.jsonl, and show them in the terminal and the loggers.

        Each sample has a `prompt`, a `completion` and other known keys, such as `id`, `reward` and
        `finished`. Samples that are rows of the dataset, which have a `rank` or a `loss`, are only
        written to the file.
        """
        with self._explain_write_errors(SAMPLES):
            for row in rows:
                self._samples.append({"step": step, **row})
        model_samples = [row for row in rows if not is_dataset_row(row)]
        if model_samples:
            self.view.show_sample(step, model_samples[0])
        if model_samples and step % self._log_freq_steps == 0:
            for sink in self._sinks:
                sink.log_samples(step, model_samples)

    @contextmanager
    def time_span(self, name: str, track: str = "", **args: Any) -> Iterator[None]:
        """Time a phase of the run, and show its name as the current activity.

        The phase is the body of a `with` statement. `track` is the phase's track in the timeline,
        such as `roles/actor` or `host/reward`. The default is `run/{name}`. `args` are shown with
        the phase in the timeline.
        """
        with (
            self.view.show_activity(name),
            self.timeline.time_span(name, track or f"{RUN}/{name}", **args),
        ):
            yield

    def note(self, line: str) -> None:
        """Write a line to log.txt and the terminal, with secrets redacted."""
        line = redact(line)
        self.log(line)
        self.view.print_note(line)

    def compare_step(self, prediction: PredictedStep, *, verbose: bool = False) -> None:
        """Show the predicted and the measured duration of a step at the end of a run.

        If nothing was predicted, the reason is logged, and shown with `verbose`.
        """
        if prediction.reason:
            line = f"the duration of a step is not predicted: {prediction.reason}"
            if verbose:
                self.note(line)
            else:
                self.log(line)
        elif summary := format_end_line(read_rows(self.directory / METRICS), prediction):
            self.note(summary)

    def truncate(self, step: int) -> None:
        """Remove the lines of steps after `step` from metrics.jsonl and samples.jsonl.

        Called when a restart resumes from `step`. If that is 0, the evaluation before the first
        step, which is written as step 0, is removed as well, because it is done again.
        """
        with self._explain_write_errors(METRICS):
            self._metrics.truncate(step or -1)
            self._samples.truncate(step)

    def close(self, status: str = "finished", last: Sequence[str] = ()) -> None:
        """Close the view and the loggers, and print the run's summary, its diagnosis and `last`.

        `status` is the outcome of the run, and `last` has additional lines. A second call does
        nothing.
        """
        if self._closed:
            return
        self._closed = True
        self.report.stop()
        algorithm = str(read_json(self.directory / RECORD).get("algorithm") or "") or None
        diagnosis = diagnose(self.directory, algorithm) if status in OUTCOMES else None
        for line in self.view.close(
            status, is_flagged=diagnosis is not None and not diagnosis.is_sound
        ):
            self.log(line)
        for line in [*([] if diagnosis is None else [f"check: {diagnosis.summary}"]), *last]:
            self.note(line)
        for sink in self._sinks:
            sink.close()

    def log(self, line: str) -> None:
        """Write a line to log.txt only, with secrets redacted."""
        with self._explain_write_errors(LOG):
            append(self.directory, redact(line))

    @contextmanager
    def _explain_write_errors(self, file: str) -> Iterator[None]:
        """Raise `RunError` if `file` of the run's directory cannot be written in the body."""
        try:
            yield
        except UserError as error:  # the path exists but is not a regular file
            raise RunError(f"{file} cannot be written: {error}") from error
        except OSError as error:
            raise RunError(
                f"{self.directory / file} cannot be written: {error.strerror or error}"
            ) from error


def _select_finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite metrics as floats."""
    return {name: float(value) for name, value in metrics.items() if is_finite(value)}
