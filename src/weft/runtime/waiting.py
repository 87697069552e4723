"""Waiting with a deadline, for calls of a group and for functions that run here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from weft.errors import RunError

T = TypeVar("T")


def wait(future: Future[T], deadline_s: float | None, what: str) -> T:
    """The future's result. Raises `RunError` naming `what` was waited for once the deadline is over."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    if not done.wait(deadline_s):
        raise RunError(
            f"{what} did not finish within its deadline_s={deadline_s:g} seconds; raise it, or look at what hangs"
        )
    return future.result()


def call(function: Callable[[], T], deadline_s: float | None, what: str) -> T:
    """`function()`, in this thread without a deadline, else in one that is left behind when the deadline is over."""
    if deadline_s is None:
        return function()
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # whoever waits is told
            future.set_exception(error)

    threading.Thread(target=work, name=what, daemon=True).start()
    return wait(future, deadline_s, what)
