"""timeline.json: trace events for Perfetto, complete after every event and after a kill."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from weft.observe.timeline import Timeline, read_spans


def load(path: Path) -> list[dict]:
    events: list[dict] = json.loads(path.read_text())
    return events


def test_the_file_is_complete_json_after_every_event(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(path)
    for index in range(5):
        timeline.add(f"call{index}", "roles/actor", time.time(), 0.1, step=index)
        assert [e["name"] for e in load(path) if e["ph"] == "X"] == [
            f"call{i}" for i in range(index + 1)
        ]


def test_events_are_complete_events_on_named_tracks_in_microseconds(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(path)
    began = time.time()
    timeline.add("actor_gen", "roles/actor", began, 1.5, step=1)
    timeline.add("ref_inf", "roles/ref", began + 1.5, 0.25, step=1)
    timeline.add("reward", "host/reward", began + 2, 0.125, step=1)
    events = load(path)
    spans = [e for e in events if e["ph"] == "X"]
    assert [e["dur"] for e in spans] == [1_500_000, 250_000, 125_000]
    assert spans[1]["ts"] - spans[0]["ts"] == pytest.approx(1_500_000, abs=2)
    assert all(
        isinstance(e["ts"], int) and {"name", "ph", "pid", "tid"} <= e.keys() for e in events
    )
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [(processes[e["pid"]], threads[e["pid"], e["tid"]]) for e in spans] == [
        ("roles", "actor"),
        ("roles", "ref"),
        ("host functions", "reward"),
    ]


def test_a_span_that_fails_is_written_too(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    with pytest.raises(KeyError), timeline.time_span("save", "run/save"):
        raise KeyError
    assert [span.name for span in read_spans(tmp_path / "timeline.json")] == ["save"]


@pytest.mark.parametrize("cut", [0, 1, 3, 40, 150])
def test_a_damaged_end_is_repaired_and_the_tracks_continue(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "timeline.json"
    first = Timeline(path)
    for index in range(3):
        first.add(f"old{index}", "roles/actor", time.time(), 0.1)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - cut])
    second = Timeline(path)
    second.add("new", "roles/actor", time.time(), 0.1)
    second.add("new", "roles/critic", time.time(), 0.1)
    events = load(path)
    actor = {e["tid"] for e in events if e["ph"] == "X" and e["name"] in ("old0", "new")}
    assert len([e for e in events if e["name"] == "thread_name"]) == 2
    assert len(actor) == 2, "the actor's track goes on; the critic has its own"
    stamps = [e["ts"] for e in events if e["ph"] == "X"]
    assert stamps == sorted(stamps), "one clock over both processes"
    assert [span.name for span in read_spans(path)] == ["new", "new"], (
        "a reader sees the last process alone"
    )


def test_any_name_stays_on_its_line(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    Timeline(path).add("a\u2028b\nc", "roles/x\ud800", time.time(), 0.1)
    assert [span.name for span in read_spans(path)] == ["a\u2028b\nc"]
    assert Timeline(path) and load(path)


def test_repeated_steps_are_read_once(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    for steps in ((1, 2, 3), (3, 4)):
        timeline = Timeline(path)
        for step in steps:
            timeline.add("train", "roles/actor", time.time(), 0.1 * len(steps), step=step)
    assert [(span.step, round(span.seconds, 2)) for span in read_spans(path)] == [
        (1, 0.3),
        (2, 0.3),
        (3, 0.2),
        (4, 0.2),
    ]


def test_of_a_long_timeline_the_beginning_and_the_end_are_read(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    for step in range(1, 200):
        timeline.add("train", "roles/actor", 1e9 + step, 0.1, step=step)
    steps = [span.step for span in read_spans(tmp_path / "timeline.json", 2000, 2000)]
    assert (
        steps[0] == 1
        and steps[-1] == 199
        and 10 < len(steps) < 60
        and steps == sorted(steps, key=int)
    )
