"""Alternative spellings of options: each is translated to weft's option, with one note."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.cli import overrides
from weft.cli.quickstart import apply_overrides, parse_command_line
from weft.errors import ConfigError
from weft.experiments import DPOConfig, GenConfig, GRPOConfig, PPOConfig, SFTConfig
from weft.experiments.common import RunConfig


def made(base: RunConfig, *words: str) -> tuple[Any, list[str]]:
    return apply_overrides(base, overrides.parse(parse_command_line(["x", *words]).assignments))


def value(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize(
    ("base", "word", "name", "expected"),
    [
        (SFTConfig, "learning_rate=1e-5", "model.optimizer.lr", 1e-5),
        (SFTConfig, "num_train_epochs=3", "total_train_epochs", 3),
        (SFTConfig, "model_name_or_path=a/b", "model.path", "a/b"),
        (SFTConfig, "max_length=99", "dataset.max_seqlen", 99),
        (SFTConfig, "warmup_steps=50", "model.optimizer.warmup_steps", 50),
        (SFTConfig, "warmup_steps=0.1", "model.optimizer.warmup_steps_proportion", 0.1),
        (SFTConfig, "per_device_train_batch_size=8", "dataset.train_bs_n_seqs", 8),
        (SFTConfig, "save_freq=7", "save_freq_steps", 7),
        (SFTConfig, "eval_freq=7", "eval_freq_epochs", 7),
        (SFTConfig, "sequence_parallel=false", "model.sequence_parallel", False),
        (SFTConfig, "optimizer.lr=3", "model.optimizer.lr", 3.0),
        (SFTConfig, "optimizer={beta1: 0.5}", "model.optimizer.beta1", 0.5),
        (SFTConfig, "--resume_from_checkpoint", "recover_mode", "resume"),
        (SFTConfig, "resume_from_checkpoint=true", "recover_mode", "resume"),
        (
            SFTConfig,
            "--resume_from_checkpoint=runs/a/recover/step3",
            "resume_from",
            "runs/a/recover/step3",
        ),
        (SFTConfig, "--learning_rate=1e-5", "model.optimizer.lr", 1e-5),
        (DPOConfig, "beta=0.3", "dpo.beta", 0.3),
        (DPOConfig, "loss_type=ipo", "dpo.loss_type", "ipo"),
        (DPOConfig, "optimizer.lr=3", "actor.optimizer.lr", 3.0),
        (PPOConfig, "ppo.max_new_tokens=9", "ppo.gen.max_new_tokens", 9),
        (PPOConfig, "ppo.top_p=0.9", "ppo.gen.top_p", 0.9),
        (PPOConfig, "ppo.top_k=40", "ppo.gen.top_k", 40),
        (PPOConfig, "ppo.greedy=true", "ppo.gen.greedy", True),
        (PPOConfig, "top_k=40", "ppo.gen.top_k", 40),
        (PPOConfig, "rollouts_per_prompt=4", "ppo.samples_per_prompt", 4),
        (PPOConfig, "ppo.rollouts_per_prompt=4", "ppo.samples_per_prompt", 4),
        (PPOConfig, "model_name_or_path=x", "actor.path", "x"),
        (GRPOConfig, "num_generations=4", "grpo.group_size", 4),
        (GRPOConfig, "rollouts_per_prompt=4", "grpo.group_size", 4),
        (GRPOConfig, "grpo.temperature=0.5", "grpo.gen.temperature", 0.5),
        (GenConfig, "temperature=0.5", "gen.temperature", 0.5),
    ],
)
def test_each_spelling_has_one_meaning_and_a_note(
    base: type[RunConfig], word: str, name: str, expected: Any
) -> None:
    config, notes = made(base(), word)
    assert value(config, name) == expected
    assert len(notes) == 1 and " is read as " in notes[0]


def test_batch_size_accumulation_and_ranks_multiply() -> None:
    config, notes = made(
        SFTConfig(), "gradient_accumulation_steps=4", "per_device_train_batch_size=8"
    )
    assert config.dataset.train_bs_n_seqs == 32
    assert len(notes) == 1
    for layout in (
        "allocation_mode=d4t2",
        "model.layout=d4",
        "model.parallel.data_parallel_size=4",
    ):
        config, _ = made(SFTConfig(), "per_device_train_batch_size=8", layout)
        assert config.dataset.train_bs_n_seqs == 32


def test_the_ranks_of_a_plan_file_count(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("weft_plan: 1\ncalls:\n  train: {layout: d4t2, devices: 0-7}\n")
    words = ("per_device_train_batch_size=8", f"allocation_mode={plan}")
    config, _ = made(SFTConfig(), *words)
    assert config.dataset.train_bs_n_seqs == 32


@pytest.mark.parametrize(
    ("base", "layouts"),
    [
        (SFTConfig, ["train.layout=d2t2"]),
        (SFTConfig, ["model.layout=d4", "train.layout=d2"]),
        (
            PPOConfig,
            [
                "actor.layout=d4",
                "actor_train.layout=d2",
                "actor_gen.layout=d8",
                "critic_train.layout=d8",
            ],
        ),
    ],
)
def test_batch_size_counts_the_ranks_of_the_call_that_trains(
    base: type[RunConfig], layouts: list[str]
) -> None:
    config, _ = made(base(), "per_device_train_batch_size=8", *layouts)
    assert value(config, "dataset.train_bs_n_seqs") == 16


def test_a_rate_reaches_every_trained_role() -> None:
    config, _ = made(PPOConfig(), "learning_rate=0.5")
    assert (config.actor.optimizer.lr, config.critic.optimizer.lr) == (0.5, 0.5)


def test_a_resume_flag_takes_the_next_word_only_if_it_is_a_path() -> None:
    assert parse_command_line(["sft", "--resume_from_checkpoint", "a=1"]).assignments == [
        "resume_from_checkpoint=true",
        "a=1",
    ]
    assert parse_command_line(["sft", "--resume_from_checkpoint", "x/y", "a=1"]).assignments == [
        "resume_from_checkpoint=x/y",
        "a=1",
    ]


def test_weft_names_bring_no_note() -> None:
    config, notes = made(SFTConfig(), "model.optimizer.lr=3", "seed=4")
    assert (config.model.optimizer.lr, config.seed, notes) == (3.0, 4, [])


@pytest.mark.parametrize(
    ("base", "words", "message"),
    [
        (SFTConfig, ["learning_rate=1", "model.optimizer.lr=2"], "same option"),
        (SFTConfig, ["gradient_accumulation_steps=4"], "per_device_train_batch_size"),
        (PPOConfig, ["optimizer.lr=1"], "actor.optimizer.lr or critic.optimizer.lr"),
        (GenConfig, ["optimizer.lr=1"], "no role is trained"),
        (SFTConfig, ["temperature=1"], "unknown option 'temperature'"),
        (
            PPOConfig,
            ["advantages.post_hooks=[]"],
            "'advantages' is a host function; only model calls have",
        ),
        (GRPOConfig, ["reward.pre_hooks=[offload]"], "'reward' is a host function"),
        (GRPOConfig, ["advantages={hooks: []}"], "'advantages' is a host function"),
    ],
)
def test_spellings_without_a_translation_are_refused(
    base: type[RunConfig], words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        made(base(), *words)


def test_a_dry_run_takes_its_word_as_the_start_of_a_registered_experiment_does() -> None:
    for words in (["--dry-run=config"], ["--dry-run", "config"]):
        found = parse_command_line(["sft", *words, "a=1"])
        assert (found.name, found.dry_run, found.assignments) == ("sft", "config", ["a=1"])
    assert parse_command_line(["sft", "--dry-run", "a=1"]).dry_run == ""
