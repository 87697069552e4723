"""Session of a run: its steps, with evaluations, checkpoints and recovery points between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.data.loader import LoadedData
from weft.errors import ConfigError, DevicesLost, Interrupted, RunError, WeftError
from weft.experiment import Experiment
from weft.graph.draw import to_svg
from weft.graph.mfc import HostFunction
from weft.observe.expert_loads import ExpertLoads
from weft.observe.host_times import HostTimes
from weft.observe.jsonl import read_rows
from weft.observe.observer import METRICS, RunObserver
from weft.observe.predicted import PredictedStep
from weft.observe.progress import DisplayOptions, RunPlan
from weft.observe.run_files import HARDWARE, PROFILE
from weft.observe.shown_plan import write_plan
from weft.observe.sinks import RunInfo
from weft.planner.lengths import RunLength
from weft.planner.plan_file import PLAN
from weft.redaction import mask_values
from weft.runtime.best import BestTracker
from weft.runtime.calls import WorkerGroup
from weft.runtime.checkpoints import (
    CheckpointStore,
    RecoveryPoint,
    RecoveryPointStore,
    describe_differences,
    describe_resuming,
    find_named_point,
)
from weft.runtime.directory import COPIES, RunDirectory, Status, record_process, write_text
from weft.runtime.evaluate import Evaluator, FixedPrompts, TaskEvaluator
from weft.runtime.firings import FiringRecorder
from weft.runtime.hosts import HostGroup, agree_on_point
from weft.runtime.master import NUMERICS_KEY, Master, StepResult
from weft.runtime.mirror import RunMirror, upload_after
from weft.runtime.processes import SignalHandlers
from weft.runtime.samples import SampleReader
from weft.runtime.schedule import StepProfiler, build_frequencies

CLOSE_SECONDS = 10.0
LAST_BITS_WARNING = "its numbers may differ in the last bits from those of an uninterrupted run"


@dataclass(frozen=True)
class SessionParts:
    """Components of a session.

    Attributes:
        experiment: The experiment to run.
        directory: Directory of the run.
        group: Worker group that runs the engines.
        master: Scheduler of the run's graph.
        evaluator: Runner of the evaluation graph, or None if the run does not evaluate.
        samples: Reader of the samples to show for each step.
        horizon: Length of the run.
        plan: Summary of the run that is shown before the first step.
        format_peak_memory: Function that takes the run's peak memory in GiB and returns a pair: a
            line about it, and True to show the line or False to only log it. None if no line is
            wanted.
        ending_lines: Last lines to show for a finished run.
        hardware: Description of the device, for the report.
        plan_shown: True if the plan was already shown before the session was created.
        fixed_prompts: Recorder of completions of fixed prompts, or None.
        eval_suite: Evaluation on tasks, or None.
        data: Loaded data, whose rows may still be tokenized in the background.
        predicted: Values that are predicted for each step, and written with its metrics.
        hosts: All hosts that run this experiment together, or None for one host.
        mirror: Uploads of the run's files to a bucket, or None if the run is on this machine.
    """

    experiment: Experiment
    directory: RunDirectory
    group: WorkerGroup
    master: Master
    evaluator: Evaluator | None
    samples: SampleReader
    horizon: RunLength
    plan: RunPlan = field(default_factory=RunPlan)
    format_peak_memory: Callable[[float], tuple[str, bool]] | None = None
    ending_lines: Sequence[str] = ()
    hardware: str = ""  # description of the device, for the report
    plan_shown: bool = False
    fixed_prompts: FixedPrompts | None = None
    eval_suite: TaskEvaluator | None = None
    data: LoadedData | None = None
    predicted: PredictedStep = field(default_factory=PredictedStep)
    hosts: HostGroup | None = None
    mirror: RunMirror | None = None


class Session:
    """Part of a run that lasts from a start or restart until the run ends or its devices are lost.

    The session calls the master for each step. After the step, the session writes the metrics and,
    if they are due, runs an evaluation and saves checkpoints and recovery points.
    """

    def __init__(self, parts: SessionParts, show: DisplayOptions | None = None) -> None:
        self._parts = parts
        self._control = parts.experiment.control
        self._master = parts.master
        self._group = parts.group
        self._directory = parts.directory
        self._points = RecoveryPointStore(parts.directory.recovery_folder)
        roles = parts.experiment.saved_roles
        limit = self._control.save_total_limit
        self._checkpoints = CheckpointStore(parts.directory, roles, parts.group, limit)
        folder = parts.directory.checkpoints_folder
        self._best = BestTracker(self._control, folder, roles, parts.hosts)
        evaluations = (parts.evaluator, parts.fixed_prompts, parts.eval_suite)
        evaluates = any(part is not None for part in (*evaluations, self._control.save_best))
        self._frequencies = build_frequencies(self._control, evaluates=evaluates)
        self._saved_step = self._point_step = self._evaluated_step = 0
        self._running_step = 0  # running step, or step whose metrics are being written
        self._signals = SignalHandlers()
        self._profiling = StepProfiler(
            self._control.profile_steps, self._group, self._directory.path / PROFILE, self._tell
        )
        graph = parts.experiment.graph
        functions = [node.name for node in graph.nodes if isinstance(node, HostFunction)]
        # Overlapping steps do not wait for host functions.
        overlaps = any(edge.max_staleness for edge in graph.version_edges)
        self._host_times = HostTimes(() if overlaps else functions)
        trained = parts.experiment.trained_nodes
        self._expert_loads = ExpertLoads({node.name: node.role for node in trained})
        self._show = show or DisplayOptions()
        self._notes: list[str] = []  # messages collected until the observer is open
        self._recorder: FiringRecorder | None = None
        self._observer: RunObserver | None = None
        self._peak_memory_gb: float | None = None  # peak memory in GiB at the last step

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self._master.position.step

    @property
    def plan(self) -> RunPlan:
        """Summary of the run that is shown before the first step."""
        return self._parts.plan

    @property
    def _place(self) -> Path | str:
        """Directory of the run, or its URL in a bucket."""
        mirror = self._parts.mirror
        return self._directory.path if mirror is None else mirror.url

    # -- begin and end

    def open(self, *, resumes: bool, instead_of: Session | None = None) -> None:
        """Start or restore the run, and open its files. Nothing is written before this call.

        `resumes` is True if the directory already contains this run. `instead_of` is an earlier
        session of this process that lost its devices and is replaced by this one.

        Raises `UserError` if the requested recovery point is missing or a logger cannot start.
        """
        point = self._find_point(is_restart=instead_of is not None) if resumes else None
        if point is None and self._control.resume_from is not None:
            point = find_named_point(Path(self._control.resume_from))
        if self._parts.hosts is not None:
            mirror = self._parts.mirror
            point = agree_on_point(self._parts.hosts, point, mirror, self._directory.path)
        if point is not None:
            self._restore_point(point)
        elif resumes and self._control.recover_mode == "resume":
            raise ConfigError(
                f"recover_mode=resume: {self._directory.path} contains no intact recovery point; "
                f"recover_mode=auto starts again"
            )
        elif resumes:
            if self._points.list_points():
                why = "no recovery point is intact"
            else:
                why = "the run stopped before its first recovery point"
            self._notes.append(f"{why}; starting again")
        if point is None:
            self._best.open(None)
        self._points.drop_after(self.step)
        config = write_start_files(self._parts, self.step, records_process=instead_of is None)
        if instead_of is not None:
            instead_of.close_view()
        names = self._control.experiment_name, self._control.trial_name
        self._open_observer(
            RunInfo(self._directory.path, *names, config, self.step), plan=instead_of is None
        )
        self._tell(f"resuming after step {self.step}" if point else f"writing to {self._place}")
        if self._parts.mirror is not None:
            self._parts.mirror.request()

    def close(self, status: Status, error: BaseException | None = None) -> None:
        """Record how the run ended, and release the workers.

        Unless the run has finished, unfinished work of the workers is abandoned at once. `error` is
        written to the log but not shown.
        """
        self._group.close(CLOSE_SECONDS if status == "finished" else 0.0)
        self._close_data()
        if self._observer is None:
            return
        if status != "finished":  # first, because later writes may fail on a full disk
            self._directory.set_status(status, self.step)
        if self._parts.format_peak_memory is not None and self._peak_memory_gb is not None:
            line, is_important = self._parts.format_peak_memory(self._peak_memory_gb)
            if is_important or self._show.verbose:
                self._observer.note(line)
            else:
                self._observer.log(line)
        if status != "failed":
            self._observer.compare_step(self._parts.predicted, verbose=self._show.verbose)
        if error is not None:  # only logged: the caller shows the error
            name = "" if isinstance(error, WeftError) else f"{type(error).__name__}: "
            self._observer.log(f"error: {name}{error}")
        hosts = self._parts.hosts
        lines = list(self._parts.ending_lines)
        if hosts is None or hosts.is_first:
            lines = [*self._best.describe(self._place), *lines]
        self._observer.close(status, lines if status == "finished" else ())
        # before the status, so that a run killed here is resumed and ends with a report
        self._observer.report.finish(status)
        if status == "finished":
            self._directory.set_status(status, self.step)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, one per step; step 0 is `eval_at_start`."""
        return list(read_rows(self._directory.path / METRICS))

    def release_devices(self, why: str) -> None:
        """Release the devices without waiting for their work, and show the user why.

        The terminal view stays open for the next session.
        """
        self._tell(why)
        self._group.close(0.0)
        self._close_data()

    def close_view(self) -> None:
        """Close the terminal view of a session that another session replaces."""
        assert self._observer is not None, "the session is open"
        self._observer.close("interrupted")

    def _find_point(self, *, is_restart: bool) -> RecoveryPoint | None:
        """Remove partial files, and return the newest intact recovery point of this run.

        Returns None if there is none, or if `resume_from` names a point of this run, which the
        caller then uses. With `is_restart`, `resume_from` is ignored, because an earlier session
        of this process has written newer points.
        """
        self._points.remove_partial()
        self._checkpoints.remove_partial()
        resume_from = self._control.resume_from
        if (
            not is_restart
            and resume_from is not None
            and self._directory.path.resolve() in Path(resume_from).expanduser().resolve().parents
        ):
            return None  # resume_from names a point of this run; the caller uses that
        return self._points.find_newest(self._notes.append)

    def _restore_point(self, point: RecoveryPoint) -> None:
        """Restore a recovery point, with a warning if numerical settings differ from its own."""
        state = self._master.load(point.directory)
        for name, frequency in self._frequencies.items():
            frequency.load_state_dict(state["due"][name])
        self._saved_step = state["saved_step"]
        self._evaluated_step = state["evaluated_step"]
        # recovery points of earlier versions have no best checkpoint
        if note := self._best.open(state.get("best")):
            self._notes.append(note)
        self._point_step = self.step
        differences = describe_differences(state[NUMERICS_KEY], self._group.describe_numerics())
        if differences:
            self._notes.append(
                f"warning: {differences}: the run continues, but {LAST_BITS_WARNING}"
            )

    def _open_observer(self, info: RunInfo, *, plan: bool) -> None:
        parts = self._parts
        control = self._control
        observer = RunObserver.open(
            info,
            control.loggers,
            progress=control.progress,
            log_freq_steps=control.log_freq_steps,
            view=self._show.view,
        )
        observer.expect(parts.horizon.steps, self.step)
        self._observer = observer
        self._recorder = self._master.listener = FiringRecorder(
            parts.experiment, parts.samples, self._directory.path, observer
        )
        self._recorder.truncate(self.step)
        for evaluation in (parts.fixed_prompts, parts.eval_suite):
            if evaluation is not None:
                evaluation.truncate(self.step)
        if plan:
            for line in self.plan.format_whole():
                observer.log(line)
            if not parts.plan_shown:
                self._show.print_plan(self.plan, observer.view)
        for note in [*self._notes, *self._master.notes]:
            observer.note(note)

    # -- the run

    def run(self) -> None:
        """Run until the last step is done.

        Raises `Interrupted` after Ctrl-C or SIGTERM, and `RunError` or `UserError` if the run
        cannot continue.
        """
        assert self._observer is not None, "the session is open"
        with (
            self._profiling.write_on_exit(lambda: self.step, lambda: self._running_step),
            self._signals.handle_signals(
                lambda: self._running_step, self._observer.view.show_stop_request
            ),
        ):
            if self.step == 0:
                self._evaluate_start()
            while not self._is_over():
                try:
                    self._running_step = self.step + 1
                    self._profiling.start_before(self._running_step)
                    result = self._master.step()
                    if result is None:
                        break
                    self._finish_step(result)
                except DevicesLost as lost:
                    if self._signals.number is None:
                        raise
                    raise self._signals.build_interruption(
                        self.step, describe_resuming(self._control, self._point_step), lost
                    ) from lost
            if self.step == 0:
                raise RunError(
                    "the run made no step: filters dropped every id before the node that steps "
                    "follow had a batch"
                )
            self._finish_run()

    def _finish_run(self) -> None:
        """Evaluate, save and prune after the last step, as far as this has not been done already.

        The planned last step does so itself, but the run ends earlier if filters drop all
        remaining ids.
        """
        assert self._observer is not None, "the session is open"
        is_best = False
        if self._evaluated_step != self.step:
            self._observer.amend(self.step, self._evaluate())
            is_best = self._best.compare(self.step, self.metrics()[-1], is_due=True)
        if self._saved_step != self.step or is_best:
            self._save(milestone=False, is_best=is_best)
            if self._control.recover_mode != "disabled":
                self._write_point()
        # Also after the planned last step: a process killed at that moment has pruned nothing.
        self._best.forget_points()
        self._prune()
        if not self._is_complete() and (reason := self._best.explain_end(self.step)):
            self._tell(reason)

    def _is_over(self) -> bool:
        return self._best.has_stalled or self._is_complete()

    def _is_complete(self) -> bool:
        position = self._master.position
        control = self._control
        if control.max_steps is not None and position.step >= control.max_steps:
            return True
        return position.epochs_done >= self._parts.experiment.most_epochs

    def _finish_step(self, result: StepResult) -> None:
        """Write the metrics of a step, and run the actions that are due after it.

        Possible actions are evaluating, saving checkpoints and writing a recovery point. Raises
        `Interrupted` if a signal was received and the run is not over.
        """
        # Find what is due, and write a finished trace.
        due = {}
        for name, frequency in self._frequencies.items():
            due[name] = frequency.check_due(result.step, result.epochs_done)
        signal = self._signals.number
        if self._parts.hosts is not None:
            due = self._parts.hosts.decide(lambda: due)
            signal = self._parts.hosts.decide_signal(signal)
            self._signals.number = self._signals.number or signal
        is_over = self._is_over()
        self._profiling.write_after(result.step, over=is_over or signal is not None)
        # Write the metrics, with those of an evaluation.
        line = {
            "step": result.step,
            "epoch": result.epoch,
            "step_seconds": result.seconds,
            **result.metrics,
        }
        line["peak_memory_gb"] = self._peak_memory_gb = self._group.peak_memory_gb()
        predicted = self._expert_loads.complete(self._parts.predicted)
        line |= self._host_times.complete(predicted)
        self._host_times.record(line)
        self._expert_loads.record(line)
        compares = due["evaluate"] or is_over
        if compares:
            line |= self._evaluate()
        is_best = self._best.compare(self.step, line, is_due=compares)
        is_over = self._is_over()
        self._write_line(line)
        for note in () if self._parts.data is None else self._parts.data.take_new_notes():
            self._tell(note)
        # Save checkpoints, then write a recovery point.
        is_regular = due["save"] or due["milestone"] or is_over
        if is_regular or is_best:
            self._save(milestone=due["milestone"], is_best=is_best, is_regular=is_regular)
        saved = self._saved_step == self.step
        if self._control.recover_mode != "disabled" and (saved or signal is not None or due["cut"]):
            self._write_point()
        if saved:
            self._prune()
        if signal is not None and not is_over:
            raise self._signals.build_interruption(
                self.step, describe_resuming(self._control, self._point_step, self.step)
            )

    def _write_line(self, line: Mapping[str, Any]) -> None:
        assert self._observer is not None and self._recorder is not None, "the session is open"
        if self._parts.mirror is not None:
            self._parts.mirror.check()
        self._observer.record_step(line)
        self._observer.record_samples(self.step, self._recorder.rows)
        self._observer.report.renew_if_due()

    def _evaluate_start(self) -> None:
        """Answer the fixed prompts and evaluate before the first step, which is written as step 0."""
        assert self._observer is not None, "the session is open"
        self._write_fixed_completions()
        measured = self._measure() if self._control.evaluates_at_start else {}
        self._best.record_start(measured)
        if measured:
            measured["peak_memory_gb"] = self._group.peak_memory_gb()
            self._observer.record_step({"step": 0, "epoch": 0.0, **measured})

    def _evaluate(self) -> dict[str, float]:
        if self._evaluated_step == self.step:
            return {}
        self._evaluated_step = self.step
        self._write_fixed_completions()
        return self._measure()

    def _measure(self) -> dict[str, float]:
        """Return the metrics of an evaluation with the current weights, on rows and on tasks."""
        metrics: dict[str, float] = {}
        evaluations = {"evaluate": self._parts.evaluator, "eval_suite": self._parts.eval_suite}
        for name, evaluation in evaluations.items():
            if evaluation is not None:
                self._master.wait_until_idle()
                with self._open_span(name):
                    metrics |= evaluation.run(self.step)
        if self._parts.eval_suite is not None:
            self._tell(self._parts.eval_suite.describe())
        return metrics

    def _write_fixed_completions(self) -> None:
        if self._parts.fixed_prompts is not None:
            self._master.wait_until_idle()
            with self._open_span("eval_prompts"):
                self._parts.fixed_prompts.write_completions(self.step)

    def _save(self, *, milestone: bool, is_best: bool, is_regular: bool = True) -> None:
        with self._open_span("save"), upload_after(self._parts.mirror):
            self._checkpoints.save(self.step, milestone=milestone)
            self._best.record_save(self.step, is_best=is_best, is_regular=is_regular)
        self._saved_step = self.step

    def _prune(self) -> None:
        self._checkpoints.prune(self._best.protected_steps, self._best.superseded_steps)

    def _write_point(self) -> None:
        extra = {
            "due": {name: action.state_dict() for name, action in self._frequencies.items()},
            "saved_step": self._saved_step,
            "evaluated_step": self._evaluated_step,
            "best": self._best.record_point(),
        }
        with self._open_span("recover"), upload_after(self._parts.mirror):
            self._points.write(self.step, lambda d: self._master.save(d, extra))
        self._point_step = self.step

    @contextmanager
    def _open_span(self, name: str) -> Iterator[None]:
        assert self._observer is not None, "the session is open"
        with self._observer.time_span(name, step=self.step):
            yield

    def _tell(self, note: str) -> None:
        assert self._observer is not None, "the session is open"
        self._observer.note(note)

    def _close_data(self) -> None:
        if self._parts.data is not None:
            self._parts.data.close()

    def build_interruption(self) -> Interrupted | None:
        """Return the error for a run that was stopped by signals in the middle of a step.

        Returns None if no signal was received.
        """
        return self._signals.build_immediate_interruption(
            self._running_step, describe_resuming(self._control, self._point_step)
        )


def write_start_files(parts: SessionParts, step: int, *, records_process: bool) -> dict[str, Any]:
    """Write the files that describe a run when it starts or resumes.

    Returns the run's configuration, with secrets masked. If `records_process` is True, this process
    is also recorded in `run.json`.
    """
    directory = parts.directory
    config = mask_values(parts.experiment.resolve())
    directory.write_config(config)
    directory.set_status("running", step)
    write_text(directory.path / "graph.svg", to_svg(parts.experiment.graph))
    write_text(directory.path / HARDWARE, parts.hardware + "\n")
    if parts.experiment.plan:
        write_text(directory.path / PLAN, parts.experiment.plan)
    write_plan(directory.path, parts.predicted.plan)
    if versions := parts.experiment.read_copy_versions():
        write_text(directory.path / COPIES, json.dumps(versions, indent=1) + "\n")
    if records_process:
        about = {"hardware": parts.hardware, "forecast": parts.predicted.description}
        steps, chosen = parts.horizon.steps, parts.experiment.chosen
        record_process(directory.path, step=step, total_steps=steps, chosen=chosen, **about)
    return config
