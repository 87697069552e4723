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
    """A task has started; its deadline counts from here."""

    task: Task


@dataclass(frozen=True)
class OutputsAnnounced:
    """Early outputs of a running call for some of its ids (`Model.announce`), ready to fetch."""

    call: str
    outputs: SequenceSample  # metadata only


@dataclass(frozen=True)
class TaskFinished:
    """A task is finished.

    `result` is the `MFCResult` of a call, the version after a sync, or a host function's return
    value.
    """

    task: Task
    result: Any


@dataclass(frozen=True)
class TaskFailed:
    """A task has failed with `error`."""

    task: Task
    error: BaseException


Event = TaskStarted | OutputsAnnounced | TaskFinished | TaskFailed
Events = queue.SimpleQueue[Event]


class EventSink(Protocol):
    """Destination for events."""

    def put(self, event: Event, /) -> None: ...


def run(task: Task, work: Callable[[], Any], events: Events) -> None:
    """Run `work` in this thread and put its start and its result or error on `events`."""
    events.put(TaskStarted(task))
    try:
        events.put(TaskFinished(task, work()))
    except BaseException as error:
        events.put(TaskFailed(task, error))
