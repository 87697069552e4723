"""Work in a thread of its own, for those who ask for its result later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begin(function: Callable[[], T], what: str) -> Future[T]:
    """`function()` in a thread that cannot keep the process from ending."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # whoever waits is told
            future.set_exception(error)

    threading.Thread(target=work, name=what, daemon=True).start()
    return future
