"""Pairs from rewards: by hand, against a naive double loop, and through the loss that reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from weft.algorithms.dpo import build_preference_loss
from weft.algorithms.reward import count_pairs
from weft.data.sample import SequenceSample
from weft.engine.rows import PackLayout, SampleRows
from weft.errors import ConfigError, DataError
from weft.host.base import HostContext, make_host_function

Groups = Sequence[Sequence[float]]


def sampled(rewards: Groups, finished: Groups | None = None, tokens: int = 2) -> SequenceSample:
    """Return ids p0, p1, ... with one completion of `tokens` tokens for each reward.

    All completions have ended unless `finished` specifies otherwise.
    """
    counts = [len(group) for group in rewards]
    ended = finished or [[1.0] * n for n in counts]
    lengths = {key: [[1] * n for n in counts] for key in ("rewards", "finished")}
    flat = {
        key: [x for group in groups for x in group]
        for key, groups in (("rewards", rewards), ("finished", ended))
    }
    data = {key: torch.tensor(values, dtype=torch.float32) for key, values in flat.items()}
    data["completion"] = torch.zeros(tokens * sum(counts), dtype=torch.int64)
    data["prompt"] = torch.zeros(len(counts), dtype=torch.int64)
    lengths |= {"completion": [[tokens] * n for n in counts], "prompt": [[1]] * len(counts)}
    return SequenceSample.from_groups([f"p{n}" for n in range(len(counts))], lengths, data)


def preferences(batch: SequenceSample, **args: Any) -> tuple[SequenceSample, dict[str, float]]:
    context = HostContext()
    made = make_host_function("preferences_by_reward", args)(batch, context)
    assert made is not None and made.ids == batch.ids
    return made, context.metrics


def rows(batch: SequenceSample) -> SampleRows:
    return SampleRows(batch, PackLayout.from_sample(batch), torch.device("cpu"), torch.float64)


def pairs(batch: SequenceSample, **args: Any) -> list[tuple[int, int]]:
    """Return the pairs (better, worse) that the loss and `count_pairs` see."""
    made, _ = preferences(batch, **args)
    whole = batch.update(made)
    better, worse = rows(whole).pairs()
    assert (
        np.bincount(whole.group_of("rank")[better.numpy()], minlength=whole.num_ids).tolist()
        == count_pairs(whole).tolist()
    )
    return list(zip(better.tolist(), worse.tolist(), strict=True))


# -- two completions


def test_of_two_completions_the_one_with_more_reward_is_better() -> None:
    batch = sampled([[0.0, 1.0], [3.0, -1.0], [0.5, 0.5]])
    made, metrics = preferences(batch)
    assert made.data["rank"].tolist() == [1, 0, 0, 1, 0, 0]
    assert made.data["comparison"].tolist() == [0] * 6
    assert made.lengths["rank"].tolist() == made.lengths["comparison"].tolist() == [1] * 6
    assert made.group_of("rank").tolist() == [0, 0, 1, 1, 2, 2]
    assert pairs(batch) == [(1, 0), (2, 3)]
    assert metrics == pytest.approx(
        {"reward": 4.0 / 6, "tied_fraction": 1 / 3, "reward_margin": (1 + 4) / 2}
    )


def test_with_two_completions_both_ways_are_the_same_and_pick_what_trl_picks() -> None:
    """TRL: `mask = first >= second`; the first is chosen where it holds.

    Random rewards are not equal.
    """
    rewards = np.random.default_rng(0).normal(size=(20, 2))
    chosen = np.where(rewards[:, 0] >= rewards[:, 1], 0, 1)
    expected = [(2 * n + c, 2 * n + 1 - c) for n, c in enumerate(chosen.tolist())]
    for way in ("best_worst", "all"):
        assert sorted(pairs(sampled(rewards.tolist()), pairs=way)) == expected


# -- several completions


def test_the_best_of_four_against_the_worst() -> None:
    batch = sampled([[1.0, 3.0, 0.0, 2.0], [5.0, 4.0, 9.0, 7.0]])
    made, metrics = preferences(batch)
    assert made.data["rank"].tolist() == [0, 0, 1, 0, 0, 1, 0, 0]
    # those in no pair are alone in theirs
    assert made.data["comparison"].tolist() == [1, 0, 0, 4, 1, 0, 0, 4]
    assert pairs(batch) == [(1, 2), (6, 5)]
    assert metrics == pytest.approx(
        {"reward": 31 / 8, "tied_fraction": 0.0, "reward_margin": (3 + 5) / 2}
    )


def test_of_several_best_the_first_and_of_several_worst_the_last() -> None:
    assert pairs(sampled([[2.0, 2.0, 1.0, 1.0]])) == [(0, 3)]
    assert pairs(sampled([[1.0, 2.0, 1.0, 2.0]])) == [(1, 2)]


def test_all_pairs_of_four_are_a_ranking_in_which_equal_rewards_are_no_pair() -> None:
    batch = sampled([[1.0, 3.0, 1.0, 2.0]])
    made, metrics = preferences(batch, pairs="all")
    assert made.data["rank"].tolist() == [2, 0, 2, 1]
    assert made.data["comparison"].tolist() == [0, 0, 0, 0]
    assert pairs(batch, pairs="all") == [(1, 0), (1, 2), (1, 3), (3, 0), (3, 2)]
    # One of six is tied; the others differ by 2, 2, 1, 1, 1.
    assert metrics == pytest.approx(
        {"reward": 7 / 4, "tied_fraction": 1 / 6, "reward_margin": 7 / 5}
    )


@pytest.mark.parametrize("way", ["best_worst", "all"])
def test_equal_rewards_make_no_pair_at_all(way: str) -> None:
    batch = sampled([[1.0, 1.0, 1.0], [0.0, 0.0]])
    made, metrics = preferences(batch, pairs=way)
    assert made.data["rank"].tolist() == [0] * 5
    assert pairs(batch, pairs=way) == []
    assert metrics == pytest.approx({"reward": 3 / 5, "tied_fraction": 1.0})


@pytest.mark.parametrize("way", ["best_worst", "all"])
def test_pairs_are_those_of_a_naive_double_loop(way: str) -> None:
    random = np.random.default_rng(1)
    groups = [
        random.integers(0, 4, size=n).astype(float).tolist() for n in random.integers(2, 7, size=40)
    ]
    expected, start = [], 0
    for group in groups:
        if way == "all":
            expected += [
                (start + i, start + j)
                for i, a in enumerate(group)
                for j, b in enumerate(group)
                if a > b
            ]
        elif max(group) > min(group):
            last = max(k for k, reward in enumerate(group) if reward == min(group))
            expected.append((start + group.index(max(group)), start + last))
        start += len(group)
    assert pairs(sampled(groups), pairs=way) == expected


# -- shaping


def test_what_was_cut_by_its_length_is_penalised_before_the_comparison() -> None:
    batch = sampled([[1.0, 0.5], [1.0, 1.0]], finished=[[0.0, 1.0], [1.0, 0.0]])
    assert pairs(batch) == [(0, 1)]
    assert pairs(batch, missing_eos_penalty=0.75) == [(1, 0), (2, 3)]
    _, metrics = preferences(batch, missing_eos_penalty=0.75)
    assert metrics == pytest.approx(
        {"reward": 3.5 / 4, "tied_fraction": 0.0, "reward_margin": (0.25 + 0.75) / 2}
    )


def test_scale_and_bias_come_before_the_penalty_and_the_clip_makes_ties() -> None:
    batch = sampled([[10.0, 4.0]], finished=[[0.0, 1.0]])
    # (10 - 2) / 4 - 1 = 1 against (4 - 2) / 4 = 0.5.
    shape = {"reward_output_bias": 2.0, "reward_output_scaling": 0.25, "missing_eos_penalty": 1.0}
    made, metrics = preferences(batch, **shape)
    assert made.data["rank"].tolist() == [0, 1]
    assert metrics == pytest.approx({"reward": 7.0, "tied_fraction": 0.0, "reward_margin": 0.5})
    _, metrics = preferences(sampled([[10.0, 4.0, 1.0]]), max_reward_clip=3.0, pairs="all")
    assert metrics == pytest.approx(
        {
            "reward": 5.0,
            "tied_fraction": 1 / 3,
            "reward_margin": 2.0,
            "reward_clipped_fraction": 2 / 3,
        }
    )


# -- what the loss makes of it


def test_the_loss_by_hand_and_no_gradient_for_completions_in_no_pair() -> None:
    batch = sampled([[1.0, 3.0, 0.0], [2.0, 2.0, 2.0]], tokens=2)
    made, _ = preferences(batch)
    reference = torch.tensor(
        [-1.0, -1.0, -2.0, -2.0, -1.0, -3.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0],
        dtype=torch.float64,
    )
    shape = {"ref_logprobs": [[2] * 3] * 2}
    whole = batch.update(made).update(
        SequenceSample.from_groups(batch.ids, shape, {"ref_logprobs": reference})
    )
    logprobs = reference + torch.tensor(
        [0.0, 0.0, 0.5, 1.0, -0.25, -0.25, 7.0, 7.0, 0.0, 0.0, 0.0, 0.0]
    )
    logprobs.requires_grad_()
    loss = build_preference_loss("sigmoid", beta=0.1)
    value, stats = loss({"logprobs": logprobs}, rows(whole), loss.denominators(whole))
    value.backward()
    # Better: 0.5 + 1 above the reference; worse: 0.5 below it. One pair; the second prompt has
    # none.
    margin = 0.1 * (1.5 + 0.5)
    assert loss.denominators(whole) == {"pairs": 1.0}
    assert value.item() == pytest.approx(math.log1p(math.exp(-margin)), rel=1e-12)
    slope = 0.1 / (1.0 + math.exp(margin))
    expected = [0.0, 0.0, -slope, -slope, slope, slope, *[0.0] * 6]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-12, abs=0.0)
    assert float(stats["rewards/margins"].value) == pytest.approx(margin, rel=1e-12)


# -- refusals


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ConfigError, match="samples_per_prompt to 2 or more"):
        preferences(sampled([[1.0, 0.0], [1.0]]))
    for wrong in (math.nan, math.inf):
        with pytest.raises(DataError, match=f"p1: a completion's reward is {wrong}"):
            preferences(sampled([[1.0, 0.0], [0.0, wrong]]))
    with pytest.raises(
        ConfigError, match="unknown way to make pairs 'best_wrost'; did you mean best_worst"
    ):
        preferences(sampled([[1.0, 0.0]]), pairs="best_wrost")
    with pytest.raises(ConfigError, match="has no argument 'penalty'"):
        preferences(sampled([[1.0, 0.0]]), penalty=1.0)
