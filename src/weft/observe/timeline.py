"""Timeline of a run, `timeline.json`: spans as Chrome trace events, for https://ui.perfetto.dev.

A track has the form `GROUP/LANE`, such as `roles/actor`, `host/reward` or `run/save`. A group is a
process of the trace, and a lane is a thread of that process. The file is a complete JSON array
after every event, because each event overwrites the closing bracket and writes it again.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.observe.jsonl import convert_to_json
from weft.observe.metrics import is_finite, is_step
from weft.writing import resolve_destination, write

HEAD = b"[\n"
TAIL = b"\n]\n"
ROLES = "roles"
HOST = "host"
RUN = "run"
MEMORY = "memory"
GROUP_NAMES = {ROLES: "roles", HOST: "host functions", RUN: "run"}
STARTED = "started"  # instant event at the start of each process of a run
MICROSECONDS = 1e6


@dataclass(frozen=True)
class TimelineSpan:
    """Timed activity, which the timeline shows as a bar.

    Attributes:
        name: name of the activity, such as the name of a graph node
        group: group of lanes, such as `roles` or `host`
        lane: lane in which the bar is drawn, such as `actor` in the group `roles`
        start: time in seconds since the run was first started
        seconds: duration
        step: training step, or None if the activity belongs to no step
    """

    name: str
    group: str
    lane: str
    start: float
    seconds: float
    step: int | None = None


class Timeline:
    """Writer of the timeline file of a run, which shows when each activity ran.

    A resumed run appends to the existing file, with the same time origin. Raises `UserError` if
    `path` exists but is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self._path = resolve_destination(path)
        self._threads: dict[tuple[str, str], tuple[int, int]] = {}
        self._processes: dict[str, int] = {}
        self._size = 0
        self._origin = time.time()
        self._resume_file(read_events(path))
        self._write_event(
            {
                "name": STARTED,
                "ph": "i",
                "s": "g",
                "pid": 0,
                "tid": 0,
                "args": {"epoch_s": time.time()},
            },
            time.time(),
        )

    @contextmanager
    def time_span(self, name: str, track: str, **args: Any) -> Iterator[None]:
        """Time the body of a `with` statement as a span.

        The span is written when the body ends, even if the body raises an exception. `args` are
        shown with the span.
        """
        began = time.time()
        clock_start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, track, began, time.perf_counter() - clock_start, **args)

    def add(self, name: str, track: str, began: float, seconds: float, **args: Any) -> None:
        """Add a span that was measured elsewhere.

        `began` is in seconds since the epoch, and `seconds` is the duration. `args` are shown with
        the span.
        """
        process, thread = self._find_track_ids(track)
        fields = {
            "name": name,
            "cat": track,
            "ph": "X",
            "dur": round(seconds * MICROSECONDS),
            "pid": process,
            "tid": thread,
        }
        self._write_event({**fields, "args": convert_to_json(args)}, began)

    def _find_track_ids(self, track: str) -> tuple[int, int]:
        """Return the process id and the thread id of a track in the file.

        `track` has the form `GROUP/LANE`. The trace format has no groups and lanes, so a group is
        written as a process and a lane as a thread. If the track is new, the names of its process
        and thread are written to the file first.
        """
        group, _, lane = track.rpartition("/")
        group = group or RUN
        key = (group, lane)
        if key not in self._threads:
            if group not in self._processes:
                self._processes[group] = len(self._processes) + 1
                self._write_metadata(
                    "process_name",
                    self._processes[group],
                    0,
                    {"name": GROUP_NAMES.get(group, group), "group": group},
                )
            process = self._processes[group]
            thread = 1 + sum(1 for known_group, _ in self._threads if known_group == group)
            self._write_metadata("thread_name", process, thread, {"name": lane})
            self._threads[key] = (process, thread)
        return self._threads[key]

    def _write_metadata(
        self, name: str, process: int, thread: int, args: Mapping[str, Any]
    ) -> None:
        self._write_event(
            {"name": name, "ph": "M", "pid": process, "tid": thread, "args": dict(args)},
            self._origin,
        )

    def _write_event(self, event: Mapping[str, Any], epoch_seconds: float) -> None:
        """Append an event that occurred at `epoch_seconds`, the time since the epoch."""
        stamped = {**event, "ts": round((epoch_seconds - self._origin) * MICROSECONDS)}
        line = json.dumps(stamped, allow_nan=False).encode()
        is_new = self._size == 0
        with self._path.open("wb" if is_new else "r+b") as file:
            file.seek(self._size)
            file.write((HEAD if is_new else b",\n") + line + TAIL)
        self._size += len(line) + 2

    def _resume_file(self, events: list[dict[str, Any]]) -> None:
        """Continue the timeline of an earlier process, keeping its tracks and its time origin.

        The file is rewritten with its valid events. An incomplete event at the end is dropped.
        """
        groups: dict[int, str] = {}
        for event in events:
            if event["name"] == "process_name":
                groups[event["pid"]] = event["args"]["group"]
                self._processes[event["args"]["group"]] = event["pid"]
            elif event["name"] == "thread_name":
                self._threads[groups[event["pid"]], event["args"]["name"]] = (
                    event["pid"],
                    event["tid"],
                )
        first = next((event for event in events if event["name"] == STARTED), None)
        if first is not None:
            self._origin = first["args"]["epoch_s"] - first["ts"] / MICROSECONDS
            body = b",\n".join(json.dumps(event).encode() for event in events)
            write(self._path, HEAD + body + TAIL)
            self._size = len(HEAD) + len(body)


