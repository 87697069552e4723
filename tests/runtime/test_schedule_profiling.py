"""Steps that are traced: which ones, when the trace ends, and what is refused."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.cases import options, prepare
from weft.errors import ConfigError, DevicesLost, RunError
from weft.experiment import parse_step_range
from weft.experiments import SFTConfig
from weft.launch import run
from weft.runtime.schedule import StepProfiler


class Devices:
    def __init__(self) -> None:
        self.asked: list[str | None] = []

    def toggle_trace(self, path: str | None = None) -> None:
        self.asked.append(path)


def traced(
    steps: str | None, told: list[int], over: int | None = None
) -> tuple[list[str | None], list[str]]:
    """What the devices are asked, and what people are told."""
    devices, notes = Devices(), []
    profiling = StepProfiler(steps, devices, Path("/run"), notes.append)  # type: ignore[arg-type]
    for step in told:
        profiling.start_before(step)
        profiling.write_after(step, over=step == over)
    return devices.asked, notes


def test_a_trace_goes_from_the_first_to_the_last_step() -> None:
    asked, notes = traced("2:3", [1, 2, 3, 4])
    assert asked == [None, "/run/steps-2-3-worker-{rank}.json.gz"]
    assert notes == [
        "trace of steps 2 to 3: /run/steps-2-3-worker-*.json.gz (open it at ui.perfetto.dev)"
    ]
    assert traced(None, [1, 2]) == ([], []) and traced("9", [1, 2]) == ([], [])


def test_a_run_that_ends_or_begins_among_the_steps_traces_those_it_has() -> None:
    assert traced("2:9", [1, 2, 3], over=3)[0][-1] == "/run/steps-2-3-worker-{rank}.json.gz"
    assert traced("2:5", [4, 5, 6])[0] == [None, "/run/steps-4-5-worker-{rank}.json.gz"]


@pytest.mark.parametrize(
    ("error", "path"),
    [
        (None, "/run/steps-2-3-worker-{rank}.json.gz"),
        (RunError("the loss is NaN"), "/run/steps-2-4-worker-{rank}.json.gz"),
        (DevicesLost("gone"), None),
        (KeyboardInterrupt(), None),
    ],
)
def test_what_was_traced_is_kept_where_the_run_ends_or_fails(
    error: BaseException | None, path: str | None
) -> None:
    devices, notes = Devices(), list[str]()
    profiling = StepProfiler("2:9", devices, Path("/run"), notes.append)  # type: ignore[arg-type]
    with (
        contextlib.suppress(RunError, KeyboardInterrupt),
        profiling.write_on_exit(lambda: 3, lambda: 4),
    ):
        profiling.start_before(2)
        profiling.write_after(2)
        if error is not None:
            raise error
    assert devices.asked == ([None] if path is None else [None, path])


def test_trouble_with_the_trace_never_hides_what_failed() -> None:
    class Broken(Devices):
        def toggle_trace(self, path: str | None = None) -> None:
            if path is not None:
                raise RunError("the disk is full")

    profiling = StepProfiler("1", Broken(), Path("/run"), [].append)  # type: ignore[arg-type]
    with (
        pytest.raises(ValueError, match="oops") as caught,
        profiling.write_on_exit(lambda: 0, lambda: 1),
    ):
        profiling.start_before(1)
        raise ValueError("oops")
    assert caught.value.__notes__ == ["the trace of its steps is lost: the disk is full"]


@pytest.mark.parametrize("steps", ["", "x", "3:2", "0:4", "0", "-1:2", "1:2:3", "1.5"])
def test_ranges_that_are_none(steps: str) -> None:
    with pytest.raises(ConfigError, match="5:8"):
        parse_step_range(steps)


def small(root: Path, folder: str, **more: Any) -> SFTConfig:
    config = SFTConfig(**options(root, folder, **{"max_steps": 3, "save_freq_steps": None, **more}))
    config.model.path = str(root / "model")
    config.dataset.train_path, config.dataset.train_bs_n_seqs = str(root / "sft.jsonl"), 4
    return config


def test_a_run_leaves_a_trace_that_can_be_read(tmp_path: Path) -> None:
    prepare(tmp_path)
    result = run(small(tmp_path, "runs", profile_steps="2:3"))
    (path,) = (result.directory / "profile").iterdir()
    assert path.name == "steps-2-3-worker-0.json.gz"
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    names = [event.get("name", "") for event in events if event.get("ph") == "X"]
    assert any(name.startswith("aten::") for name in names)
    assert names.count("train") == 2, "two calls of the node, by its name"
    for told in (result.directory / "log.txt", result.directory / "report.html"):
        assert "profile/steps-2-3-worker-" in told.read_text()
    report = (result.directory / "report.html").read_text()
    assert (result.directory / "hardware.txt").read_text().strip() in report and "cpu (" in report
    with pytest.raises(ConfigError, match="profile_steps=7: the run has 3 steps"):
        run(small(tmp_path, "other", profile_steps="7"))
    assert not (tmp_path / "other").exists()
