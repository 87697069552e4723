"""Every metric that runs write has a unit, a description and a healthy range."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

import weft
from weft.observe.metric_help import HELP, find, render_markdown

# What runs of sft, rw, dpo, ppo and grpo write; tests of whole runs compare theirs with the same
# table.
WRITTEN = """
step epoch step_seconds peak_memory_gb time/train train/accuracy train/grad_norm train/kendalltau train/learning_rate
train/loss train/margin train/mfu train/nll train/num_tokens train/perplexity train/score train/tokens_per_second
eval/loss eval/dolly/nll eval/dolly/accuracy eval/perplexity actor_train/rewards/chosen actor_train/rewards/rejected
actor_train/rewards/margins actor_train/rewards/accuracies actor_train/logps/chosen actor_train/logps/rejected
eval/pairs/rewards/margins actor_gen/response_length actor_gen/response_length_max actor_gen/tokens_per_second
actor_gen/truncated_fraction actor_train/approx_kl actor_train/clip_ratio actor_train/entropy
actor_train/importance_ratio actor_train/importance_ratio_max actor_train/kl actor_train/policy_loss
actor_train/sampler_logprob_diff actor_train/sampler_logprob_diff_max advantages/advantage_std advantages/kl_coef
advantages/kl_k1 advantages/kl_k1_per_completion advantages/return advantages/reward advantages/reward_after_kl
advantages/reward_clipped_fraction advantages/truncated_fraction critic_inf/values critic_train/explained_variance
critic_train/return critic_train/value critic_train/value_clip_ratio critic_train/value_loss
reward/frac_reward_zero_std reward/reward reward/reward/lively reward/reward_std reward/timeouts actor_train/staleness
actor_train/staleness_max actor_gen/interruptions_max actor_train/skipped_updates actor_train/num_bytes_moved
rew_inf/cached_fraction filter/rounds/actor_gen
"""


def find_undescribed(names: Iterable[str]) -> list[str]:
    return [name for name in names if find(name) is None]


def test_every_metric_that_runs_write_is_described() -> None:
    assert find_undescribed(WRITTEN.split()) == []
    assert find_undescribed(["train/loss", "mine/strange"]) == ["mine/strange"]


def test_every_metric_that_the_sources_name_is_described() -> None:
    src = Path(weft.__file__).parent
    texts = [
        p.read_text()
        for folder in ("host", "interfaces", "algorithms")
        for p in sorted((src / folder).rglob("*.py"))
    ]
    recorded = {name for text in texts for name in re.findall(r'\.record\("([^"]+)"', text)}
    counted = {
        name
        for text in texts
        for name in re.findall(r'"([\w/]+)": (?:Sum|Max|Min|masked_mean)\(', text)
    }
    inner = {"return_square", "error_square"}  # of which summaries are made
    assert len(recorded | counted) > 40
    assert find_undescribed(f"node/{name}" for name in recorded | counted - inner) == []


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("actor_train/loss", "loss"),
        ("eval/source/loss", "loss"),
        ("actor_train/importance_ratio_max", "importance_ratio"),
        ("reward/reward/lively", "reward/*"),
        ("time/actor_gen", "time/*"),
        ("train/rewards/accuracies", "rewards/accuracies"),
        ("eval/pairs/rewards/margins", "rewards/margins"),
        ("advantages/kl_k3_per_completion", "kl_k?_per_completion"),
    ],
)
def test_the_right_help_is_found(name: str, pattern: str) -> None:
    found = find(name)
    assert found is not None and found.pattern == pattern


def test_patterns_are_unique_and_descriptions_are_sentences() -> None:
    assert len({one.pattern for one in HELP}) == len(HELP)
    for one in HELP:
        assert re.fullmatch(r"[A-Z0-9(-].*[.]|exp\(.*[.]", one.what), one
        assert one.healthy == "" or one.healthy.endswith("."), one
        assert "|" not in one.what + one.healthy


def test_the_table_as_markdown() -> None:
    text = render_markdown()
    assert "## Rewards" in text and "| `reward` |" in text
    assert text.count("\n| `") == len(HELP)