@dataclass(frozen=True)
class CounterValue:
    """Value of a quantity that changes over time, such as the memory in use on a device.

    Attributes:
        name: Name of the quantity.
        time: Time from which the value holds, in seconds since the run was first started.
        value: Value, in GiB.
    """

    name: str
    time: float
    value: float


def format_timeline(
    spans: Sequence[TimelineSpan],
    notes: Sequence[str] = (),
    counters: Sequence[CounterValue] = (),
) -> str:
    """Return the content of a timeline file with these spans and counters.

    `notes` has a text for each span, which is shown with the span, or is empty. The time origin is
    0.
    """
    events: list[dict[str, Any]] = [
        {"name": STARTED, "ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": 0, "args": {"epoch_s": 0}}
    ]
    processes: dict[str, int] = {}
    threads: dict[tuple[str, str], int] = {}

    def write_metadata(name: str, process: int, thread: int, args: Mapping[str, Any]) -> None:
        ids = {"pid": process, "tid": thread, "ts": 0}
        events.append({"name": name, "ph": "M", **ids, "args": dict(args)})

    for index, span in enumerate(spans):
        if span.group not in processes:
            processes[span.group] = process = len(processes) + 1
            title = GROUP_NAMES.get(span.group, span.group)
            write_metadata("process_name", process, 0, {"name": title, "group": span.group})
        process = processes[span.group]
        track = (span.group, span.lane)
        if track not in threads:
            threads[track] = 1 + sum(1 for group, _ in threads if group == span.group)
            write_metadata("thread_name", process, threads[track], {"name": span.lane})
        args: dict[str, Any] = {} if span.step is None else {"step": span.step}
        if notes and notes[index]:
            args["waits"] = notes[index]
        events.append(
            {
                "name": span.name,
                "cat": f"{span.group}/{span.lane}",
                "ph": "X",
                "dur": round(span.seconds * MICROSECONDS),
                "pid": process,
                "tid": threads[track],
                "ts": round(span.start * MICROSECONDS),
                "args": args,
            }
        )
    if counters:
        write_metadata("process_name", 0, 0, {"name": MEMORY, "group": MEMORY})
    for counter in counters:
        ids = {"pid": 0, "tid": 0, "ts": round(counter.time * MICROSECONDS)}
        events.append({"name": counter.name, "ph": "C", **ids, "args": {"GiB": counter.value}})
    lines = ",\n".join(json.dumps(event, allow_nan=False) for event in events)
    return f"{HEAD.decode()}{lines}{TAIL.decode()}"


def read_events(path: Path, head: int | None = None, tail: int = 0) -> list[dict[str, Any]]:
    """Return the valid events of a file, even if the file is truncated.

    Returns an empty list if there is no file. With `head`, only the first `head` and the last
    `tail` bytes of the file are read.
    """
    if not path.is_file():
        return []
    content = path.read_bytes() if head is None else _read_ends(path, head, tail)
    events = []
    for line in content.decode("utf-8", errors="replace").split("\n"):
        text = line.strip().rstrip(",")
        if not text.startswith("{"):
            continue
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if _is_valid(event):
            events.append(event)
    return events


def _is_valid(event: Mapping[str, Any]) -> bool:
    """Return whether an event has all fields that readers use, with the types that weft writes."""
    args = event.get("args", {})
    if not isinstance(event.get("name"), str) or not isinstance(args, dict):
        return False
    if not all(is_finite(event.get(name)) for name in ("pid", "tid", "ts")):
        return False
    if event.get("ph") == "X":
        return is_finite(event.get("dur")) and (args.get("step") is None or is_step(args["step"]))
    required = {"process_name": "group", "thread_name": "name"}.get(event["name"])
    if required is not None:
        return isinstance(args.get(required), str)
    return event.get("name") != STARTED or is_finite(args.get("epoch_s"))


def _read_ends(path: Path, head: int, tail: int) -> bytes:
    """Return the first `head` and the last `tail` bytes of a file, or all of a shorter file."""
    with path.open("rb") as file:
        first = file.read(head + tail)
        size = os.fstat(file.fileno()).st_size
        if size <= head + tail:
            return first
        file.seek(size - tail)
        return first[:head] + b"\n" + file.read(tail)


def read_spans(path: Path, head: int | None = None, tail: int = 0) -> list[TimelineSpan]:
    """Return the spans of a timeline file, sorted by start.

    If a resumed process repeated steps, the spans that the earlier process recorded for these steps
    are left out. Spans of earlier processes that belong to no step are also left out. See
    `read_events` for `head` and `tail`.
    """
    events = read_events(path, head, tail)
    groups = {}
    lanes = {}
    for event in events:
        if event["name"] == "process_name":
            groups[event["pid"]] = event["args"]["group"]
        elif event["name"] == "thread_name":
            lanes[(event["pid"], event["tid"])] = event["args"]["name"]
    spans: list[TimelineSpan] = []
    # Backwards, so that the steps of later processes are known before those of earlier ones.
    first_repeated = math.inf  # first step of the later processes
    first_step = math.inf  # first step of all processes read so far
    is_last_process = True
    for event in reversed(events):
        if event["name"] == STARTED:
            first_repeated = min(first_repeated, first_step)
            is_last_process = False
        elif event["ph"] == "X":
            step = event.get("args", {}).get("step")
            if step is None and not is_last_process:
                continue
            if step is not None:
                if step >= first_repeated:
                    continue
                first_step = min(first_step, step)
            spans.append(
                TimelineSpan(
                    name=event["name"],
                    group=groups.get(event["pid"], RUN),
                    lane=lanes.get((event["pid"], event["tid"]), event["name"]),
                    start=event["ts"] / MICROSECONDS,
                    seconds=event["dur"] / MICROSECONDS,
                    step=step,
                )
            )
    return sorted(spans, key=lambda span: span.start)
