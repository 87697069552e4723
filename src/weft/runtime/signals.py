"""Handling of Ctrl-C and SIGTERM.

After the first signal, the run stops once the current step is finished. The second signal stops it
immediately.
"""

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
REPEAT_NAMES: dict[int, str] = {signal.SIGINT: "Ctrl-C again"}
SIGNAL_NAMES: dict[int, str] = {signal.SIGINT: "Ctrl-C"}  # display names


class SignalHandlers:
    """Handlers of Ctrl-C and SIGTERM.

    `number` is the first signal that was received, or None.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    @contextmanager
    def handle_signals(
        self, step: Callable[[], int], tell: Callable[[str], None]
    ) -> Iterator[None]:
        """Handle signals within the block, if this is the main thread.

        `step` returns the number of the running step. `tell` shows a line to the user, and is
        called from the signal handler. A second signal raises `KeyboardInterrupt`.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self.number is not None:
                raise KeyboardInterrupt
            self.number = number
            tell(
                f"finishing step {step()}, then stopping; {REPEAT_NAMES.get(number, 'once more')} stops "
                f"now"
            )

        before = {number: signal.signal(number, on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def build_interruption(
        self, step: int, again: str, lost: DevicesLost | None = None
    ) -> Interrupted:
        """Return the error for a run that was stopped by a signal.

        `step` is the number of completed steps, and `again` tells the user how to resume the run.
        If devices were lost during the next step, `lost` is the exception that was raised.
        """
        assert self.number is not None, "no signal was received"
        how = f"stopped by {SIGNAL_NAMES.get(self.number, signal.Signals(self.number).name)} after step {step}"
        return Interrupted(
            f"{how}{'' if lost is None else f'; in the next one {lost}'}; {again}", self.number
        )

    def build_immediate_interruption(self, step: int, again: str) -> Interrupted | None:
        """Return the error for a run that was stopped by signals in the middle of the step `step`.

        `again` is a sentence on how to resume the run. Returns None if no signal was received.
        """
        if self.number is None:
            return None
        return Interrupted(f"stopped at once in step {step}; {again}", self.number)


@contextmanager
def silence_library(library: str) -> Iterator[None]:
    """Suppress a library's output in the block.

    If the library replaces the handlers of Ctrl-C and SIGTERM, they are restored.
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
