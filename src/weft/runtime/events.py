"""Events of a running graph, put on one queue by worker groups and host function threads."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from weft.data.sample import SequenceSample

# (name of a call, host function or sync; index of the firing)
Task = tuple[str, int]


@dataclass(frozen=True)
class TaskStarted:
    """Event that reports the start of a task.

    The deadline of the task is counted from this event on.
    """

    task: Task


@dataclass(frozen=True)
class OutputsAnnounced:
    """Event that reports early outputs of a running call for some of its ids (`Model.announce`).

    These outputs can already be fetched.
    """

    call: str
    outputs: SequenceSample  # metadata only


@dataclass(frozen=True)
class TaskFinished:
    """Event that reports the end of a task.

    `result` is the `MFCResult` of a call, the target's new version after a sync, or the return
    value of a host function's task.
    """

    task: Task
    result: Any


@dataclass(frozen=True)
class TaskFailed:
    """Event that reports that a task has failed with `error`."""

    task: Task
    error: BaseException


Event = TaskStarted | OutputsAnnounced | TaskFinished | TaskFailed
Events = queue.SimpleQueue[Event]


class EventSink(Protocol):
    """Object that receives events, such as a queue."""

    def put(self, event: Event, /) -> None: ...


def run(task: Task, work: Callable[[], Any], events: Events) -> None:
    """Run `work` in this thread, and put events on `events` for its start and its result or error."""
    events.put(TaskStarted(task))
    try:
        events.put(TaskFinished(task, work()))
    except BaseException as error:
        events.put(TaskFailed(task, error))
