"""What the runtime tells, and where it goes: files in the run's directory, the terminal, loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.errors import RunError, UserError
from weft.observe.completions import of_dataset
from weft.observe.jsonl import StepFile, listed, read_rows
from weft.observe.lenient import read_json
from weft.observe.logs import RUN_LOG, append
from weft.observe.memory import peak_memory_gb
from weft.observe.metrics import finite
from weft.observe.plan import Plan
from weft.observe.progress import OUTCOMES, View, make_view
from weft.observe.renewal import Renewal
from weft.observe.run_files import RECORD
from weft.observe.run_list import diagnose
from weft.observe.run_record import RunRecord
from weft.observe.sinks import RunInfo, Sink, make_sinks
from weft.observe.timeline import RUN, Timeline
from weft.redaction import redacted
from weft.writing import destination

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
TIMELINE = "timeline.json"
LOG = RUN_LOG


class Observer:
    """One run's observer.

    Everything may be called from the thread that drives the run; nothing here changes what is
    computed.

    `memory` gives the peak memory of the run in GiB; it fills `peak_memory_gb` where a line does
    not hold it.
    """

    def __init__(
        self,
        directory: Path,
        sinks: Sequence[Sink] = (),
        view: View | None = None,
        *,
        log_freq_steps: int = 1,
        memory: Callable[[], float] = peak_memory_gb,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._sinks = list(sinks)
        self._view = view or make_view("", progress=False)
        self._every = log_freq_steps
        self._memory = memory
        self._metrics = StepFile(directory / METRICS)
        self._samples = StepFile(directory / SAMPLES)
        self.timeline = Timeline(directory / TIMELINE)
        self._renewal = Renewal(directory, self.note)
        self._closed = False

    @classmethod
    def open(
        cls,
        run: RunInfo,
        loggers: Mapping[str, Mapping[str, Any]],
        *,
        progress: bool = True,
        log_freq_steps: int = 1,
        memory: Callable[[], float] = peak_memory_gb,
        view: View | None = None,
    ) -> Observer:
        """The observer of a run whose directory exists: starts its loggers, cuts its files to
        `run.resumed_step` steps, and shows `view`, or else the live view where the output is a
        terminal and `progress` is on. Raises `UserError` where a logger cannot start, or something
        that is no file has the name of one.
        """
        earlier = max(
            (int(row["step"]) for row in read_rows(run.directory / METRICS) if "step" in row),
            default=0,
        )
        for name in (METRICS, SAMPLES):
            destination(run.directory / name)  # refused before the first step
        run = replace(run, logged=earlier)
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
        """Note the steps that this folder's run has done and that have no line any more."""
        starts = RunRecord.read(run.directory).starts
        # of another run's point, whose lines are in that run's folder
        before = starts[0].step if starts else 0
        lost = self._metrics.missing(before + 1, run.resumed_step)
        if lost:
            self.note(
                f"warning: {METRICS} is damaged: no line can be read of step {listed(lost)} "
                f"({len(lost)} of "
                f"{run.resumed_step - before} steps). Training goes on exactly; reports lack "
                f"these steps"
            )

    def expect(self, total_steps: int | None, done: int = 0) -> None:
        """How many steps there will be in all (None: nobody knows), and how many an earlier process
        has done.
        """
        if done:
            earlier = [
                row for row in read_rows(self.directory / METRICS) if finite(row.get("step"))
            ]
        else:
            earlier = []
        self._view.expect(
            total_steps,
            done,
            [{name: value for name, value in row.items() if finite(value)} for row in earlier],
        )

    @property
    def view(self) -> View:
        return self._view

    def log_plan(self, plan: Plan) -> None:
        """What the run will do, whole into log.txt."""
        for line in plan.whole():
            self._log(line)

    def step(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """One completed step: a line with at least `step`. Returns the line as it was written."""
        line = dict(metrics)
        line.setdefault("peak_memory_gb", round(self._memory(), 4))
        with self._told(METRICS):
            self._metrics.append(line)
        numbers = {name: float(value) for name, value in line.items() if finite(value)}
        step = int(line["step"])
        shown = step % self._every == 0
        for text in self._view.step(numbers, shown=shown):
            self._log(text)
        if shown:
            for sink in self._sinks:
                sink.log(step, {name: value for name, value in numbers.items() if name != "step"})
        return line

    def amend(self, step: int, metrics: Mapping[str, float]) -> None:
        """What was measured of the last step after its line had been written: it goes onto that
        line, and to the loggers.
        """
        with self._told(METRICS):
            self._metrics.amend(step, metrics)
        numbers = {name: float(value) for name, value in metrics.items() if finite(value)}
        for sink in self._sinks:
            sink.log(step, numbers)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Samples of a step: mappings with `prompt`, `completion` and what else is known (`id`,
        `reward`, `finished`). The terminal and loggers show those that the model wrote; rows of the
        data have a `rank` or a `loss`.
        """
        with self._told(SAMPLES):
            self._samples.extend({"step": step, **row} for row in rows)
        written = [row for row in rows if not of_dataset(row)]
        if written:
            self._view.sample(step, written[0])
        if written and step % self._every == 0:
            for sink in self._sinks:
                sink.text(step, written)

    @contextmanager
    def span(self, name: str, track: str = "", **args: Any) -> Iterator[None]:
        """Time a phase on a track of the timeline: `roles/actor`, `host/reward`, or, by default,
        one of the run's own.
        """
        with self._view.doing(name), self.timeline.span(name, track or f"{RUN}/{name}", **args):
            yield

    def ran(self, name: str, track: str, began: float, seconds: float, **args: Any) -> None:
        """Something that ran elsewhere and is over: `began` in seconds since the epoch."""
        self.timeline.add(name, track, began, seconds, **args)

    def note(self, line: str) -> None:
        """A line for people, redacted: into log.txt and onto the terminal."""
        line = redacted(line)
        self._log(line)
        self._view.note(line)

    def log(self, line: str) -> None:
        """A line for log.txt alone: what the terminal is told of in another way."""
        self._log(line)

    def asked(self, line: str) -> None:
        """Somebody has asked the run to stop; called in the handler of a signal."""
        self._view.asked(line)

    def renew_report(self) -> None:
        """After a step: build report.html anew where it is due."""
        self._renewal.step()

    def truncate(self, step: int) -> None:
        """Forget the steps beyond the recovery point that a restart goes on from."""
        with self._told(METRICS):
            self._metrics.truncate(step)
            self._samples.truncate(step)

    def close(self, status: str = "finished", last: Sequence[str] = ()) -> None:
        """End the live view with one line that sums up, one that judges the run, and the `last`
        ones; and the loggers. A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._renewal.stop()
        algorithm = str(read_json(self.directory / RECORD).get("algorithm") or "") or None
        found = diagnose(self.directory, algorithm) if status in OUTCOMES else None
        for line in self._view.close(status, flagged=found is not None and not found.sound):
            self._log(line)
        for line in [*([] if found is None else [f"check: {found.text}"]), *last]:
            self.note(line)
        for sink in self._sinks:
            sink.close()

    def last_report(self, status: str) -> None:
        """report.html of the run that ended so."""
        self._renewal.finish(status)

    def _log(self, line: str) -> None:
        with self._told(LOG):
            append(self.directory, redacted(line))

    @contextmanager
    def _told(self, file: str) -> Iterator[None]:
        try:
            yield
        except UserError as error:  # something that is no file has its name
            raise RunError(f"{file} cannot be written: {error}") from error
        except OSError as error:
            raise RunError(
                f"{self.directory / file} cannot be written: {error.strerror or error}"
            ) from error
