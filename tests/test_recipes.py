"""The recipes that come with weft: each is parsed, planned, and fits the GPU that it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from tests import recipes
from weft.checkpoints.config_file import find_family, read_shipped_configs
from weft.checkpoints.hf_io import read_config
from weft.cli import main as weft
from weft.cli.quickstart import build_config
from weft.data.named.catalogue import find_entry
from weft.data.spec import list_source_specs
from weft.engine.spec import GenerationSpec
from weft.evaluation.answers import read_file
from weft.kernels.gpu import flex
from weft.launch.run import mark_as_planned
from weft.models.network.transformer import Transformer

FILES = recipes.files()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return recipes.write_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("recipe", FILES, ids=lambda path: path.stem)
def test_a_recipe_is_a_configuration_and_says_what_it_needs(
    recipe: Path, models: dict[str, Path]
) -> None:
    config: Any = build_config(recipes.words(recipe, models))[0]
    mark_as_planned(config).build()
    assert recipes.kind_of(recipe) in recipes.KINDS
    for name in ("Model", "Data", "GPU", "Memory", "Smaller", "Values"):
        assert recipes.head(recipe, name)
    command = f"# weft quickstart {recipes.kind_of(recipe)} --config recipes/{recipe.name} experiment_name={recipe.stem} "
    assert command in recipe.read_text()
    roles = [each for each in recipes.values_of(recipe).values() if isinstance(each, dict)]
    named = [
        each["path"]
        for each in roles
        if "path" in each and each is not recipes.values_of(recipe).get("dataset")
    ]
    assert all(path in recipe.read_text().partition("device:")[0] for path in named), (
        "the head names every model"
    )
    for source in list_source_specs(config.dataset):
        if source.named is not None:
            find_entry(source.named)


def test_the_shapes_are_those_of_the_models() -> None:
    """Parameters as their pages say."""
    for name, model in recipes.MODELS.items():
        config = read_shipped_configs()[name]
        with torch.device("meta"):
            network = Transformer(find_family(config).config(config), "lm")
        count = sum(parameter.numel() for parameter in network.parameters())
        assert count == model.parameters, name


@pytest.mark.parametrize("name", [name for name, model in recipes.MODELS.items() if model.real])
def test_what_stands_here_is_what_the_real_file_says(name: str, models: dict[str, Path]) -> None:
    written, network = read_shipped_configs()[name], read_config(models[name])[1]
    assert (
        network.num_layers == written["num_hidden_layers"]
        and network.vocab_size == written["vocab_size"]
    )
    assert network.hidden_size == written["hidden_size"]


def test_a_recipe_is_planned_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    words = ["quickstart", "grpo", "--config", "recipes/grpo-gsm8k-qwen3-0.6b.yaml"]
    assert weft.main([*words, "--dry-run=config"]) == 0
    told = capsys.readouterr().out
    assert "Qwen/Qwen3-0.6B (qwen3), 596M parameters" in told and "memory" in told
    assert "its config.json is the copy that weft ships" in told
    assert weft.main([*words, "experiment_name=e", "trial_name=t"]) == 2, "a run asks the hub"
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_every_recipe_fits_and_its_memory_is_what_it_says(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "can_compile", lambda: False)  # as without Triton, here or not
    plans = {recipe: recipes.plan(recipe, models) for recipe in FILES}
    for recipe, planned in plans.items():
        assert planned.fits, (recipe.stem, planned.lines)
        count = recipes.values_of(recipe).get("n_gpus_per_node", 1)
        assert recipes.head(recipe, "Memory") == recipes.said(planned, count), (
            "python -m tests.recipes writes it"
        )
        size = re.search(r"(\d+) GB", recipes.head(recipe, "GPU"))
        assert size is not None and planned.needed < int(size[1])
    assert recipes.table(plans) in recipes.README.read_text(), "python -m tests.recipes writes it"


def test_one_is_planned_on_a_machine_without_a_gpu(models: dict[str, Path]) -> None:
    planned = recipes.plan(recipes.RECIPES / "grpo-gsm8k-qwen3-0.6b.yaml", models)
    assert planned.fits and planned.gpu == "4090"
    assert any("grpo" in line or "actor_gen" in line for line in planned.lines)


def test_the_folder_in_the_root_is_the_one_that_is_shipped() -> None:
    shipped = Path(__file__).parents[1] / "src" / "weft" / "recipes" / "ready"
    assert shipped.resolve() == recipes.RECIPES.resolve()


@pytest.mark.slow
def test_a_recipe_is_read_from_any_folder_and_named_among_the_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "quickstart",
        "grpo",
        "--config",
        "recipes/grpo-gsm8k-qwen3-0.6b.yaml",
        "experiment_name=e",
        "trial_name=t",
    ]
    assert weft.main([*words, "--cfg", "job"]) == 0 and "Qwen/Qwen3-0.6B" in capsys.readouterr().out
    assert weft.main(["config", "ls", "gsm8k-qwen3-0.6b"]) == 0
    assert "  grpo-gsm8k-qwen3-0.6b  Arithmetic word problems" in capsys.readouterr().out
    assert weft.main(["config", "show", "rw-ultrafeedback-qwen3-0.6b"]) == 0
    assert capsys.readouterr().out.startswith(
        "weft quickstart rw --configs rw-ultrafeedback-qwen3-0.6b"
    )
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "grpo-gsm8k-qwen3-0.6b.yaml").write_text("actor.path: mine\n")
    assert weft.main([*words, "--cfg", "job"]) == 0 and "Qwen3" not in capsys.readouterr().out, (
        "one's own goes before it"
    )


def test_settings_to_sample_the_best_of_many_with() -> None:
    settings, notes = read_file(
        str(recipes.RECIPES / "sampling" / "best-of-n.yaml"), GenerationSpec()
    )
    assert [each.name for each in settings] == ["best-of-n"] and not notes
