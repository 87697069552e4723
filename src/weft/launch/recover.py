"""A run to its end, whatever way: where devices are lost it comes back on others, from its last
recovery point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weft.errors import DevicesLost, Interrupted, NotFinite, RunError, WeftError

if TYPE_CHECKING:
    from weft.runtime.session import Session

RESTARTS = 3  # without a step beyond the last one that was seen


class Driven:
    """A run in this process: `session`, or what `anew` makes in its place where it loses its
    devices and `comes_back` is on. `damaged` may know why numbers are not finite.
    """

    def __init__(
        self,
        session: Session,
        anew: Callable[[], Session],
        *,
        comes_back: bool,
        damaged: Callable[[], WeftError | None] = lambda: None,
    ) -> None:
        self._session = session
        self._anew = anew
        self._comes_back = comes_back
        self._damaged = damaged
        self._left = RESTARTS
        self._furthest = -1

    def run(self, *, goes_on: bool) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl.

        Writes down how the run ended; trouble in doing so never hides what came before.
        """
        try:
            self._to_the_end(goes_on=goes_on)
        except BaseException as error:
            stopped = isinstance(error, Interrupted | KeyboardInterrupt)
            try:
                self._session.close("stopped" if stopped else "failed", None if stopped else error)
            except RunError as trouble:
                error.add_note(str(trouble))
            if isinstance(error, KeyboardInterrupt):
                told = self._session.interrupted_at_once()
            else:
                told = None
            if told is not None:
                raise told from error
            raise
        self._session.close("finished")
        return self._session.metrics()

    def _to_the_end(self, *, goes_on: bool) -> None:
        self._session.open(goes_on=goes_on)
        while True:
            try:
                self._session.run()
                return
            except DevicesLost as lost:
                if not self._comes_back:
                    raise
                self._come_back(lost)
            except NotFinite as error:
                raise self._damaged() or error from error

    def _come_back(self, lost: DevicesLost) -> None:
        """Put another session, at the last recovery point, in the place of the one that lost its
        devices.
        """
        while True:
            self._count(lost)
            attempt = f"restart {RESTARTS - self._left} of {RESTARTS}"
            self._session.let_go(f"{lost}; continuing with new processes ({attempt})")
            try:
                made = self._anew()
                try:
                    made.open(goes_on=True, instead_of=self._session)
                except BaseException:
                    made.close("failed")
                    raise
            except DevicesLost as error:
                lost = error
                continue
            except RunError as error:
                raise RunError(f"{lost}; {error}") from error
            self._session = made
            return

    def _count(self, lost: DevicesLost) -> None:
        """Raises `RunError` where the devices are lost again and again and no new step was made in
        between.
        """
        if self._session.step > self._furthest:
            self._left = RESTARTS
            self._furthest = self._session.step
        if not self._left:
            raise RunError(
                f"{lost}; {RESTARTS} restarts before it brought no step after step {self._furthest}"
            )
        self._left -= 1
