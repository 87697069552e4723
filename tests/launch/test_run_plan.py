"""Runs that keep their plan, and that are planned again when they resume on other devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.launch.cases import options, prepare
from tests.runtime.placed import timeless
from weft.errors import ConfigError, RunError
from weft.experiments import PPOConfig, SFTConfig
from weft.experiments.common import RunConfig
from weft.launch import run
from weft.planner.plan_file import parse_plan
from weft.runtime.master import Master

pytestmark = pytest.mark.usefixtures("forked_devices")
STEPS = 3
STOPPED = "stopped by the test"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planned")
    prepare(folder)
    return folder


def build(root: Path, name: str, folder: str, devices: int, mode: str = "search") -> RunConfig:
    """Return a run in float64 whose search uses all devices: its assumed rows are long."""
    more = {"save_freq_steps": None, "max_steps": STEPS, "device": "cpu"}
    fixed = options(root, folder, n_gpus_per_node=devices, allocation_mode=mode, **more)
    config: Any
    if name == "sft":
        config = SFTConfig(**fixed)
        config.dataset.train_path = str(root / "sft.jsonl")
        roles = [config.model]
    else:
        config = PPOConfig(**fixed, reward="length")
        config.dataset.path = str(root / "prompts.jsonl")
        config.ppo.gen.max_new_tokens = 6
        roles = [config.actor, config.critic]
    config.dataset.train_bs_n_seqs = 4
    config.search.gpu, config.search.prompt_tokens = "H100", 100_000
    for spec in roles:
        spec.path, spec.dtype, spec.optimizer.lr = str(root / "model"), "float64", 1e-3
    built: RunConfig = config
    return built


@contextmanager
def stop_after(steps: int) -> Iterator[None]:
    """Let a run fail after this many steps, as if a device process had ended."""
    step = Master.step

    def stop(self: Master) -> Any:
        if self.position.step == steps:
            raise RunError(STOPPED)
        return step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Master, "step", stop)
        yield


def read_plan(directory: Path) -> dict[str, str]:
    plan = parse_plan((directory / "plan.yaml").read_text(), "plan.yaml")
    return {name: str(call) for name, call in plan.calls.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "before", "after"), [("sft", 2, 1), ("sft", 1, 2), ("ppo", 2, 1)])
def test_a_run_that_resumes_on_other_devices_is_planned_again(
    root: Path, name: str, before: int, after: int
) -> None:
    folder = f"{name}-{before}-{after}"
    whole = run(build(root, name, f"{folder}-whole", 1)).directory
    with pytest.raises(RunError, match=STOPPED), stop_after(1):
        run(build(root, name, folder, before))
    resumed = run(build(root, name, folder, after)).directory
    told = (resumed / "log.txt").read_text()
    unit = "device" if before == 1 else "devices"
    assert f"allocation_mode=search: saved on {before} {unit} with " in told
    assert f", now {after}: planned again: " in told
    used = {call.rpartition(" ")[2] for call in read_plan(resumed).values()}
    assert max(int(devices[-1]) for devices in used) == after - 1
    ours, theirs = timeless(resumed), timeless(whole)
    assert len(ours) == STEPS
    for line, wanted in zip(ours, theirs, strict=True):
        numbers = {key: value for key, value in wanted.items() if isinstance(value, int | float)}
        assert {key: line[key] for key in numbers} == pytest.approx(numbers, rel=1e-9, abs=1e-9)


@pytest.mark.slow
def test_a_run_on_the_same_devices_keeps_its_plan(root: Path) -> None:
    """It is not searched again, since its estimates could differ, for example by a new profile."""
    with pytest.raises(RunError, match=STOPPED), stop_after(1):
        run(build(root, "sft", "kept", 2))
    before = read_plan(root / "kept" / "e" / "t")
    assert before == {"train": "d2f1 on 0-1"} or before == {"train": "d2f2 on 0-1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "weft.experiments._placement._place_by_estimates",
            lambda *_: pytest.fail("the run is planned again"),
        )
        resumed = run(build(root, "sft", "kept", 2)).directory
    assert read_plan(resumed) == before
    assert "the run continues with its plan" in (resumed / "log.txt").read_text()


@pytest.mark.slow
def test_a_run_of_a_plan_file_needs_it_no_longer(root: Path) -> None:
    """A resumed run refuses a file that has changed, and does without one that is gone."""
    path = root / "plan.yaml"
    path.write_text('weft_plan: 1\ncalls:\n  train: {layout: d2f1, devices: "0-1"}\n')
    mode = str(path)
    with pytest.raises(RunError, match=STOPPED), stop_after(1):
        run(build(root, "sft", "file", 2, mode))
    path.write_text(path.read_text().replace("d2f1", "t2"))
    with pytest.raises(ConfigError, match=r"changed since .*d2f1 on 0-1 there, t2 on 0-1 here"):
        run(build(root, "sft", "file", 2, mode))
    path.unlink()
    with pytest.raises(RunError, match=STOPPED), stop_after(2):
        run(build(root, "sft", "file", 2, mode))
    # With resume_from, the run continues with the new plan.
    path.write_text('weft_plan: 1\ncalls:\n  train: {layout: t2, devices: "0-1"}\n')
    config = build(root, "sft", "file", 2, mode)
    config.resume_from = str(root / "file" / "e" / "t")
    resumed = run(config)
    assert read_plan(resumed.directory) == {"train": "t2 on 0-1"} and len(resumed.metrics) == STEPS
