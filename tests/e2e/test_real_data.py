"""Short real runs on real data: the commands people type, from a really pretrained model, end to
end.
"""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest

from weft.cli.main import main
from weft.experiments import DPOConfig, GenConfig, GRPOConfig, PPOConfig, RWConfig, SFTConfig
from weft.launch import run
from weft.observe.jsonl import read_rows
from weft.observe.metric_help import find

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stories(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K as a Hugging Face directory."""
    source, target = (
        data_dir / "weights" / "stories260K",
        tmp_path_factory.mktemp("models") / "stories260K",
    )
    words = [
        "convert",
        "llama2c",
        str(source / "stories260K.bin"),
        "--tokenizer",
        str(source / "tok512.bin"),
    ]
    assert main([*words, "--output", str(target)]) == 0
    return target


@pytest.fixture(scope="module")
def pairs(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 400 harmless pairs of hh-rlhf, as they are."""
    target = tmp_path_factory.mktemp("pairs") / "hh.jsonl"
    with gzip.open(data_dir / "hh_rlhf" / "harmless-base_test.jsonl.gz", "rt") as lines:
        target.write_text("".join(line for line, _ in zip(lines, range(400), strict=False)))
    return target


@pytest.fixture(scope="module")
def prompts(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dialogues of those pairs up to the last answer."""
    target = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    mark = "\n\nAssistant:"
    rows = [json.loads(line)["chosen"] for line in pairs.read_text().splitlines()]
    target.write_text(
        "".join(json.dumps({"prompt": r[: r.rindex(mark) + len(mark)]}) + "\n" for r in rows)
    )
    return target


def options(tmp_path: Path, trial: str, **more: Any) -> dict[str, Any]:
    return {
        "experiment_name": "real",
        "trial_name": trial,
        "fileroot": str(tmp_path),
        "progress": False,
        **more,
    }


def mean(lines: list[dict[str, Any]], key: str) -> float:
    values = [line[key] for line in lines if key in line]
    assert values, f"no line holds {key}; a line holds {sorted(lines[-1])}"
    return sum(values) / len(values)


def test_sft_on_two_sources(data_dir: Path, stories: Path, tmp_path: Path) -> None:
    config = SFTConfig(**options(tmp_path, "sft", max_steps=40, total_train_epochs=2))
    config.model.path, config.model.optimizer.lr = str(stories), 1e-3
    config.dataset.sources = [
        {
            "path": str(data_dir / "dolly_sample" / "dolly_151_prompted.jsonl"),
            "type": "prompt_answer",
        },
        {
            "path": str(data_dir / "t0_p3_sample" / "t0_p3_sample.jsonl"),
            "type": "prompt_answer",
            "fraction": 0.2,
        },
    ]
    config.dataset.max_seqlen, config.dataset.train_bs_n_seqs = 256, 16
    result = run(config)
    lines = result.metrics
    assert len(lines) == 40 and all(map(find, lines[-1]))
    shown = [row for row in read_rows(result.directory / "samples.jsonl") if row["step"] == 40]
    assert shown and all(
        row["loss"] > 0 and len(row["tokens"]) == len(row["logprobs"]) for row in shown
    )
    assert mean(lines[-8:], "train/loss") < 0.95 * mean(lines[:4], "train/loss")


@pytest.mark.exhaustive
def test_reward_model_then_ppo(stories: Path, pairs: Path, prompts: Path, tmp_path: Path) -> None:
    config = RWConfig(**options(tmp_path, "rw", total_train_epochs=2))
    config.model.path, config.model.optimizer.lr = str(stories), 1e-3
    config.dataset.train_path, config.dataset.type = str(pairs), "preference"
    config.dataset.max_seqlen, config.dataset.train_bs_n_seqs = 384, 32
    judged = run(config)
    assert mean(judged.metrics[-6:], "train/accuracy") > 0.55 and all(map(find, judged.metrics[-1]))
    pairs_shown = [row for row in read_rows(judged.directory / "samples.jsonl") if row["step"] == 1]
    assert [row["rank"] for row in pairs_shown[:2]] == [0, 1] and all(
        "score" in row for row in pairs_shown
    )
    reward = str(judged.checkpoint("model"))

    learn = PPOConfig(**options(tmp_path, "ppo", max_steps=15))
    learn.actor.path = learn.ref.path = str(stories)
    learn.critic.path = learn.rew.path = reward
    learn.actor.optimizer.lr, learn.critic.optimizer.lr = 5e-4, 1e-3
    learn.dataset.path, learn.dataset.train_bs_n_seqs, learn.dataset.max_prompt_len = (
        str(prompts),
        32,
        128,
    )
    learn.dataset.overlong = "truncate"
    learn.ppo.gen.max_new_tokens, learn.ppo.ppo_n_minibatches = 24, 2
    lines = run(learn).metrics
    assert all(map(find, lines[-1]))
    assert mean(lines[-4:], "rew_inf/reward") > mean(lines[:4], "rew_inf/reward")
    assert abs(mean(lines[-4:], "actor_train/kl")) < 2.0
    assert mean(lines, "actor_train/sampler_logprob_diff") < 1e-3


def test_dpo_on_pairs(stories: Path, pairs: Path, tmp_path: Path) -> None:
    config = DPOConfig(**options(tmp_path, "dpo", max_steps=12))
    config.actor.path = config.ref.path = str(stories)
    config.actor.optimizer.lr = 1e-4
    config.dataset.train_path, config.dataset.type = str(pairs), "preference"
    config.dataset.max_seqlen, config.dataset.train_bs_n_seqs = 384, 16
    result = run(config)
    lines = result.metrics
    assert all(map(find, lines[-1]))
    assert all(
        "log_ratio" in row and "rank" in row
        for row in read_rows(result.directory / "samples.jsonl")
    )
    # log 2: the actor still is its reference. Each of 384 tokens' log-probs rounds by 2^-24 times
    # logits of up to 32 in both models and both completions; beta / 2 = 0.05 is the loss's slope.
    bound = 4 * 384 * 32 * 2.0**-24 * 0.05
    assert lines[0]["actor_train/loss"] == pytest.approx(math.log(2.0), abs=bound)
    assert mean(lines[-4:], "actor_train/rewards/margins") > 0.0
    assert mean(lines[-4:], "actor_train/loss") < 0.6931


def test_grpo_on_gsm8k_prompts(data_dir: Path, stories: Path, tmp_path: Path) -> None:
    rows = (data_dir / "gsm8k" / "train.jsonl").read_text().splitlines()[:32]
    source = tmp_path / "gsm8k.jsonl"
    parsed = [json.loads(row) for row in rows]
    source.write_text(
        "".join(json.dumps({"prompt": r["question"], "answer": r["answer"]}) + "\n" for r in parsed)
    )
    config = GRPOConfig(**options(tmp_path, "grpo", max_steps=3, reward="gsm8k"))
    config.actor.path = config.ref.path = str(stories)
    config.dataset.path, config.dataset.train_bs_n_seqs, config.dataset.max_prompt_len = (
        str(source),
        4,
        256,
    )
    config.grpo.group_size, config.grpo.gen.max_new_tokens = 4, 16
    result = run(config)
    lines = result.metrics
    assert len(lines) == 3 and all(map(find, lines[-1]))
    first = [row for row in read_rows(result.directory / "samples.jsonl") if row["step"] == 1]
    assert [row["k"] for row in first] == [0, 1, 2, 3] * 3, "whole groups of three prompts"
    assert all("advantage" in row and row["answer"] for row in first)
    assert all(0.0 <= line["reward/reward"] <= 1.0 for line in lines)


def test_gen_writes_the_golden_text(stories: Path, tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text(json.dumps({"prompt": "Once upon a time"}) + "\n")
    config = GenConfig(**options(tmp_path, "gen"))
    config.model.path, config.dataset.path, config.dataset.train_bs_n_seqs = (
        str(stories),
        str(source),
        1,
    )
    config.gen.greedy, config.gen.max_new_tokens = True, 60
    row = json.loads((run(config).directory / "generations.jsonl").read_text())
    assert row["completion"].startswith(
        ", there was a little girl named Lily. She loved to play outside in the park. One day, "
        "she saw a big, red ball."
    )
