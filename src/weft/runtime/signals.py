"""Ctrl-C and SIGTERM while a run goes on: the first lets the step end, a second one ends at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """`number` is that of the first signal that was heard; None before one was."""

    def __init__(self) -> None:
        self.number: int | None = None

    @contextmanager
    def heard(self, step: Callable[[], int]) -> Iterator[None]:
        """Within, signals are heard, where this is the main thread; `step` is the number of the one under way."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def hear(number: int, frame: FrameType | None) -> None:
            if self.number is not None:
                raise KeyboardInterrupt
            self.number = number
            with suppress(OSError):  # a write that may come in the middle of another one
                os.write(2, f"\nfinishing step {step()}, then stopping; once more stops at once\n".encode())

        before = {number: signal.signal(number, hear) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
