"""Runs with `backend=jax` beside the same runs with torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.launch.cases import distill, dpo, grpo, options, ppo, prepare
from tests.tiny import write_jsonl
from weft.engine.backends.common import with_dtype
from weft.engine.spec import ModelSpec
from weft.errors import ConfigError
from weft.experiments import SFTConfig
from weft.launch import dry_run, run
from weft.runtime.session import Session

TIMES = ("seconds", "tokens_per_second", "mfu", "time", "memory", "peak", "predicted")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jax")
    prepare(folder)
    return folder


def sft(root: Path, name: str, backend: str, **more: Any) -> SFTConfig:
    config = SFTConfig(**options(root, name, **{"max_steps": 3, "save_freq_steps": None, **more}))
    config.model.path, config.model.backend = str(root / "model"), backend
    config.model.dtype = "float64"
    optimizer = config.model.optimizer  # the same for any number of steps
    optimizer.lr_scheduler_type, optimizer.warmup_steps = "constant", 0
    config.dataset.train_path = str(root / "sft.jsonl")
    config.dataset.train_bs_n_seqs, config.dataset.valid_split = 4, 0.2
    config.eval_freq_steps = 2
    return config


def numbers(lines: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The metrics that are not times or sizes of this machine."""
    found = []
    for line in lines:
        own = {}
        for key, value in line.items():
            if isinstance(value, float) and not any(part in key for part in TIMES):
                own[key] = value
        found.append(own)
    return found


@pytest.mark.slow
def test_sft_is_that_of_torch_and_goes_on_with_either_engine(root: Path) -> None:
    wanted = numbers(run(sft(root, "torch", "torch")).metrics)
    found = numbers(run(sft(root, "jax", "jax")).metrics)
    assert len(found) == 3
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-9)
    # A run that one engine began ends with the other.
    for first, second in (("torch", "jax"), ("jax", "torch")):
        name = f"{first}-{second}"
        begun = run(sft(root, name, first, max_steps=2, recover_freq_steps=1))
        ended = run(sft(root, f"{name}-2", second, resume_from=str(begun.directory)))
        assert numbers(ended.metrics)[-1] == pytest.approx(wanted[-1], rel=1e-9)


@pytest.mark.slow
def test_dpo_with_either_engine_for_either_role(root: Path) -> None:
    wanted = None
    for actor, ref in (("torch", "torch"), ("jax", "jax"), ("jax", "torch"), ("torch", "jax")):
        config = dpo(root, f"dpo-{actor}-{ref}")
        config.actor.backend, config.ref.backend = actor, ref
        config.actor.dtype = config.ref.dtype = "float64"
        config.actor.lora.dropout, config.max_steps = 0.0, 3
        found = numbers(run(config).metrics)
        wanted = wanted or found
        for one, other in zip(found, wanted, strict=True):
            assert one == pytest.approx(other, rel=1e-6), "the reference's log-probs are float32"


def either(config: Any, *backends: str) -> list[dict[str, float]]:
    """Three steps of an algorithm in float64, its roles on the engines of these names."""
    for role, backend in zip(("actor", "critic", "ref", "rew", "teacher"), backends, strict=False):
        if hasattr(config, role):
            spec = getattr(config, role)
            spec.backend, spec.dtype = backend, "float64"
    config.max_steps, config.save_freq_steps = 3, None
    return numbers(run(config).metrics)


# Log-probs and advantages pass from one role to another in float32.
ROUNDED = 1e-5


@pytest.mark.slow_cases("True")
@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
def test_ppo_is_that_of_torch(root: Path, mixed: bool) -> None:
    wanted = either(ppo(root, f"ppo-torch-{mixed}"), *["torch"] * 4)
    backends = ("jax", "torch", "torch", "jax") if mixed else ("jax",) * 4
    found = either(ppo(root, f"ppo-jax-{mixed}"), *backends)
    assert len(found) == 3
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=ROUNDED, abs=ROUNDED)


@pytest.mark.slow
def test_grpo_and_distillation_are_those_of_torch(root: Path) -> None:
    """With top-k, whose ids go to the trainer, and a teacher that gives its likeliest ids."""
    for make in (grpo, distill):
        wanted = either(make(root, f"{make.__name__}-torch"), *["torch"] * 5)
        found = either(make(root, f"{make.__name__}-jax"), *["jax"] * 5)
        for one, other in zip(found, wanted, strict=True):
            assert one == pytest.approx(other, rel=ROUNDED, abs=ROUNDED)


@pytest.mark.slow
def test_a_run_of_grpo_goes_on_with_the_other_engine(root: Path) -> None:
    wanted = either(grpo(root, "grpo-whole"), "torch", "", "torch")
    begun = grpo(root, "grpo-begun")
    begun.actor.backend = begun.ref.backend = "torch"
    begun.actor.dtype = begun.ref.dtype = "float64"
    begun.max_steps = 2
    config = grpo(root, "grpo-ended")
    config.resume_from = str(run(begun).directory)
    found = either(config, "jax", "", "jax")
    assert found[-1] == pytest.approx(wanted[-1], rel=ROUNDED, abs=ROUNDED)


