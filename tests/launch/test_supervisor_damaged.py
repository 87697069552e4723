"""Weights that hold no numbers are named once a run has failed of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.launch.cases import dpo, prepare
from weft.checkpoints.weight_files import WeightFiles
from weft.errors import CheckpointError
from weft.launch import run
from weft.launch.supervisor import find_damaged_weights

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("damaged")
    prepare(made)
    shutil.copytree(made / "model", made / "bad")
    file = made / "bad" / "model.safetensors"
    tensors = load_file(file)
    tensors[NAME][0, :2] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    return made


def test_the_tensor_is_named_with_its_file(root: Path) -> None:
    assert WeightFiles(root / "model").find_not_finite() is None
    found = WeightFiles(root / "bad").find_not_finite()
    assert found is not None
    assert f"bad/model.safetensors: {NAME} holds 2 of" in found


def test_a_run_that_fails_of_a_frozen_roles_weights_names_that_role(root: Path) -> None:
    config = dpo(root, "damaged")
    config.actor.lora.r, config.dpo.cache_ref_logprobs, config.max_steps = 0, False, 1
    config.ref.path = str(root / "bad")
    with pytest.raises(CheckpointError, match=r"ref\.path=.*bad: the weights are damaged.*up_proj"):
        run(config)


def test_finite_weights_are_not_blamed(root: Path) -> None:
    assert find_damaged_weights(dpo(root, "fine").build()) is None
