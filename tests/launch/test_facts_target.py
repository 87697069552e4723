"""What a plan is made for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_llama, prompt_answer_rows, write_jsonl
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.experiments import SFTConfig
from weft.launch.facts import TargetDevices
from weft.planner.devices import (
    GIB,
    GPU_SIZES,
    GPUS,
    RESERVED_GIB,
    find_gpu_rates,
    get_usable_memory,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_llama(folder / "model")
    write_jsonl(folder / "rows.jsonl", prompt_answer_rows())
    return folder


def experiment(folder: Path, **options: Any) -> Experiment:
    config = SFTConfig(experiment_name="e", trial_name="t", device=options.pop("device", None))
    config.model.path, config.dataset.path = str(folder / "model"), str(folder / "rows.jsonl")
    config.model.layout = options.pop("layout", None)
    for name, value in options.items():
        setattr(config.search, name, value)
    return config.build()


def test_this_machine_where_nothing_else_is_named(folder: Path) -> None:
    alone = TargetDevices.from_experiment(experiment(folder, device="cpu"), "local")
    assert (
        alone.device.type == "cpu"
        and alone.usable is not None
        and alone.list_candidates() == [alone]
    )
    shared = TargetDevices.from_experiment(experiment(folder, device="cpu", layout="d4"), "local")
    assert shared.usable == alone.usable / 4 and shared.count == 4
    assert (
        TargetDevices.from_experiment(
            experiment(folder, device="cpu", memory_gb=3.0), "local"
        ).usable
        == 3 * GIB
    )


def test_a_gpu_that_is_named_need_not_be_here(folder: Path) -> None:
    named = TargetDevices.from_experiment(experiment(folder, gpu="NVIDIA H100 80GB"), "local")
    assert (
        named.device.type == "cuda"
        and named.usable == (79.1 - RESERVED_GIB) * GIB
        and "H100" in named.description
    )
    assert (
        TargetDevices.from_experiment(
            experiment(folder, gpu="H100", device="cpu"), "local"
        ).device.type
        == "cpu"
    ), "device=cpu counts"
    for gpu in GPUS:
        named = TargetDevices.from_experiment(experiment(folder, gpu=gpu), "local")
        assert named.usable == find_gpu_rates(gpu, "bfloat16").capacity, "as the search has it"
    assert get_usable_memory("T4") == pytest.approx(0.97 * 16 - RESERVED_GIB)
    with pytest.raises(ConfigError, match="Voodoo"):
        TargetDevices.from_experiment(experiment(folder, gpu="Voodoo"), "local")


def test_without_a_name_every_size_that_is_sold(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    sizes = TargetDevices.from_experiment(
        experiment(folder, device="cuda", layout="d2"), "local"
    ).list_candidates()
    assert [target.name for target in sizes] == [f"GPU of {gb} GB" for gb, _ in GPU_SIZES]
    assert (
        "search.gpu" in sizes[0].description
        and sizes[0].usable == (GPU_SIZES[0][1] - RESERVED_GIB) * GIB
    )


def test_the_verdict(folder: Path) -> None:
    named = TargetDevices.from_experiment(experiment(folder, gpu="H100"), "local")
    assert (
        named.format_verdict(7.04 * GIB)
        == "fits: the device needs about 7.04 GiB of 77.60 GiB: H100"
    )
    many = replace(named, count=8)
    assert (
        many.format_verdict(80 * GIB)
        == "does NOT fit: each of 8 devices needs about 80.00 GiB of 77.60 GiB: H100"
    )
