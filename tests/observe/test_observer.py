"""Observer: it writes the run's files, informs the loggers, and truncates files at a restart."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from weft.errors import ConfigError, RunError
from weft.observe.jsonl import format_ranges, read_rows
from weft.observe.observer import RunObserver
from weft.observe.progress import PlainView
from weft.observe.sinks import RunInfo, check_sinks, make_sinks
from weft.observe.timeline import read_spans


class Recorder:
    """Sink that stores its calls."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.heard.append((step, dict(metrics)))

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self.heard.append((step, [row["completion"] for row in samples]))

    def close(self) -> None:
        self.heard.append("closed")


def quiet() -> PlainView:
    return PlainView(Console(file=io.StringIO()))


def test_a_step_goes_to_file_log_and_sinks(tmp_path: Path) -> None:
    sink = Recorder()
    observer = RunObserver(tmp_path, [sink], quiet(), memory=lambda: 1.25)
    observer.expect(2)
    observer.record_samples(1, [{"prompt": "p", "completion": "c", "reward": 1.0}])
    observer.record_step({"step": 1, "train/loss": 0.5, "train/odd": math.inf})
    observer.close("finished", ["next: weft chat runs/e/t"])
    observer.close("finished", ["never"])
    assert list(read_rows(tmp_path / "metrics.jsonl")) == [
        {"step": 1, "train/loss": 0.5, "train/odd": None, "peak_memory_gb": 1.25}
    ]
    assert list(read_rows(tmp_path / "samples.jsonl")) == [
        {"step": 1, "prompt": "p", "completion": "c", "reward": 1.0}
    ]
    assert sink.heard == [(1, ["c"]), (1, {"train/loss": 0.5, "peak_memory_gb": 1.25}), "closed"]
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split("  ", 1)[1].split("  ")[0] for line in log] == [
        "step 1/2",
        log[1].split("  ", 1)[1],
        "next: weft chat runs/e/t",
    ]
    assert "finished after step 1 of 2" in log[1]


def test_log_freq_thins_lines_and_sinks_but_not_the_file(tmp_path: Path) -> None:
    sink = Recorder()
    observer = RunObserver(tmp_path, [sink], quiet(), log_freq_steps=2)
    for step in range(1, 6):
        observer.record_samples(step, [{"completion": "c"}])
        observer.record_step({"step": step, "train/loss": 1.0})
    assert [step for step, _ in sink.heard] == [2, 2, 4, 4]
    assert len(list(read_rows(tmp_path / "samples.jsonl"))) == 5
    assert len(list(read_rows(tmp_path / "metrics.jsonl"))) == 5
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 2


def test_a_restart_truncates_the_files_and_continues(tmp_path: Path) -> None:
    first = RunObserver(tmp_path, view=quiet())
    for step in range(1, 6):
        first.record_samples(step, [{"completion": str(step)}])
        first.record_step({"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "tr')
    again = RunObserver(tmp_path, view=quiet())
    again.truncate(3)
    again.record_step({"step": 4, "new": True})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [row["step"] for row in read_rows(tmp_path / "samples.jsonl")] == [1, 2, 3]


def test_files_are_truncated_when_they_are_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    observer = RunObserver.open(RunInfo(tmp_path, "e", "t", {}, resumed_step=1), {}, progress=False)
    observer.record_step({"step": 2, "train/loss": 2.0, "step_seconds": 1.0})
    observer.close("stopped")
    assert [row.get("train/loss") for row in read_rows(tmp_path / "metrics.jsonl")] == [None, 2.0]
    assert capsys.readouterr().out.splitlines()[0].startswith("step 2  epoch 0.00  loss 2")


def test_timed_and_added_spans_share_the_timeline(tmp_path: Path) -> None:
    observer = RunObserver(tmp_path, view=quiet())
    with observer.time_span("save"):
        pass
    observer.timeline.add("actor_gen", "roles/actor", 1e9, 2.0, step=3)
    spans = {span.name: span for span in read_spans(tmp_path / "timeline.json")}
    assert (spans["save"].group, spans["save"].lane) == ("run", "save")
    assert (spans["actor_gen"].group, spans["actor_gen"].seconds, spans["actor_gen"].step) == (
        "roles",
        2.0,
        3,
    )


def test_notes_of_several_lines_keep_their_stamp(tmp_path: Path) -> None:
    RunObserver(tmp_path, view=quiet()).note("one\ntwo")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line[21:] for line in lines] == ["one", "two"]


def test_a_file_that_cannot_be_written_is_a_run_error(tmp_path: Path) -> None:
    observer = RunObserver(tmp_path, view=quiet())
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunError, match=r"metrics\.jsonl cannot be written"):
        observer.record_step({"step": 1})


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_reported_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"pip install '.*\[{name}\]'"):
        check_sinks({name: {}})


