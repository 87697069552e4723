"""What happens while a graph runs, told as data on one queue: by a worker group, and by the threads
of host functions.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from weft.data.sample import SequenceSample

# what was asked for: the name of a call, host function or sync, and which of its firings
Task = tuple[str, int]


@dataclass(frozen=True)
class Started:
    """Work on a task has begun; its deadline counts from here."""

    task: Task


@dataclass(frozen=True)
class Announced:
    """A call has made these outputs of some of its ids before its end (`Model.announce`).

    They can be fetched.
    """

    call: str
    outputs: SequenceSample  # a description


@dataclass(frozen=True)
class Finished:
    """A task is over.

    `result` is an `MFCResult` of a call, the version of a sync, what a host function returned.
    """

    task: Task
    result: Any


@dataclass(frozen=True)
class Failed:
    """A task is over with an error."""

    task: Task
    error: BaseException


Event = Started | Announced | Finished | Failed
Events = queue.SimpleQueue[Event]


class Outbox(Protocol):
    """Where events are put."""

    def put(self, event: Event, /) -> None: ...


def run(task: Task, work: Callable[[], Any], events: Events) -> None:
    """Do the work of a task here and now; whoever waits for the events is told how it went."""
    events.put(Started(task))
    try:
        events.put(Finished(task, work()))
    except BaseException as error:
        events.put(Failed(task, error))
