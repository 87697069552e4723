"""What is predicted for each step of a run, and why where it is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch.cases import ppo, prepare, sft
from weft.experiment import Experiment
from weft.launch.plan import predict_step
from weft.launch.run import set_up_experiment
from weft.observe.memory import measure_file_pages_gb
from weft.observe.predicted import PredictedStep
from weft.planner.decoder_sizes import EXPERT_LOAD
from weft.planner.forecast import CallMemory, MemoryForecast
from weft.planner.memory import RoleMemory
from weft.registry import families

GIB = 2**30
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def experiment(root: Path) -> Experiment:
    return set_up_experiment(sft(root, "sft"), None)[0]


def predict(experiment: Experiment, device: torch.device = CPU, **machine: Any) -> PredictedStep:
    role = RoleMemory(GIB, 0, 0, 0, 0, 0, GIB)
    calls = {"train": CallMemory("model", GIB)}
    expected = MemoryForecast({"model": role}, device.type, (), 0.25, calls=calls)
    known = {"name": "a processor", "memory": 64 * GIB, **machine}
    return predict_step(experiment, expected, device, known, None, in_process=True)


def test_a_process_on_a_cpu_also_holds_what_it_held_before(experiment: Experiment) -> None:
    made = predict(experiment)
    own = made.metrics["predicted/train/peak_bytes"] / GIB
    assert own == pytest.approx(made.metrics["predicted/peak_memory_gb"])
    assert own > 2 + 0.25 + measure_file_pages_gb() - 0.05
    assert made.metrics["predicted/step_seconds"] == made.metrics["predicted/train"] > 0
    assert made.basis == "estimated speeds of a CPU" and made.reason == ""


def test_the_load_of_experts_changes_what_is_predicted(root: Path) -> None:
    folder = root / "experts"
    folder.mkdir()
    config = {"model_type": "mixtral", **families.get("mixtral").tiny}
    (folder / "config.json").write_text(json.dumps(config))
    changed = sft(root, "experts-run")
    changed.model.path, changed.model.init_from_scratch = str(folder), True
    changed.model.layout, changed.n_gpus_per_node = "d2e2", 2
    experiment = set_up_experiment(changed, None)[0]
    made = predict(experiment, torch.device("cuda", 0), name="NVIDIA H100")
    assert made.predict_again is not None
    name = "predicted/step_seconds"
    assumed = made.predict_again({"model": EXPERT_LOAD})
    assert assumed == made.metrics
    more, most = (made.predict_again({"model": load})[name] for load in (2.0, 4.0))
    assert made.metrics[name] < more < most
    changed.model.layout = "d2"
    experiment = set_up_experiment(changed, None)[0]
    made = predict(experiment, torch.device("cuda", 0), name="NVIDIA H100")
    assert made.predict_again is None, "without expert parallelism no rank waits for another"


def test_a_known_gpu_has_speeds_and_an_unknown_one_has_memory_alone(
    experiment: Experiment,
) -> None:
    gpu = torch.device("cuda", 0)
    known = predict(experiment, gpu, name="NVIDIA H100 80GB HBM3")
    assert known.metrics["predicted/train"] > 0 and known.reason == ""
    assert known.metrics["predicted/train/peak_bytes"] == 2.25 * GIB
    other = predict(experiment, gpu, name="Abacus 9000")
    assert set(other.metrics) == {"predicted/train/peak_bytes", "predicted/peak_memory_gb"}
    assert other.reason == "the speed of the device is not known (Abacus 9000)"


def test_no_seconds_are_predicted_of_tpus_and_of_backends_of_others(
    experiment: Experiment,
) -> None:
    control = replace(experiment.control, device="tpu")
    assert "TPU" in predict(replace(experiment, control=control)).reason
    spec = replace(experiment.roles["model"], backend="abacus")
    made = predict(replace(experiment, roles={"model": spec}))
    assert made.reason == "the speed of model.backend=abacus is not known"
    assert "predicted/step_seconds" not in made.metrics
    spec = replace(experiment.roles["model"], backend="hf")
    made = predict(replace(experiment, roles={"model": spec}))
    assert made.reason == "no role has a network of weft's own (backend=torch or jax)"


def test_weights_that_a_copy_receives_are_predicted(root: Path) -> None:
    config = ppo(root, "ppo")
    config.actor_gen.device_mesh = "1"
    made = predict(set_up_experiment(config, None)[0])
    moved = [name for name in made.metrics if name.endswith("/num_weight_bytes")]
    assert moved == ["predicted/actor_gen/num_weight_bytes"]