def test_an_unknown_logger_is_reported_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown logger 'wanbd'; did you mean wandb\?"):
        check_sinks({"wanbd": {}})


def test_tensorboard_files_read_back_and_a_resumed_run_has_one_curve(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (first,) = make_sinks({"tensorboard": {}}, RunInfo(tmp_path, "e", "t", {}))
    for step in (1, 2, 3):
        first.log(step, {"train/loss": 1.0 / step})
    first.log_samples(3, [{"prompt": "<b>|", "completion": "a\nb", "reward": 0.5}])
    first.close()
    (second,) = make_sinks({"tensorboard": {}}, RunInfo(tmp_path, "e", "t", {}, resumed_step=1))
    for step in (2, 3, 4):
        second.log(step, {"train/loss": 10.0 / step})
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(event.step, round(event.value, 4)) for event in events.Scalars("train/loss")]
    assert "samples" in " ".join(events.Tags()["tensors"])
    assert points == [(1, 1.0), (2, 5.0), (3, 3.3333), (4, 2.5)]


def test_no_framework_and_no_logger_is_loaded_unasked() -> None:
    import subprocess
    import sys

    code = (
        "import sys, weft.observe.observer, weft.observe.report, weft.graph.draw, weft.cli.report\n"
        "print([m for m in ('torch', 'tensorboard', 'wandb', 'trackio', 'transformers') if m in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []


def test_rows_of_the_data_are_kept_but_not_shown_as_answers(tmp_path: Path) -> None:
    sink = Recorder()
    observer = RunObserver(tmp_path, [sink], quiet())
    observer.record_samples(1, [{"completion": "c", "loss": 1.0}, {"completion": "d", "rank": 0}])
    assert sink.heard == [] and len(list(read_rows(tmp_path / "samples.jsonl"))) == 2


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda rows: rows, None),
        (lambda rows: [*rows[:3], '{"step": 4, "lo\n', *rows[4:]], "step 4 (1 of 9 steps)"),
        (
            lambda rows: [*rows[:2], "\0" * 40 + "\n", *rows[5:7], "[1]\n", *rows[8:]],
            "step 3-5, 8 (4 of 9 steps)",
        ),
        (lambda rows: [*rows[:8], rows[8].rstrip("\n")], "step 9 (1 of 9 steps)"),
        (lambda rows: rows[:4], "step 5-9 (5 of 9 steps)"),
        (
            lambda rows: [row.replace('"step": 1,', '"step": NaN,') for row in rows],
            "step 1 (1 of 9 steps)",
        ),
        (lambda rows: [], "step 1-9 (9 of 9 steps)"),
        (lambda rows: rows[::2], "step 2, 4, 6, 8 (4 of 9 steps)"),
    ],
)
def test_lost_lines_are_reported_when_a_run_continues(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[list[str]], list[str]],
    told: str | None,
) -> None:
    rows = [json.dumps({"step": step, "train/loss": 1.0}) + "\n" for step in range(1, 12)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(damage(rows[:9]) + (rows[9:] if damage(rows) == rows else []))
    )
    (tmp_path / "run.json").write_text(
        json.dumps({"starts": [{"time": 1.0, "step": 0}, {"time": 2.0, "step": 9}]})
    )
    RunObserver.open(RunInfo(tmp_path, "e", "t", {}, resumed_step=9), {}, progress=False).close(
        "stopped"
    )
    said = [line for line in capsys.readouterr().out.splitlines() if "metrics.jsonl" in line]
    if told is None:
        assert said == [] and len(list(read_rows(tmp_path / "metrics.jsonl"))) == 9
    else:
        assert len(said) == 1 and f"no readable line for {told}" in said[0]
        assert told in (tmp_path / "log.txt").read_text()


def test_steps_of_the_original_run_are_not_reported_as_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}}}\n' for step in (41, 42, 44))
    )
    (tmp_path / "run.json").write_text(
        json.dumps({"starts": [{"time": 1.0, "step": 40}, {"time": 2.0, "step": 44}]})
    )
    RunObserver.open(RunInfo(tmp_path, "e", "t", {}, resumed_step=44), {}, progress=False).close(
        "stopped"
    )
    assert "no readable line for step 43 (1 of 4 steps)" in capsys.readouterr().out


def test_numbers_are_listed_as_ranges() -> None:
    assert format_ranges([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
    assert format_ranges(range(1, 40, 2), max_ranges=3) == "1, 3, 5 and 17 more ranges"
