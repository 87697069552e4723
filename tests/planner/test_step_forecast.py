"""The forecast of a step of a run as it is placed: sums that a hand can follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_llama, write_jsonl
from weft.checkpoints.hf_io import read_config
from weft.engine.spec import ModelSpec
from weft.experiments import PPOConfig
from weft.launch.facts import TargetDevices
from weft.launch.plan import forecast_run_step
from weft.launch.run import set_up_experiment
from weft.planner.decoder_sizes import build_decoder_sizes
from weft.planner.step_forecast import StepForecast


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forecast")
    make_llama(folder / "model")
    write_jsonl(folder / "prompts.jsonl", [{"prompt": f"count {n}"} for n in range(8)])
    return folder


def forecast(folder: Path, **options: Any) -> StepForecast:
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
    made = forecast_run_step(experiment, TargetDevices.from_experiment(experiment, mode))
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
