"""`timeline.json`: what ran when, as Chrome trace events (https://ui.perfetto.dev opens it).

A track is `GROUP/LANE`: `roles/actor`, `host/reward`, `run/save`. A group is a process of the trace
and a lane a thread of it. The file is a complete JSON array after every event: each one overwrites
the closing bracket and writes it anew.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.observe.jsonl import plain
from weft.observe.metrics import finite, is_step
from weft.writing import opened, write

HEAD = b"[\n"
TAIL = b"\n]\n"
ROLES = "roles"
HOST = "host"
RUN = "run"
GROUP_NAMES = {ROLES: "roles", HOST: "host functions", RUN: "run"}
STARTED = "started"  # an instant event: the process of a run begins, anew where it was resumed
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Span:
    """One thing that ran: `start` in seconds since the run first began, `seconds` its length."""

    name: str
    group: str
    lane: str
    start: float
    seconds: float
    step: int | None = None


class Timeline:
    """Appends to `path`; a run that goes on appends to what is there, on the same clock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._threads: dict[tuple[str, str], tuple[int, int]] = {}
        self._processes: dict[str, int] = {}
        self._size = 0
        self._origin = time.time()
        self._take_up(read_events(path))
        self._event(
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
    def span(self, name: str, track: str, **args: Any) -> Iterator[None]:
        """Time what is done inside; it is written when it ends, also by an error."""
        began = time.time()
        clock = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, track, began, time.perf_counter() - clock, **args)

    def add(self, name: str, track: str, began: float, seconds: float, **args: Any) -> None:
        """Something that ran elsewhere: `began` in seconds since the epoch, its length in seconds.

        `args` are shown with it.
        """
        process, thread = self._track(track)
        fields = {
            "name": name,
            "cat": track,
            "ph": "X",
            "dur": round(seconds * MICROSECONDS),
            "pid": process,
            "tid": thread,
        }
        self._event({**fields, "args": plain(args)}, began)

    def _track(self, track: str) -> tuple[int, int]:
        """(process, thread) of a track; a new one is named in the file first."""
        group, _, lane = track.rpartition("/")
        group = group or RUN
        key = (group, lane)
        if key not in self._threads:
            if group not in self._processes:
                self._processes[group] = len(self._processes) + 1
                self._metadata(
                    "process_name",
                    self._processes[group],
                    0,
                    {"name": GROUP_NAMES.get(group, group), "group": group},
                )
            process = self._processes[group]
            thread = 1 + sum(1 for known, _ in self._threads if known == group)
            self._metadata("thread_name", process, thread, {"name": lane})
            self._threads[key] = (process, thread)
        return self._threads[key]

    def _metadata(self, name: str, process: int, thread: int, args: Mapping[str, Any]) -> None:
        self._event(
            {"name": name, "ph": "M", "pid": process, "tid": thread, "args": dict(args)},
            self._origin,
        )

    def _event(self, event: Mapping[str, Any], when: float) -> None:
        stamped = {**event, "ts": round((when - self._origin) * MICROSECONDS)}
        line = json.dumps(stamped, allow_nan=False).encode()
        new = self._size == 0
        with opened(self._path, "wb" if new else "r+b") as file:
            file.seek(self._size)
            file.write((HEAD if new else b",\n") + line + TAIL)
        self._size += len(line) + 2

    def _take_up(self, events: list[dict[str, Any]]) -> None:
        """Write what an earlier process left, without a half-written end, and go on with its tracks
        and its clock.
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


def read_events(path: Path, head: int | None = None, tail: int = 0) -> list[dict[str, Any]]:
    """The events of a file that may have lost its end; empty where there is none.

    With `head`, those of so many bytes at its beginning and of `tail` bytes at its end, where it
    has more.
    """
    if not path.is_file():
        return []
    content = path.read_bytes() if head is None else _ends(path, head, tail)
    events = []
    for line in content.decode("utf-8", errors="replace").split("\n"):
        text = line.strip().rstrip(",")
        if not text.startswith("{"):
            continue
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if _is_sound(event):
            events.append(event)
    return events


def _is_sound(event: Mapping[str, Any]) -> bool:
    """Return whether an event has all that a reader takes from it, each of the kind that weft
    writes.
    """
    args = event.get("args", {})
    if not isinstance(event.get("name"), str) or not isinstance(args, dict):
        return False
    if not all(finite(event.get(name)) for name in ("pid", "tid", "ts")):
        return False
    if event.get("ph") == "X":
        return finite(event.get("dur")) and (args.get("step") is None or is_step(args["step"]))
    needed = {"process_name": "group", "thread_name": "name"}.get(event["name"])
    if needed is not None:
        return isinstance(args.get(needed), str)
    return event.get("name") != STARTED or finite(args.get("epoch_s"))


def _ends(path: Path, head: int, tail: int) -> bytes:
    """The first and the last bytes of a file, or all of it."""
    with path.open("rb") as file:
        first = file.read(head + tail)
        size = os.fstat(file.fileno()).st_size
        if size <= head + tail:
            return first
        file.seek(size - tail)
        return first[:head] + b"\n" + file.read(tail)


def read_spans(path: Path, head: int | None = None, tail: int = 0) -> list[Span]:
    """What ran, in order of time.

    Of steps that a restarted process did again, what the earlier one did is left out, as is what it
    did in no step. `head` and `tail` as for `read_events`.
    """
    events = read_events(path, head, tail)
    groups = {e["pid"]: e["args"]["group"] for e in events if e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans: list[Span] = []
    again = math.inf  # the first step that a later process did
    own = math.inf
    last = True
    for event in reversed(events):
        if event["name"] == STARTED:
            again = min(again, own)
            last = False
        elif event["ph"] == "X":
            step = event.get("args", {}).get("step")
            if step >= again if step is not None else not last:
                continue
            own = own if step is None else min(own, step)
            spans.append(
                Span(
                    name=event["name"],
                    group=groups.get(event["pid"], RUN),
                    lane=lanes.get((event["pid"], event["tid"]), event["name"]),
                    start=event["ts"] / MICROSECONDS,
                    seconds=event["dur"] / MICROSECONDS,
                    step=step,
                )
            )
    return sorted(spans, key=lambda span: span.start)