def write_rows_of_many_lengths(root: Path) -> None:
    """Most rows are short, and few of each batch are long; answers end at random."""
    random = np.random.default_rng(0)

    def text(most: int) -> str:
        return " ".join(["word"] * max(1, int(most * random.random() ** 3)))

    rows: dict[str, list[dict[str, Any]]] = {"sft": [], "pairs": [], "prompts": []}
    for number in range(40):
        row = {"id": f"r{number}", "prompt": text(40)}
        rows["prompts"].append(row)
        rows["sft"].append({**row, "answer": text(120)})
        rows["pairs"].append({**row, "pos_answers": [text(60)], "neg_answers": [text(60)]})
    for name, own in rows.items():
        write_jsonl(root / f"{name}.jsonl", own)


@pytest.mark.slow_cases("sft", "ppo")
@pytest.mark.slow
@pytest.mark.parametrize("make", [sft, dpo, ppo, grpo], ids=lambda make: make.__name__)
def test_nothing_is_compiled_after_the_first_step(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With evaluations, checkpoints and recovery points in later steps."""
    prepare(tmp_path)
    write_rows_of_many_lengths(tmp_path)
    config = make(tmp_path, "run", "jax") if make is sft else make(tmp_path, "run")
    for role in ("actor", "critic", "ref", "rew"):
        if hasattr(config, role):
            getattr(config, role).backend = "jax"
    if make is dpo:
        config.actor.lora.dropout, config.dpo.cache_ref_logprobs = 0.0, False
    if make in (ppo, grpo):
        gen = getattr(config, make.__name__).gen
        gen.max_new_tokens, gen.stop_ids = 24, list(range(5, 60))
    config.max_steps, config.save_freq_steps, config.recover_freq_steps = 8, 3, 2
    compiled = 0
    after_steps: list[int] = []
    finish_step = Session._finish_step

    def count(event: str, seconds: float, **_: Any) -> None:
        nonlocal compiled
        compiled += event == "/jax/core/compile/backend_compile_duration"

    def finish_and_count(session: Session, result: Any) -> None:
        finish_step(session, result)
        after_steps.append(compiled)

    monkeypatch.setattr(Session, "_finish_step", finish_and_count)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        run(config)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert len(after_steps) == 8 and after_steps[0] > 0
    assert after_steps == [after_steps[0]] * 8


@pytest.mark.parametrize("planned", [False, True])
def test_an_option_of_torch_alone_is_refused_by_its_name(root: Path, planned: bool) -> None:
    config = sft(root, "options", "jax")
    config.model.compile = True
    with pytest.raises(ConfigError, match=r"^model\.compile=true: backend=jax does not have it"):
        dry_run(config) if planned else run(config)
    config.model.compile, config.model.layout = False, "1,3"
    with pytest.raises(ConfigError, match=r"^model\.layout=1,3: backend=jax takes"):
        dry_run(config) if planned else run(config)


def test_a_tpu_is_for_networks_of_jax(root: Path) -> None:
    config = dpo(root, "tpu")
    config.device, config.actor.lora.dropout = "tpu", 0.0
    for start in (dry_run, run):
        with pytest.raises(ConfigError, match=r"device=tpu, actor\.backend=\w+: only backend=jax"):
            start(config)
    config.actor.backend = "jax"
    with pytest.raises(ConfigError, match="device=tpu: jax has no such device here"):
        run(config)
    plan = "\n".join(dry_run(config))
    assert "weft does not know how much the TPU has" in plan
    assert "without activations of actor" in plan


def test_weights_on_a_tpu_have_the_dtype_of_the_checkpoint(root: Path) -> None:
    spec = ModelSpec(path=str(root / "model"), backend="jax")
    assert with_dtype(spec, spec.path, on_cpu=True).dtype == "float32"
    copy = shutil.copytree(root / "model", root / "narrow")
    file = copy / "model.safetensors"
    for dtype, backend, chosen in (
        (torch.bfloat16, "jax", "bfloat16"),
        (torch.float16, "jax", "bfloat16"),
        (torch.float16, "torch", "float16"),
    ):
        save_file({name: value.to(dtype) for name, value in load_file(file).items()}, file)
        spec = ModelSpec(path=str(copy), backend=backend)
        assert with_dtype(spec, str(copy), on_cpu=False).dtype == chosen


def test_a_call_has_the_devices_of_its_role(root: Path) -> None:
    config = dpo(root, "call")
    config.actor.backend, config.actor_train.layout = "jax", "d2"
    config.actor.lora.dropout = 0.0
    with pytest.raises(ConfigError, match=r"actor_train\.layout=.* by the role's own layout"):
        dry_run(config)
