"""The forecast of a step of a run as it is placed: sums that a hand can follow."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.planner.profiles import contents
from tests.tiny import make_llama, write_jsonl
from weft.checkpoints.hf_io import read_config
from weft.data.batches import SourceSubset
from weft.data.loader import LoadedData
from weft.data.sample import SequenceSample
from weft.engine.device import count_cores, describe_profiled_device, read_thread_limit
from weft.engine.spec import ModelSpec
from weft.experiments import PPOConfig
from weft.launch.facts import TargetDevices
from weft.launch.plan import forecast_run_step
from weft.launch.run import set_up_experiment
from weft.planner.compute_times import PARTS
from weft.planner.decoder_sizes import build_decoder_sizes
from weft.planner.profile import (
    ProfileMachine,
    find_folder,
    format_contents,
    name_device_folder,
    name_file,
)
from weft.planner.step_forecast import StepForecast


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forecast")
    make_llama(folder / "model")
    write_jsonl(folder / "prompts.jsonl", [{"prompt": f"count {n}"} for n in range(8)])
    return folder


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def forecast(folder: Path, data: LoadedData | None = None, **options: Any) -> StepForecast:
    config = PPOConfig(experiment_name="e", trial_name="t", fileroot=str(folder / "runs"))
    for role in ("actor", "critic", "ref", "rew"):
        getattr(config, role).path = str(folder / "model")
    config.dataset.path = str(folder / "prompts.jsonl")
    config.dataset.train_bs_n_seqs = 4
    config.device = "cpu"
    for name, value in options.items():
        where, _, last = name.rpartition("__")
        target = config
        for part in where.split("__") if where else ():
            target = getattr(target, part)
        setattr(target, last, value)
    experiment, mode = set_up_experiment(config, None)
    target = TargetDevices.from_experiment(experiment, mode)
    made = forecast_run_step(experiment, target, data)
    assert made is not None
    return made


def test_calls_of_one_device_run_one_after_another(folder: Path) -> None:
    made = forecast(folder)
    assert set(made.calls) == {
        *("actor_gen", "rew_inf", "ref_inf", "critic_inf", "actor_train", "critic_train")
    }
    assert made.step_seconds == pytest.approx(sum(call.seconds for call in made.calls.values()))
    assert all(call.moved_bytes == 0 for call in made.calls.values())
    assert made.left_out == () and made.basis == "estimated speeds of a CPU"
    assert json.loads(json.dumps(made.to_dict()))["step_seconds"] == made.step_seconds


def test_the_devices_of_a_copy_receive_what_they_lack(folder: Path) -> None:
    """The actor is trained on device 0 and samples on two tensor-parallel ones: the second device
    receives half of the weights, in each step.
    """
    made = forecast(
        folder, actor__layout="d1", actor_gen__layout="t2", actor_gen__device_mesh="0,1"
    )
    parameters = build_decoder_sizes(
        ModelSpec(), read_config(folder / "model")[1], on_gpu=False
    ).shape.parameters
    assert made.calls["actor_gen"].moved_bytes == parameters * 4 / 2
    assert made.calls["actor_gen"].transfer_seconds > 0
    assert made.calls["actor_train"].moved_bytes == 0


def test_roles_without_a_network_are_named(folder: Path) -> None:
    made = forecast(folder, rew__backend="hf")
    assert made.left_out == ("rew",) and "rew_inf" not in made.calls


def test_each_call_says_what_bounds_it(folder: Path) -> None:
    made = forecast(folder)
    for call in made.calls.values():
        assert set(call.parts) == set(PARTS)
        assert sum(call.parts.values()) == pytest.approx(call.seconds)
        assert call.bound == max(call.parts, key=lambda name: call.parts[name])
    # The overhead of starting kernels is what so small a model waits for.
    assert made.calls["actor_gen"].bound == "overhead"


def write_profile(folder: Path, **changes: Any) -> Path:
    """Write a profile of the test's model for this machine, with numbers made up."""
    config = read_config(folder / "model")[1]
    key = build_decoder_sizes(ModelSpec(), config, on_gpu=False).profile_key
    machine = ProfileMachine(*describe_profiled_device(torch.device("cpu")))
    threads = read_thread_limit() or count_cores()
    made = contents(shape=asdict(key), **{**asdict(machine), "threads": threads, **changes})
    path = find_folder() / name_device_folder(machine.device)
    path = path / name_file(key, "float32", 1, threads)
    path.parent.mkdir(parents=True)
    path.write_text(format_contents(made))
    return path


def test_a_profile_of_this_machine_is_used(folder: Path) -> None:
    before = forecast(folder)
    write_profile(folder)
    made = forecast(folder)
    assert made.basis == "a profile of 2026-01-02" and made.notes == ()
    assert made.calls["actor_train"].seconds > 2 * before.calls["actor_train"].seconds


def test_a_damaged_or_stale_profile_is_noted_and_not_used(folder: Path) -> None:
    before = forecast(folder)
    path = write_profile(folder, torch="1.0")
    made = forecast(folder)
    assert made.step_seconds == before.step_seconds and made.basis == before.basis
    assert made.notes[0].startswith(f"profile: {path}: the profile was made with torch '1.0'")
    path.write_text("{")
    assert "the profile is damaged" in forecast(folder).notes[0]


def test_lengths_are_those_of_the_rows(folder: Path) -> None:
    """Prompts of about 20 tokens, in place of the most that the model's context allows."""

    rows: list[SequenceSample] = []
    for number in range(8):
        prompt = torch.arange(16 + number)
        lengths = {"prompt": [[len(prompt)]]}
        rows.append(SequenceSample.from_groups([str(number)], lengths, {"prompt": prompt}))
    part = SourceSubset("rows", cast(Any, rows), np.arange(8))
    data = LoadedData(cast(Any, None), parts=(part,))
    wide = forecast(folder).calls["rew_inf"].seconds
    assert forecast(folder, data).calls["rew_inf"].seconds < wide
