"""Events that report progress while a graph runs.

Worker groups and the threads of host functions put them on one queue.
"""

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
    """Event that reports the start of a task, from which the task's deadline is counted.

    A task is one run of a call, host function or sync. It is identified by its name and the index
    of the firing (execution of the node).
    """

    task: Task


@dataclass(frozen=True)
class OutputsAnnounced:
    """Event that reports early outputs of a running call, for some of its ids.

    The call has passed these outputs to `Model.announce`, and they can be fetched already.
    """

    call: str
    outputs: SequenceSample  # metadata only


@dataclass(frozen=True)
class TaskFinished:
    """Event that reports the successful end of a task.

    `result` is the `MFCResult` of a model call, the `FiringOutcome` of a host function, or the new
    version of the weights that a sync has updated.
    """

    task: Task
    result: Any


@dataclass(frozen=True)
class TaskFailed:
    """Event that reports the failure of a task."""

    task: Task
    error: BaseException


Event = TaskStarted | OutputsAnnounced | TaskFinished | TaskFailed
Events = queue.SimpleQueue[Event]


class EventSink(Protocol):
    """Object that receives events, such as a queue."""

    def put(self, event: Event, /) -> None: ...


def run_and_report(task: Task, work: Callable[[], Any], events: Events) -> None:
    """Run `work` in this thread, and report its start and end as events of `task`.

    The events are put on the queue `events`. An error in `work` is reported as an event instead of
    being raised.
    """
    events.put(TaskStarted(task))
    try:
        events.put(TaskFinished(task, work()))
    except BaseException as error:
        events.put(TaskFailed(task, error))
