"""Spellings of other programs, each mapped once with a note."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli.test_aliases import made, value
from tests.cli.test_help import page
from weft.cli.aliases import map_spellings
from weft.cli.main import main
from weft.errors import ConfigError
from weft.experiments import GRPOConfig, OnlineDPOConfig, PPOConfig, SFTConfig
from weft.experiments.common import RunConfig


@pytest.mark.parametrize(
    ("base", "word", "name", "expected"),
    [
        (SFTConfig, "warmup_ratio=0.1", "model.optimizer.warmup_steps_proportion", 0.1),
        (SFTConfig, "save_steps=7", "save_freq_steps", 7),
        (SFTConfig, "save_strategy=epoch", "save_freq_epochs", 1),
        (SFTConfig, "eval_strategy=steps", "eval_freq_steps", 500),
        (SFTConfig, "eval_on_start=true", "eval_at_start", True),
        (SFTConfig, "metric_for_best_model=loss", "save_best", "eval/loss"),
        (SFTConfig, "metric_for_best_model=eval_reward", "save_best", "eval/reward"),
        (SFTConfig, "greater_is_better=false", "save_best_mode", "min"),
        (SFTConfig, "bf16=true", "model.dtype", "bfloat16"),
        (SFTConfig, "use_peft=true", "model.lora.r", 16),
        (SFTConfig, "lora_alpha=32", "model.lora.alpha", 32.0),
        (SFTConfig, "use_sequence_parallel=false", "model.sequence_parallel", False),
        (SFTConfig, "report_to=tensorboard", "logger.tensorboard", True),
        (SFTConfig, "use_cpu=true", "device", "cpu"),
        (GRPOConfig, "max_completion_length=9", "grpo.gen.max_new_tokens", 9),
        (OnlineDPOConfig, "max_completion_length=9", "online_dpo.gen.max_new_tokens", 9),
        (
            PPOConfig,
            "critic.parallel.use_sequence_parallel=false",
            "critic.sequence_parallel",
            False,
        ),
    ],
)
def test_each_spelling_has_one_meaning_and_a_note(
    base: type[RunConfig], word: str, name: str, expected: Any
) -> None:
    config, notes = made(base(), word)
    assert value(config, name) == expected
    assert len(notes) == 1 and " is read as " in notes[0]


@pytest.mark.parametrize(
    ("base", "words", "message"),
    [
        (SFTConfig, ["save_strategy=sometimes"], "no, steps or epoch"),
        (SFTConfig, ["report_to=paper"], "tensorboard, wandb or trackio"),
        (SFTConfig, ["bf16=maybe"], "true or false"),
    ],
)
def test_what_cannot_be_mapped_is_refused(
    base: type[RunConfig], words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        made(base(), *words)


def test_other_spellings_stand_beside_the_options() -> None:
    assert "also: learning_rate" in " ".join(page("sft").split())
    spelled = map_spellings(PPOConfig())
    assert spelled["actor.optimizer.lr"] == spelled["critic.optimizer.lr"] == ["learning_rate"]
    assert (
        "kl_coef" in spelled["ppo.kl_ctl"]
        and "max_completion_length" in spelled["ppo.gen.max_new_tokens"]
    )
    assert "dataset.valid_bs_n_seqs" in spelled and "dataset.max_prompt_len" in spelled


def test_a_mistyped_option_is_led_to_those_of_other_programs_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["quickstart", "sft", "per_device_train_batchsize=3"]) == 2
    assert "did you mean per_device_train_batch_size or" in capsys.readouterr().err
