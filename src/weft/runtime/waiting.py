"""Work in threads, and waiting for it with a deadline: for calls of a group and for functions that run here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from weft.errors import RunError

T = TypeVar("T")


def wait(future: Future[T], left_s: float | None, what: str, deadline_s: float | None = None) -> T:
    """The future's result. Raises `RunError` naming `what` was waited for after `left_s` seconds, which are what is left of
    `deadline_s` where the work began earlier."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    if not done.wait(left_s):
        deadline_s = left_s if deadline_s is None else deadline_s
        raise RunError(
            f"{what} did not finish within its deadline_s={deadline_s:g} seconds; raise it, or look at what hangs"
        )
    return future.result()


def begin(function: Callable[[], T], what: str) -> Future[T]:
    """`function()` in a thread of its own, which cannot keep the process from ending."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # whoever waits is told
            future.set_exception(error)

    threading.Thread(target=work, name=what, daemon=True).start()
    return future
