"""Options that are tried for a run, and which of them are shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_plan import LARGE
from weft.errors import ConfigError
from weft.experiments import GRPOConfig, PPOConfig, SFTConfig
from weft.experiments.common import RunConfig
from weft.launch.plan_run import (
    OptionForecast,
    RunForecast,
    RunOption,
    forecast_run,
    format_options,
    list_run_options,
    select_options,
)
from weft.planner.devices import GIB
from weft.registry import families

TINY = {"model_type": "llama", **families.get("llama").tiny}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("options")
    long = LARGE | {"max_position_embeddings": 16_384}
    for name, values in (("tiny", TINY), ("large", LARGE), ("long", long)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(values))
    return folder


def build(kind: type[Any], folder: Path, model: str = "tiny", **options: Any) -> Any:
    config = kind(experiment_name="e", trial_name="t", recover_mode="disabled", **options)
    for role in ("model", "actor", "critic", "ref"):
        if hasattr(config, role) and role != "ref":
            getattr(config, role).path = str(folder / model)
    config.search.gpu = "H100"
    return config


def list_words(run: RunForecast, config: RunConfig) -> list[str]:
    return [" ".join(option.words) for option in list_run_options(run, config)]


def test_a_run_needs_no_rows_and_no_weights(folder: Path) -> None:
    config = build(SFTConfig, folder, max_steps=7)
    run = forecast_run(config)
    assert run.fits and run.steps == 7 and run.rows == 32 and run.device == "H100"
    assert run.lengths.startswith("rows of ") and list(run.compute_call_peaks()) == ["train"]
    assert sum(run.compute_shares().values()) == pytest.approx(1.0)
    shares = list(run.compute_shares().values())
    assert shares == sorted(shares, reverse=True)


def test_rows_have_usual_lengths_unless_options_set_them(folder: Path) -> None:
    """The model's context is 8,192 tokens."""
    config = build(SFTConfig, folder, "large")
    run = forecast_run(config)
    assert run.lengths == "rows of 512 + 512 tokens" and run.step.num_tokens == 32 * 1024
    config.search.prompt_tokens = 2000
    run = forecast_run(config)
    assert run.lengths == "rows of 2,000 + 512 tokens" and run.step.num_tokens == 32 * 2512
    config = build(SFTConfig, folder, "large")
    config.dataset.max_seqlen = 4096
    assert forecast_run(config).step.num_tokens == 32 * 4096
    grpo = build(GRPOConfig, folder, "large", reward="length")
    run = forecast_run(grpo)
    assert run.lengths == "prompts of 512 tokens and answers of 1,024"
    grpo.search.answer_tokens = 300
    assert forecast_run(grpo).lengths.endswith(" and answers of 300 (at most 1,024)")
    tiny = forecast_run(build(SFTConfig, folder))
    assert tiny.step.num_tokens == 32 * TINY["max_position_embeddings"]


def test_a_prompt_longer_than_half_a_micro_batch(folder: Path) -> None:
    """Rows of 9,100 tokens fit in micro-batches of 16,384."""
    config = build(SFTConfig, folder, "long")
    config.search.prompt_tokens, config.search.answer_tokens = 9000, 100
    run = forecast_run(config)
    assert run.lengths == "rows of 9,000 + 100 tokens" and run.step.num_tokens == 32 * 9100


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (SFTConfig, {"prompt_tokens": 20_000}, "model's context of 16,384 tokens"),
        (SFTConfig, {"answer_tokens": 16_384}, "model's context of 16,384 tokens"),
        (SFTConfig, {"prompt_tokens": 3000, "max_seqlen": 2048}, "dataset.max_seqlen=2048"),
        (SFTConfig, {"prompt_tokens": 300, "max_prompt_len": 100}, "dataset.max_prompt_len=100"),
        (GRPOConfig, {"prompt_tokens": 300, "max_prompt_len": 100}, "dataset.max_prompt_len=100"),
        (GRPOConfig, {"answer_tokens": 5000}, "gen.max_new_tokens=1024"),
    ],
)
def test_lengths_beyond_the_limits_are_refused(
    folder: Path, kind: type[Any], options: dict[str, int], message: str
) -> None:
    more = {"reward": "length"} if kind is GRPOConfig else {}
    config = build(kind, folder, "long", **more)
    for name, value in options.items():
        setattr(config.search if name.endswith("_tokens") else config.dataset, name, value)
    name = next(name for name in options if name.endswith("_tokens"))
    with pytest.raises(ConfigError, match=f"search.{name}={options[name]}: .*{message}"):
        forecast_run(config)


