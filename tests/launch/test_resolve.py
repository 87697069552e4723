"""What is settled before a run: the dtype of every role."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.bounds import rounded
from tests.launch.cases import distill, dpo, ppo, prepare
from weft.engine.torch.adapters_off import BaseWeightsEngine
from weft.errors import CheckpointError, ConfigError
from weft.experiment import Experiment
from weft.launch import run
from weft.launch.resolve import (
    ResolvedRun,
    check_kv_cache,
    check_layouts,
    check_steps,
    check_stop_ids,
    load_tokenizers,
    read_configs,
    resolve_run,
    with_dtypes,
)
from weft.runtime import roles

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("dtypes")
    prepare(made)
    return made


def resolved(experiment: Experiment) -> ResolvedRun:
    return ResolvedRun(with_dtypes(experiment, CPU), read_configs(experiment), {}, CPU)


def dtypes(
    root: Path, device: torch.device, actor: str | None = None, ref: str | None = None
) -> tuple[str | None, ...]:
    config = dpo(root, "dtypes")
    config.actor.dtype, config.ref.dtype = actor, ref
    experiment = with_dtypes(config.build(), device)
    return experiment.roles["actor"].dtype, experiment.roles["ref"].dtype


def test_other_roles_take_the_dtype_of_the_actor_unless_they_set_one(root: Path) -> None:
    assert dtypes(root, CPU) == ("float32", "float32")
    assert dtypes(root, CPU, actor="bfloat16") == ("bfloat16", "bfloat16")
    assert dtypes(root, CPU, actor="bfloat16", ref="float32") == ("bfloat16", "float32")


def test_on_a_gpu_the_dtype_is_the_checkpoints_own(root: Path) -> None:
    assert dtypes(root, CUDA) == ("float32", "float32")
    path = root / "model" / "model.safetensors"
    kept = path.with_suffix(".kept")
    shutil.copy(path, kept)
    try:
        save_file(
            {name: value.bfloat16() for name, value in load_file(path).items()},
            path,
            {"format": "pt"},
        )
        assert dtypes(root, CUDA) == ("bfloat16", "bfloat16")
        assert dtypes(root, CPU) == ("float32", "float32")
    finally:
        kept.replace(path)


def test_a_config_json_is_blamed_by_its_option_and_name(root: Path) -> None:
    file = root / "model" / "config.json"
    kept = file.read_text()
    try:
        for changes, said in (
            ({"hidden_act": "x"}, "hidden_act='x': the decoder knows"),
            (
                {"rope_parameters": {"rope_type": "linear", "factor": "a"}},
                "factor='a' in its rotary settings",
            ),
        ):
            file.write_text(json.dumps(json.loads(kept) | changes))
            with pytest.raises(CheckpointError, match=rf"^actor\.path={file}: {said}"):
                resolve_run(dpo(root, "configs").build(), CPU)
    finally:
        file.write_text(kept)


@pytest.mark.parametrize("rank", [0, 4])
def test_dpo_in_bfloat16_starts_at_log_2(
    rank: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policy and reference are one network then, with adapters even one engine's base."""
    built: list[roles.RoleEngines] = []
    original = roles.RoleEngines.__init__

    def spy(self: roles.RoleEngines, *given: object) -> None:
        original(self, *given)  # type: ignore[arg-type]
        built.append(self)

    monkeypatch.setattr(roles.RoleEngines, "__init__", spy)
    config = dpo(root, f"bfloat16-{rank}")
    config.actor.dtype, config.actor.lora.r, config.actor.lora.dropout, config.max_steps = (
        "bfloat16",
        rank,
        0.0,
        1,
    )
    metrics = run(config).metrics
    # One network and the same rows: the same bits, and so a margin of 0. In float32, the logarithm
    # of a sigmoid and the mean over a few pairs round less than twelve times.
    assert metrics[0]["actor_train/loss"] == rounded(math.log(2), 12)
    assert isinstance(built[0]._get_own_engine("ref"), BaseWeightsEngine) is bool(rank)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"actor_gen.layout": "t3"},
            r"actor_gen\.layout=d1f1t3p1c1e1: t=3 does not divide the model's 4 attention heads",
        ),
        (
            {"actor.layout": "p9"},
            r"actor\.layout=d1f1t1p9c1e1: p=9 stages of a model with 2 layers",
        ),
        (
            {"actor_train.layout": "p2", "actor.pipeline_schedule": "zbv"},
            r"actor_train\.layout=d1f1t1p2c1e1: pipeline_schedule=zbv with 2 stages a rank makes "
            r"4 stages of a model with 2",
        ),
        (
            {"actor_train.layout": "d2e2"},
            r"actor_train\.layout=d2f1t1p1c1e2: a llama model has no experts to share",
        ),
        (
            {"rew.layout": "t2", "rew.backend": "hf"},
            r"rew\.layout=d1f1t2p1c1e1: backend=hf runs copies of the whole module",
        ),
    ],
)
def test_layouts_that_a_network_cannot_have_are_refused_by_name(
    root: Path, options: dict[str, str], message: str
) -> None:
    config = ppo(root, "layouts")
    for name, value in options.items():
        group, field = name.split(".")
        setattr(getattr(config, group), field, value)
    with pytest.raises(ConfigError, match=message):
        check_layouts(made := config.build(), read_configs(made))


def test_a_layout_that_nobody_typed_is_refused_by_the_option_that_gave_it(root: Path) -> None:
    config = ppo(root, "allocated")
    config.allocation_mode, config.n_gpus_per_node = "t8", 8
    with pytest.raises(
        ConfigError, match=r"layout=d1f1t8p1c1e1: t=8 .*comes from allocation_mode=t8\)"
    ):
        check_layouts(made := config.build(), read_configs(made))


def test_a_cache_without_room_for_one_sequence_is_refused_with_what_would_do(root: Path) -> None:
    config = ppo(root, "cache")
    config.ppo.gen.kv_cache_gb = 2e-6
    with pytest.raises(
        ConfigError,
        match=r"gen\.kv_cache_gb=2e-06: has room for .* of \d tokens, .* can have 26; write",
    ) as refused:
        check_kv_cache(resolved(config.build()), 20)
    config.ppo.gen.kv_cache_gb = float(str(refused.value).split("write ")[1].split()[0])
    check_kv_cache(resolved(config.build()), 20)


def test_where_rows_have_completions_the_longest_row_is_no_prompt(root: Path) -> None:
    config = distill(root, "cache-mixed")
    config.distill.gen.kv_cache_gb = 1e-5
    check_kv_cache(resolved(config.build()), 10**6)


def test_ids_that_the_model_has_not_end_no_completion(root: Path) -> None:
    config = ppo(root, "stops")
    tokenizers = load_tokenizers(config.build())
    config.ppo.gen.stop_ids = [3]
    check_stop_ids(config.build(), tokenizers)
    config.ppo.gen.stop_ids = [3, 10**6]
    with pytest.raises(
        ConfigError, match=r"gen\.stop_ids=\[3, 1000000\]: actor has a vocabulary of [\d,]+ tokens"
    ):
        check_stop_ids(config.build(), tokenizers)


def test_steps_that_the_run_does_not_have() -> None:
    check_steps("2:30", 20)
    with pytest.raises(ConfigError, match="profile_steps=21:30: the run has 20 steps"):
        check_steps("21:30", 20)
