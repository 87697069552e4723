"""Helpers for running functions in background threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start_in_thread(function: Callable[[], T], what: str) -> Future[T]:
    """Run `function` in a daemon thread named `what` and return a future of its result."""
    future: Future[T] = Future()

    def run_task() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # raised by future.result()
            future.set_exception(error)

    threading.Thread(target=run_task, name=what, daemon=True).start()
    return future
