"""A run from its first step to its last: steps, evaluation, checkpoints, recovery points, and the
way it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.data.loader import LoadedData
from weft.errors import ConfigError, DevicesLost, Interrupted, RunError, WeftError
from weft.experiment import Control, Experiment
from weft.graph.draw import to_svg
from weft.observe.jsonl import read_rows
from weft.observe.observer import METRICS, Observer
from weft.observe.plan import Plan
from weft.observe.progress import Show
from weft.observe.run_files import HARDWARE, PROFILE
from weft.observe.sinks import RunInfo
from weft.redaction import masked
from weft.runtime import disk
from weft.runtime.checkpoints import Checkpoints
from weft.runtime.directory import RunDirectory, Status
from weft.runtime.evaluate import Evaluator
from weft.runtime.firing_recorder import FiringRecorder
from weft.runtime.fixed_prompts import FixedPrompts
from weft.runtime.group import WorkerGroup
from weft.runtime.master import NUMERICS, Master, StepResult
from weft.runtime.profiling import Profiling
from weft.runtime.record import record_start
from weft.runtime.recovery import RecoveryPoint, RecoveryPoints, named_point
from weft.runtime.samples import Samples
from weft.runtime.schedule import Every, Horizon
from weft.runtime.signals import Signals

RECOVERY_SECONDS = (
    # a step that ends this long after the last recovery point makes one, wherever checkpoints are
    # rarer
    600.0
)
CLOSE_SECONDS = 10.0
LAST_BITS = "its numbers may differ in their last bits from those of a run that was never stopped"


@dataclass(frozen=True)
class Parts:
    """What a session is made of.

    `plan` is shown before the first step; `farewell` makes of the run's peak of memory, in GiB, a
    line for its end, and says whether people need to see it; `ending` are the last lines of a run
    that is finished. `plan_shown`: people have seen the plan already, before the devices started.
    `data`: has rows that are tokenized meanwhile.
    """

    experiment: Experiment
    directory: RunDirectory
    group: WorkerGroup
    master: Master
    evaluator: Evaluator | None
    samples: Samples
    horizon: Horizon
    plan: Plan = field(default_factory=Plan)
    farewell: Callable[[float], tuple[str, bool]] | None = None
    ending: Sequence[str] = ()
    hardware: str = ""  # a line on what a device is, for the report
    plan_shown: bool = False
    fixed_prompts: FixedPrompts | None = None
    data: LoadedData | None = None


class Session:
    """Drives the master and keeps the schedule.

    Everything between two steps happens in `_between`.
    """

    def __init__(self, parts: Parts, show: Show | None = None) -> None:
        self._parts = parts
        self._control = parts.experiment.control
        self._master = parts.master
        self._group = parts.group
        self._directory = parts.directory
        self._points = RecoveryPoints(parts.directory.recover)
        roles = parts.experiment.saved_roles
        limit = self._control.save_total_limit
        self._checkpoints = Checkpoints(parts.directory, roles, parts.group, limit)
        evaluates = parts.evaluator is not None or parts.fixed_prompts is not None
        self._due = frequencies(self._control, evaluates=evaluates)
        self._saved_step = self._point_step = self._evaluated_step = 0
        self._under_way = 0  # the step that is being made, or whose line is being written
        self._signals = Signals()
        self._profiling = Profiling(
            self._control.profile_steps, self._group, self._directory.path / PROFILE, self._tell
        )
        self._show = show or Show()
        self._notes: list[str] = []  # until there is an observer to tell
        self._recorder: FiringRecorder | None = None
        self._observer: Observer | None = None
        self._peak: float | None = None  # GiB of memory, of the last line

    @property
    def step(self) -> int:
        """Completed steps."""
        return self._master.position.step

    @property
    def plan(self) -> Plan:
        """What is shown before the first step."""
        return self._parts.plan

    # -- begin and end

    def open(self, *, goes_on: bool, instead_of: Session | None = None) -> None:
        """Begin to write: nothing in the directory is touched before.

        `goes_on`: the directory holds this run already. `instead_of`: this process's session of the
        run that has lost its devices.

        Raises `UserError` where the recovery point that is asked for is not there, or a logger
        cannot start.
        """
        point = self._find_point(own=instead_of is not None) if goes_on else None
        if point is None and self._control.resume_from is not None:
            point = named_point(Path(self._control.resume_from))
        if point is not None:
            self._take_up(point)
        elif goes_on and self._control.recover_mode == "resume":
            raise ConfigError(
                f"recover_mode=resume: {self._directory.path} holds no whole recovery point; auto "
                f"begins anew"
            )
        elif goes_on:
            if self._points.found():
                why = "no recovery point is whole"
            else:
                why = "the run stopped before its first recovery point"
            self._notes.append(f"{why}; starting again")
        self._points.drop_after(self.step)
        config = write_beginning(self._parts, self.step, anew=instead_of is None)
        if instead_of is not None:
            instead_of.retire()
        names = self._control.experiment_name, self._control.trial_name
        self._observe(
            RunInfo(self._directory.path, *names, config, self.step), plan=instead_of is None
        )
        self._tell(
            f"resuming after step {self.step}" if point else f"writing to {self._directory.path}"
        )

    def close(self, status: Status, error: BaseException | None = None) -> None:
        """Write down how the run ended; let go of the workers, without waiting for them where the
        run did not end well.
        """
        self._group.close(CLOSE_SECONDS if status == "finished" else 0.0)
        self._close_data()
        if self._observer is None:
            return
        if status != "finished":  # first: what follows may meet a full disk
            self._directory.set_status(status, self.step)
        if self._parts.farewell is not None and self._peak is not None:
            line, needed = self._parts.farewell(self._peak)
            (self._observer.note if needed or self._show.verbose else self._observer.log)(line)
        if error is not None:  # whoever started the run shows it
            name = "" if isinstance(error, WeftError) else f"{type(error).__name__}: "
            self._observer.log(f"error: {name}{error}")
        self._observer.close(status, self._parts.ending if status == "finished" else ())
        # before the status: a run killed in here goes on, and ends with one
        self._observer.last_report(status)
        if status == "finished":
            self._directory.set_status(status, self.step)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return list(read_rows(self._directory.path / METRICS))

    def let_go(self, why: str) -> None:
        """Of the devices, without waiting for them; the view stays until another session takes its
        place.
        """
        self._tell(why)
        self._group.close(0.0)
        self._close_data()

    def retire(self) -> None:
        """End the view of a session that another one takes the place of."""
        assert self._observer is not None, "the session is open"
        self._observer.close("interrupted")

    def _find_point(self, *, own: bool) -> RecoveryPoint | None:
        """The recovery point of this directory to go on from; what a killed process left
        half-written is removed first. `own`: one that this process wrote, whatever the run began
        from.
        """
        self._points.mend()
        self._checkpoints.mend()
        named = self._control.resume_from
        if (
            not own
            and named is not None
            and self._directory.path.resolve() in Path(named).expanduser().resolve().parents
        ):
            return None  # one of its own, asked for by name
        return self._points.newest(self._notes.append)

    def _take_up(self, point: RecoveryPoint) -> None:
        """Restore a recovery point.

        Says what would keep the bits from being those of a run that was never stopped.
        """
        state = self._master.load(point.directory)
        for name, every in self._due.items():
            every.load_state_dict(state["due"][name])
        self._saved_step = state["saved_step"]
        self._evaluated_step = state["evaluated_step"]
        self._point_step = self.step
        apart = differences(state[NUMERICS], self._group.numerics())
        if apart:
            self._notes.append(f"warning: {apart}: the run goes on, but {LAST_BITS}")

    def _observe(self, info: RunInfo, *, plan: bool) -> None:
        parts = self._parts
        control = self._control
        observer = Observer.open(
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
        if parts.fixed_prompts is not None:
            parts.fixed_prompts.truncate(self.step)
        if plan:
            observer.log_plan(self.plan)
            if not parts.plan_shown:
                self._show.plan(self.plan, observer.view)
        for note in [*self._notes, *self._master.notes]:
            observer.note(note)

    # -- the run

    def run(self) -> None:
        """To the end.

        Raises `Interrupted` after Ctrl-C or SIGTERM, `RunError` or `UserError` where the run cannot
        go on.
        """
        assert self._observer is not None, "the session is open"
        with (
            self._profiling.kept(lambda: self.step, lambda: self._under_way),
            self._signals.heard(lambda: self._under_way, self._observer.asked),
        ):
            if self.step == 0:
                self._ask_fixed_prompts()
            while not self._over():
                try:
                    self._under_way = self.step + 1
                    self._profiling.before(self._under_way)
                    result = self._master.step()
                    if result is None:
                        break
                    self._between(result)
                except DevicesLost as lost:
                    if self._signals.number is None:
                        raise
                    raise self._signals.between(
                        self.step, resumable(self._control, self._point_step), lost
                    ) from lost
            if self.step == 0:
                raise RunError(
                    "no step was made: filters dropped every id before the node that steps follow "
                    "had a batch"
                )
            self._end()

    def _end(self) -> None:
        """What the last step lacks where nobody knew that it was the last: filters dropped all ids
        that came after it.
        """
        assert self._observer is not None, "the session is open"
        measured = self._evaluate()
        if measured:
            self._observer.amend(self.step, measured)
        if self._saved_step != self.step:
            self._save(milestone=False)
            if self._control.recover_mode != "disabled":
                self._write_point()
            self._checkpoints.prune()

    def _over(self) -> bool:
        position = self._master.position
        control = self._control
        if control.max_steps is not None and position.step >= control.max_steps:
            return True
        return position.epochs_done >= self._parts.experiment.most_epochs

    def _between(self, result: StepResult) -> None:
        """After a step: measure, write the line, save, write a recovery point.

        A signal ends the run here.
        """
        due = {
            name: every.due(result.step, result.epochs_done) for name, every in self._due.items()
        }
        over = self._over()
        self._profiling.after(result.step, over=over or self._signals.number is not None)
        line = {
            "step": result.step,
            "epoch": result.epoch,
            "step_seconds": result.seconds,
            **result.measured,
        }
        line["peak_memory_gb"] = self._peak = self._group.peak_memory_gb()
        if due["evaluate"] or over:
            line |= self._evaluate()
        self._write_line(line)
        for note in () if self._parts.data is None else self._parts.data.new_notes():
            self._tell(note)
        if due["save"] or due["milestone"] or over:
            self._save(milestone=due["milestone"])
        saved = self._saved_step == self.step
        asked = self._signals.number is not None
        if self._control.recover_mode != "disabled" and (saved or asked or due["cut"]):
            self._write_point()
        if saved:
            self._checkpoints.prune()
        if self._signals.number is not None and not over:
            raise self._signals.between(
                self.step, resumable(self._control, self._point_step, self.step)
            )

    def _write_line(self, line: Mapping[str, Any]) -> None:
        assert self._observer is not None and self._recorder is not None, "the session is open"
        self._observer.step(line)
        self._observer.samples(self.step, self._recorder.rows)
        self._observer.renew_report()

    def _evaluate(self) -> dict[str, float]:
        evaluator = self._parts.evaluator
        if self._evaluated_step == self.step:
            return {}
        self._evaluated_step = self.step
        self._ask_fixed_prompts()
        if evaluator is None:
            return {}
        self._master.settle()
        with self._span("evaluate"):
            return evaluator.run(self.step)

    def _ask_fixed_prompts(self) -> None:
        if self._parts.fixed_prompts is not None:
            self._master.settle()
            with self._span("eval_prompts"):
                self._parts.fixed_prompts.answer(self.step)

    def _save(self, *, milestone: bool) -> None:
        with self._span("save"):
            self._checkpoints.save(self.step, milestone=milestone)
        self._saved_step = self.step

    def _write_point(self) -> None:
        extra = {
            "due": {name: every.state_dict() for name, every in self._due.items()},
            "saved_step": self._saved_step,
            "evaluated_step": self._evaluated_step,
        }
        with self._span("recover"):
            self._points.write(self.step, lambda d: self._master.save(d, extra))
        self._point_step = self.step

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        assert self._observer is not None, "the session is open"
        with self._observer.span(name, step=self.step):
            yield

    def _tell(self, note: str) -> None:
        assert self._observer is not None, "the session is open"
        self._observer.note(note)

    def _close_data(self) -> None:
        if self._parts.data is not None:
            self._parts.data.close()

    def interrupted_at_once(self) -> Interrupted | None:
        """What to say of a run that a second signal has ended in the middle of a step; None where
        none was heard.
        """
        return self._signals.at_once(self._under_way, resumable(self._control, self._point_step))


def resumable(control: Control, point: int, step: int | None = None) -> str:
    """How to go on with a run whose last recovery point is that of the step `point` (0: there is
    none), where it stopped after `step`.
    """
    if control.recover_mode == "disabled":
        return "with recover_mode=disabled it cannot be resumed"
    if not point:
        return "there is no recovery point yet: the same command starts again"
    return f"rerun the same command to resume {'from there' if point == step else f'after step {point}'}"


def write_beginning(parts: Parts, step: int, *, anew: bool) -> dict[str, Any]:
    """Write what a run's directory holds from the beginning, and return the configuration, without
    its secrets. `anew`: a process begins to work on the run.
    """
    directory = parts.directory
    config = masked(parts.experiment.resolved())
    directory.write_config(config)
    directory.set_status("running", step)
    disk.write_text(directory.path / "graph.svg", to_svg(parts.experiment.graph))
    disk.write_text(directory.path / HARDWARE, parts.hardware + "\n")
    if anew:
        steps = parts.horizon.steps
        chosen = parts.experiment.chosen
        record_start(
            directory.path, step=step, total_steps=steps, hardware=parts.hardware, chosen=chosen
        )
    return config


def frequencies(control: Control, *, evaluates: bool) -> dict[str, Every]:
    """What happens between steps, and when: `evaluate` (every epoch unless asked otherwise),
    `save`, `milestone`, `cut`.
    """
    evaluate = Every(control.eval_freq_steps, control.eval_freq_epochs, control.eval_freq_secs)
    if evaluates and not evaluate.wanted:
        evaluate.epochs = 1
    return {
        "evaluate": evaluate,
        "save": Every(control.save_freq_steps, control.save_freq_epochs, control.save_freq_secs),
        "milestone": Every(control.save_milestone_freq_steps, control.save_milestone_freq_epochs),
        "cut": Every(
            control.recover_freq_steps, secs=RECOVERY_SECONDS
        ),  # of recovery points; the name that they have it by
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What the run was computed with and is no more."""
    return "; ".join(
        f"{name} {then.get(name)} then, {value} now"
        for name, value in now.items()
        if then.get(name) != value
    )
