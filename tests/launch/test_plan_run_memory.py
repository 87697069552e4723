"""The memory of a placement is the same for all commands that plan it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from weft.cli.plan_show import simulate_config
from weft.errors import ConfigError
from weft.experiments import DPOConfig, GRPOConfig, PPOConfig, SFTConfig
from weft.launch.plan_cost import compare_devices
from weft.launch.plan_run import forecast_run
from weft.planner.candidates import list_layouts
from weft.planner.devices import GIB
from weft.planner.plan_file import format_layout
from weft.registry import families

TINY = {"model_type": "llama", **families.get("llama").tiny}
MODELS = {
    "dense": TINY | {"num_hidden_layers": 4, "vocab_size": 1024, "max_position_embeddings": 512},
    "experts": {"model_type": "mixtral", **families.get("mixtral").tiny},
}
ROLES: dict[Any, tuple[str, ...]] = {
    SFTConfig: ("model",),
    DPOConfig: ("actor", "ref"),
    PPOConfig: ("actor", "critic", "ref"),
    GRPOConfig: ("actor", "ref"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, values in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(values))
    return folder


def draw_config(draw: random.Random, folder: Path) -> Any:
    """A run with layouts, devices and options by chance."""
    kind = draw.choice(list(ROLES))
    options = {"reward": "length"} if kind in (PPOConfig, GRPOConfig) else {}
    config = kind(
        experiment_name="e",
        trial_name="t",
        recover_mode="disabled",
        n_gpus_per_node=4,
        max_tokens_per_microbatch=draw.choice((512, 2048)),
        **options,
    )
    on_gpu = draw.random() < 0.7
    if on_gpu:
        config.search.gpu = draw.choice(("H100", "A100"))
    else:
        config.device = "cpu"
    model = draw.choice(("dense", "dense", "experts"))
    layouts = [str(format_layout(each)) for n in (1, 2, 4) for each in list_layouts(n, 4)]
    for role in ROLES[kind]:
        spec = getattr(config, role)
        spec.path = str(folder / model)
        spec.layout = draw.choice(layouts)
        spec.offload = draw.random() < 0.2
    trained = getattr(config, ROLES[kind][0])
    trained.gradient_checkpointing = draw.random() < 0.3
    if draw.random() < 0.3:
        trained.lora.r = 4
    if kind in (PPOConfig, GRPOConfig):
        config.actor_gen.layout = draw.choice((None, *layouts))
    return config


def test_all_commands_say_the_same_of_random_placements(folder: Path) -> None:
    """The forecast adds up roles by device, the search and the simulation by what calls share."""
    draw = random.Random(0)
    compared = 0
    while compared < 16:
        config = draw_config(draw, folder)
        try:
            run = forecast_run(config)
        except ConfigError:  # the network or the batch does not allow this layout
            continue
        assert run.needed == pytest.approx(run.step.estimate.peak_bytes, rel=1e-9), config
        assert run.usable == run.step.problem.rates.capacity
        page = simulate_config(config, "e", 1)
        assert page.fullest.peak_bytes == pytest.approx(run.needed, rel=1e-9), config
        assert page.fullest.capacity == run.usable
        compared += 1


@pytest.mark.parametrize("kind", [DPOConfig, PPOConfig])
def test_the_search_says_the_same_of_what_it_finds(folder: Path, kind: Any) -> None:
    options = {"reward": "length"} if kind is PPOConfig else {}
    config = kind(experiment_name="e", trial_name="t", recover_mode="disabled", **options)
    for role in ROLES[kind]:
        getattr(config, role).path = str(folder / "dense")
    config.search.gpu, config.allocation_mode, config.n_gpus_per_node = "H100", "search", 2
    run = forecast_run(config)
    found = run.experiment.search
    assert found["search"]["memory_gb"] == pytest.approx(run.needed / GIB, rel=1e-9)
    assert found["device_memory_gb"] == pytest.approx(run.usable / GIB)
    (option,) = compare_devices(config, {"H100": 1.0}, [2])
    assert option.needed_bytes == pytest.approx(run.needed, rel=1e-9)
