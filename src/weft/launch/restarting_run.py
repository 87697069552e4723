"""Execution of a run to its end, with restarts from the last recovery point if devices are lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weft.engine.service_spec import NO_NETWORK
from weft.errors import CheckpointError, DevicesLost, Interrupted, NotFinite, RunError
from weft.experiment import Experiment
from weft.experiments.models import find_option_role

if TYPE_CHECKING:
    from weft.runtime.session import Session

MOST_RESTARTS = 3  # maximum restarts without a new step


class RestartingRun:
    """Run that restarts itself after a loss of devices, if `recover_mode` is `auto`.

    For each restart, `create_session` is called to create a new session. If the run fails because
    of non-finite numbers, the weight files of all roles are searched for the cause.
    """

    def __init__(
        self,
        session: Session,
        create_session: Callable[[], Session],
        experiment: Experiment,
    ) -> None:
        self._session = session
        self._create_session = create_session
        self._experiment = experiment
        self._restarts_left = MOST_RESTARTS
        self._last_step = -1

    def run(self, *, resumes: bool) -> list[dict[str, Any]]:
        """Run to the end and return the metrics: one mapping per line of metrics.jsonl.

        With `resumes`, an earlier run in the same directory is resumed. The outcome of the run
        (finished, stopped or failed) is recorded in any case. If recording fails, a note on this is
        added to the error that ended the run.
        """
        try:
            self._session.open(resumes=resumes)
            is_over = False
            while not is_over:
                try:
                    self._session.run()
                    is_over = True
                except DevicesLost as lost:
                    if self._experiment.control.recover_mode != "auto":
                        raise
                    self._restart(lost)
                except NotFinite as error:
                    raise find_damaged_weights(self._experiment) or error from error
        except BaseException as error:
            stopped = isinstance(error, Interrupted | KeyboardInterrupt)
            try:
                self._session.close("stopped" if stopped else "failed", None if stopped else error)
            except RunError as trouble:
                error.add_note(str(trouble))
            if isinstance(error, KeyboardInterrupt):
                interruption = self._session.build_interruption()
            else:
                interruption = None
            if interruption is not None:
                raise interruption from error
            raise
        self._session.close("finished")
        return self._session.metrics()

    def _restart(self, lost: DevicesLost) -> None:
        """Replace the session that lost its devices with a new one.

        The new session resumes from the last recovery point. `lost` is the error that reported the
        loss. Raises `RunError` after too many restarts.
        """
        while True:
            self._count_restart(lost)
            attempt = f"restart {MOST_RESTARTS - self._restarts_left} of {MOST_RESTARTS}"
            self._session.release_devices(f"{lost}; continuing with new processes ({attempt})")
            try:
                session = self._create_session()
                try:
                    session.open(resumes=True, instead_of=self._session)
                except BaseException:
                    session.close("failed")
                    raise
            except DevicesLost as error:
                lost = error
                continue
            except RunError as error:
                raise RunError(f"{lost}; {error}") from error
            self._session = session
            return

    def _count_restart(self, lost: DevicesLost) -> None:
        """Count a restart, and raise `RunError` if there were too many without progress.

        At most `MOST_RESTARTS` restarts without progress are allowed. The count is reset if the run
        has completed more steps than at any earlier restart. `lost` is the error that reported the
        loss of devices.
        """
        if self._session.step > self._last_step:
            self._restarts_left = MOST_RESTARTS
            self._last_step = self._session.step
        if not self._restarts_left:
            raise RunError(
                f"{lost}; {MOST_RESTARTS} restarts made no progress after step {self._last_step}"
            )
        self._restarts_left -= 1


def find_damaged_weights(experiment: Experiment) -> CheckpointError | None:
    """Return an error that names a role whose weight files contain non-finite values.

    Returns None if the files of all roles are intact. Reads all weight files again, which can take
    a long time, so it should be called only after a run has failed.
    """
    from weft.checkpoints.hf_io import find_weights
    from weft.checkpoints.weight_files import WeightFiles

    for role, spec in experiment.roles.items():
        if spec.path is None or spec.init_from_scratch or spec.backend in NO_NETWORK:
            continue
        damage = WeightFiles(find_weights(spec.path)).find_not_finite()
        if damage is not None:
            option = f"{find_option_role(experiment.config, role, spec.path)}.path"
            return CheckpointError(
                f"{option}={spec.path}: the weights are damaged: they have non-finite values "
                f"({damage}); "
                "take another checkpoint, or download the model again"
            )
    return None
