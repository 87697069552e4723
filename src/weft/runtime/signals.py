"""Ctrl-C and SIGTERM while a run goes on: the first lets the step end, a second one ends at once."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from types import FrameType

from weft.errors import DevicesLost, Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN: dict[int, str] = {signal.SIGINT: "Ctrl-C again"}
NAMES: dict[int, str] = {signal.SIGINT: "Ctrl-C"}  # as people call them


class Signals:
    """`number` is that of the first signal that was heard; None before one was."""

    def __init__(self) -> None:
        self.number: int | None = None

    @contextmanager
    def heard(self, step: Callable[[], int], tell: Callable[[str], None]) -> Iterator[None]:
        """Within, signals are heard, where this is the main thread; `step` is the number of the one
        under way, `tell` shows a line to people from inside a handler.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def hear(number: int, frame: FrameType | None) -> None:
            if self.number is not None:
                raise KeyboardInterrupt
            self.number = number
            tell(
                f"finishing step {step()}, then stopping; {AGAIN.get(number, 'once more')} stops "
                f"now"
            )

        before = {number: signal.signal(number, hear) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def between(self, step: int, again: str, lost: DevicesLost | None = None) -> Interrupted:
        """A run that was asked to stop and did so after `step`, or in the next one, where it lost
        its devices. `again`: how it can be resumed.
        """
        assert self.number is not None, "a signal was heard"
        how = f"stopped by {NAMES.get(self.number, signal.Signals(self.number).name)} after step {step}"
        return Interrupted(
            f"{how}{'' if lost is None else f'; in the next one {lost}'}; {again}", self.number
        )

    def at_once(self, step: int, again: str) -> Interrupted | None:
        """A run that a second signal has ended in the middle of `step`; None where no signal was
        heard.
        """
        if self.number is None:
            return None
        return Interrupted(f"stopped at once in step {step}; {again}", self.number)


@contextmanager
def quiet(library: str) -> Iterator[None]:
    """What a library prints and the signal handlers that it sets as it comes and goes are not the
    user's.
    """
    logging.getLogger(library).setLevel(logging.ERROR)
    main = threading.current_thread() is threading.main_thread()
    if main:
        before = {number: signal.getsignal(number) for number in SIGNALS}
    else:
        before = {}
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