def test_options_of_a_run_with_one_role(folder: Path) -> None:
    config = build(SFTConfig, folder, n_gpus_per_node=2, max_tokens_per_microbatch=1024)
    config.model.layout, config.model.dtype = "d2", "bfloat16"
    config.model.gradient_checkpointing = True
    words = list_words(forecast_run(config), config)
    for expected in (
        "model.optimizer.state_dtype=8bit",
        "model.optimizer.offload=true",
        "model.lora.r=16",
        "model.gradient_checkpointing=false",
        "model.gradient_checkpointing=false model.recompute_every=2",
        "max_tokens_per_microbatch=512",
        "dataset.train_bs_n_seqs=64",
        "model.layout=t2",
        "model.layout=d2f1",
    ):
        assert expected in words, words
    assert "model.layout=d2f2" not in words and len(words) == len(set(words))
    assert not any("offload=true" in each and "optimizer" not in each for each in words)


def test_options_of_a_run_with_several_roles(folder: Path) -> None:
    config = build(PPOConfig, folder, n_gpus_per_node=2, allocation_mode="d2", reward="length")
    config.actor.dtype = config.critic.dtype = "bfloat16"
    config.dataset.max_prompt_len, config.ppo.gen.max_new_tokens = 16, 16
    words = list_words(forecast_run(config), config)
    assert "allocation_mode=search" in words
    offload = next(each for each in words if "offload=true" in each and "optimizer" not in each)
    assert offload == "actor.offload=true critic.offload=true ref.offload=true"
    assert any(each.endswith("actor.lora.r=16 critic.lora.r=16") for each in words)
    assert not any(".layout=" in each for each in words)


def test_float32_is_given_up_first(folder: Path) -> None:
    config = build(SFTConfig, folder)
    config.model.dtype = "float32"
    first, second, *_ = list_words(forecast_run(config), config)
    assert first == "model.dtype=bfloat16" and second.startswith("model.dtype=bfloat16 model.")


def test_more_devices_are_tried_for_one(folder: Path) -> None:
    config = build(SFTConfig, folder, "large")
    words = list_words(forecast_run(config), config)
    assert "model.gradient_checkpointing=true model.layout=d8 n_gpus_per_node=8" in words
    grpo = build(GRPOConfig, folder, "large", reward="length")
    words = list_words(forecast_run(grpo), grpo)
    assert "allocation_mode=search n_gpus_per_node=8" in words


def test_devices_of_unknown_speed_are_refused(folder: Path) -> None:
    config = build(SFTConfig, folder, device="cuda")
    config.search.gpu = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: False)
        with pytest.raises(ConfigError, match="name a GPU"):
            forecast_run(config)


def option(words: str, rate: float, gib: float, *, fits: bool = True) -> OptionForecast:
    return OptionForecast(RunOption((words,)), 1.0, rate, gib * GIB, fits, 1)


def test_options_that_help_are_shown_fastest_first(folder: Path) -> None:
    base = forecast_run(build(SFTConfig, folder))
    base = replace(base, needed=10 * GIB)
    now = base.tokens_per_second
    tried = [
        option("slower", 0.9 * now, 10),
        option("smaller", 0.9 * now, 8),
        option("too-large", 2 * now, 100, fits=False),
        option("faster", 1.5 * now, 12),
        option("same", 1.01 * now, 9.5),
    ]
    names = [each.option.words[0] for each in select_options(base, tried)]
    assert names == ["faster", "smaller"]
    lines = format_options(base, select_options(base, tried))
    assert [line.split()[0] for line in lines] == ["options", "as", "faster", "smaller"]
    assert lines[2].split()[1:] == ["1", f"{1.5 * now:,.0f}", "12.0"]
    assert format_options(base, [option("tiny", now, 0.0123)])[2].split()[3] == "0.012"


def test_options_with_which_a_run_fits_or_else_the_smallest(folder: Path) -> None:
    base = forecast_run(build(SFTConfig, folder))
    base = replace(base, needed=2 * base.usable)
    tried = [option(str(gib), 1.0, gib, fits=gib < 3) for gib in (5, 2, 4, 1, 3)]
    names = [each.option.words[0] for each in select_options(base, tried)]
    assert names == ["1", "2"]
    none = [replace(each, fits=False) for each in tried]
    assert [each.option.words[0] for each in select_options(base, none)] == ["1", "2", "3"]
    layouts = [option(f"model.layout=d{n}", n, 1) for n in range(1, 6)]
    names = [each.option.words[0] for each in select_options(base, layouts)]
    assert names == ["model.layout=d5", "model.layout=d4", "model.layout=d3"]
