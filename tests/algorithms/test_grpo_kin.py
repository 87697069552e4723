"""The kin of GRPO: other surrogates, corrections of the sampler, entropy control, advantages: by
hand, naively, against TRL.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import gradients, make_sample
from test_ppo_and_grpo import policy_sample, trl_grpo

from weft.algorithms.advantages import (
    compute_decoupled_advantages,
    compute_informative_factor,
    compute_pass_at_k,
    compute_pass_at_k_advantages,
    compute_step_advantages,
    subtract_baseline,
)
from weft.algorithms.grpo import GRPOLoss
from weft.algorithms.kl import K3_BOUND, estimate_kl
from weft.algorithms.ppo import (
    PPOActorLoss,
    compute_covariances,
    compute_sampler_weights,
    select_clip_cov_rows,
    select_kl_cov_rows,
)
from weft.errors import ConfigError, UserError

# -- surrogates


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_cispo_equals_trl(level: str) -> None:
    # TRL's epsilon_high is the bound itself, weft's the distance from 1.
    loss, gradient, _ = trl_grpo(
        loss_type="cispo", importance_sampling_level=level, epsilon_high=1.2
    )
    sample, out = policy_sample()
    ours = GRPOLoss(surrogate="cispo", importance_level=level, eps_clip_high=0.2)
    value, _, found = gradients(ours, sample, out)
    assert value == pytest.approx(loss)
    np.testing.assert_allclose(found["logprobs"], gradient, atol=1e-15)


def test_sapo_equals_trl() -> None:
    settings = {"sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.0}
    loss, gradient, _ = trl_grpo(loss_type="sapo", arguments=settings)
    sample, out = policy_sample()
    ours = GRPOLoss(surrogate="sapo", loss_type="grpo", sapo_positive=1.5, sapo_negative=2.0)
    value, _, found = gradients(ours, sample, out)
    assert value == pytest.approx(loss)
    np.testing.assert_allclose(found["logprobs"], gradient, atol=1e-15)


def test_cispo_and_sapo_by_hand() -> None:
    # Log-ratios 2 and 0. CISPO: weights min(e^2, 3) = 3 and 1, loss -(3 * 2 * -1 + 1 * -1 * -2) /
    # 2, gradient -w A / 2.
    keys = {"logprobs": [-3.0, -2.0], "advantages": [2.0, -1.0]}
    sample, out = make_sample([[2]], keys), {"logprobs": [-1.0, -2.0], "entropy": [0.0, 0.0]}
    value, stats, found = gradients(GRPOLoss(surrogate="cispo", eps_clip_high=2.0), sample, out)
    assert value == pytest.approx(-(3 * 2 * -1 + 1 * -1 * -2) / 2)
    assert found["logprobs"].tolist() == pytest.approx([-3.0, 0.5])
    assert stats["clip_ratio"] == 0.5
    # SAPO: gate 4 / t sigmoid(t (w - 1)); at w = 1 its value is 2 / t and its slope 1, so the
    # gradient is that of w A.
    value, _, found = gradients(
        GRPOLoss(surrogate="sapo", sapo_positive=1.0, sapo_negative=2.0), sample, out
    )
    gate = 4 / (1 + math.exp(-(math.exp(2) - 1)))
    assert value == pytest.approx(-(gate * 2 + 1.0 * -1) / 2)
    assert found["logprobs"][1] == pytest.approx(0.5)


def test_ranges_where_none_are_given() -> None:
    clip = GRPOLoss(importance_level="sequence").clip
    assert (clip.low, clip.upper) == (3e-4, 1 + 4e-4)
    assert (GRPOLoss().clip.low, GRPOLoss().clip.upper) == (0.2, 1.2)
    assert GRPOLoss(importance_level="sequence", eps_clip=0.1).clip.upper == 1.1, (
        "one that is given holds on both sides"
    )
    assert (GRPOLoss(surrogate="cispo").clip.low, GRPOLoss(surrogate="cispo").clip.upper) == (
        1.0,
        5.0,
    )
    with pytest.raises(ConfigError, match="sapo_negative"):
        GRPOLoss(surrogate="sapo", sapo_negative=0.0)
    with pytest.raises(UserError, match=r"covariance control 'klip'"):
        GRPOLoss(covariance="klip")


@pytest.mark.parametrize("make", [PPOActorLoss, GRPOLoss])
def test_weights_and_old_logprobs_by_hand(make: type) -> None:
    # Sampled at -1, -1; the trainer says -1.5, -1; now -1.5, -1.2. Ratios 1 and e^-0.2, weights 0.5
    # and 1.
    keys = {
        "logprobs": [-1.0, -1.0],
        "old_logprobs": [-1.5, -1.0],
        "sampler_weights": [0.5, 1.0],
        "advantages": [2.0, 2.0],
    }
    sample, out = make_sample([[2]], keys), {"logprobs": [-1.5, -1.2], "entropy": [0.0, 0.0]}
    value, stats, found = gradients(make(), sample, out)
    assert value == pytest.approx(-(0.5 * 2 + math.exp(-0.2) * 2) / 2)
    assert found["logprobs"].tolist() == pytest.approx([-0.5, -math.exp(-0.2)])
    assert stats["importance_ratio_max"] == pytest.approx(1.0)
    assert stats["sampler_logprob_diff_max"] == pytest.approx(0.5), "to what was sampled"


@pytest.mark.parametrize("make", [PPOActorLoss, GRPOLoss])
def test_tokens_of_high_covariance_by_hand(make: type) -> None:
    keys = {"logprobs": [-1.0, -1.0], "high_covariance": [1.0, 0.0], "advantages": [2.0, 2.0]}
    sample, out = make_sample([[2]], keys), {"logprobs": [-0.9, -1.0], "entropy": [0.0, 0.0]}
    value, _, found = gradients(make(covariance="clip"), sample, out)
    assert value == pytest.approx(-1.0) and found["logprobs"].tolist() == pytest.approx([0.0, -1.0])
    value, _, found = gradients(make(covariance="kl", kl_cov_coef=3.0), sample, out)
    ratio = math.exp(0.1)
    assert value == pytest.approx((-2 * ratio + 3 * 0.1 - 2) / 2)
    assert found["logprobs"].tolist() == pytest.approx([(-2 * ratio + 3) / 2, -1.0])
    value, _, _ = gradients(make(), sample, out)
    assert value == pytest.approx((-2 * ratio - 2) / 2)


# -- corrections of the sampler

TRAINER, SAMPLER = np.array([-1.0, -1.0, -2.0, -3.0]), np.array([-2.0, -1.5, -1.0, -3.0])
LENGTHS, ONES = np.array([2, 2]), np.ones(4)


def test_sampler_weights_by_hand() -> None:
    ratios = np.exp([1.0, 0.5, -1.0, 0.0])
    weights, ratio = compute_sampler_weights(TRAINER, SAMPLER, ONES, LENGTHS, "token_truncate", 2.0)
    assert weights.tolist() == pytest.approx(
        [2.0, *ratios[1:]]
    ) and ratio.tolist() == pytest.approx(ratios.tolist())
    weights, _ = compute_sampler_weights(TRAINER, SAMPLER, ONES, LENGTHS, "token_mask", 2.0, 0.5)
    assert weights.tolist() == pytest.approx([0.0, ratios[1], 0.0, 1.0])
    weights, _ = compute_sampler_weights(TRAINER, SAMPLER, ONES, LENGTHS, "sequence_truncate", 3.0)
    assert weights.tolist() == pytest.approx([3.0, 3.0, math.exp(-1), math.exp(-1)])
    weights, _ = compute_sampler_weights(TRAINER, SAMPLER, ONES, LENGTHS, "sequence_mask", 3.0)
    assert weights.tolist() == pytest.approx([0.0, 0.0, math.exp(-1), math.exp(-1)])
    masked, _ = compute_sampler_weights(
        TRAINER, SAMPLER, np.array([0.0, 1.0, 1.0, 1.0]), LENGTHS, "sequence_mask", 3.0
    )
    assert masked[1] == pytest.approx(math.exp(0.5)), (
        "tokens that are not trained count in no product"
    )
    with pytest.raises(UserError, match="token_mask"):
        compute_sampler_weights(TRAINER, SAMPLER, ONES, LENGTHS, "token_maks", 2.0)


def test_the_decoupled_loss_by_hand() -> None:
    """Of PPO: the ratio that is clipped is now / proximal, its weight min(proximal / behaviour, 2);
    two tokens of probability 1/4 and 1/2 when they were sampled, 3/4 and 1/4 before the update,
    9/10 and 1/4 now.
    """
    behaviour, proximal, now = np.log([0.25, 0.5]), np.log([0.75, 0.25]), np.log([0.9, 0.25])
    weights, before = compute_sampler_weights(
        proximal, behaviour, np.ones(2), np.array([2]), "token_truncate", 2.0
    )
    assert before.tolist() == pytest.approx([3.0, 0.5]) and weights.tolist() == pytest.approx(
        [2.0, 0.5]
    )
    keys = {
        "logprobs": behaviour.tolist(),
        "old_logprobs": proximal.tolist(),
        "sampler_weights": weights.tolist(),
        "advantages": [1.0, -2.0],
    }
    sample, out = make_sample([[2]], keys), {"logprobs": now.tolist(), "entropy": [0.0, 0.0]}
    value, stats, found = gradients(PPOActorLoss(eps_clip=0.1), sample, out)
    assert value == pytest.approx((2.0 * -1.1 + 0.5 * 2.0) / 2), (
        "the first token's ratio of 1.2 is held at 1.1"
    )
    assert found["logprobs"].tolist() == pytest.approx([0.0, 0.5 * 2.0 / 2])
    assert stats["importance_ratio"] == pytest.approx((1.2 + 1.0) / 2)


# -- entropy


def test_tokens_with_the_largest_covariance_by_hand() -> None:
    logprobs, advantages = (
        np.array([-1.0, -3.0, -1.0, -3.0, 9.0]),
        np.array([2.0, -2.0, -2.0, 2.0, 9.0]),
    )
    found = compute_covariances(logprobs, advantages, np.array([1.0, 1.0, 1.0, 1.0, 0.0]))
    assert found.tolist() == pytest.approx([2.0, 2.0, -2.0, -2.0, -math.inf])
    assert select_kl_cov_rows(found, 0.5).tolist() == [True, True, False, False, False]
    assert select_kl_cov_rows(found, 1e-9).sum() == 1, "at least one"
    order = np.array([0.9, 0.1, 0.2, 0.3, 0.0])
    assert select_clip_cov_rows(found, 0.25, 1.0, 5.0, order).tolist() == [
        False,
        True,
        False,
        False,
        False,
    ]
    assert select_clip_cov_rows(found, 1.0, 1.0, 5.0, order).tolist() == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert not select_clip_cov_rows(found, 1.0, 3.0, 5.0, order).any()
    assert not select_kl_cov_rows(np.full(3, -np.inf), 0.5).any(), "nothing is trained"


def test_k3_is_cut_at_ten_nats() -> None:
    live, reference = np.array([-1.0, -30.0]), np.array([-2.0, -1.0])
    assert estimate_kl(live, reference, "k3").tolist() == pytest.approx(
        [math.exp(-1) - 1 + 1, K3_BOUND]
    )


# -- advantages


def test_opo_by_hand() -> None:
    rewards, group, lengths = (
        np.array([1.0, 0.0, 3.0]),
        np.array([0, 0, 0]),
        np.array([1.0, 2.0, 1.0]),
    )
    assert subtract_baseline(rewards, group, "opo", lengths=lengths).tolist() == pytest.approx(
        [0.0, -1.0, 2.0]
    )
    with pytest.raises(ConfigError, match="baseline='opo'"):
        subtract_baseline(np.ones(1), np.zeros(1, int), "opo", lengths=np.ones(1))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=4, max_size=6), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_pass_at_k_is_the_mean_over_all_subsets(groups: list[list[bool]], k: int) -> None:
    passed = np.array([float(p) for g in groups for p in g])
    group = np.repeat(np.arange(len(groups)), [len(g) for g in groups])
    rate, gains = (
        compute_pass_at_k(passed, group, k),
        compute_pass_at_k_advantages(passed, group, k),
    )
    at = 0
    for g in groups:
        subsets = list(itertools.combinations(range(len(g)), k))
        rewards = np.array([float(any(g[i] for i in subset)) for subset in subsets])
        assert rate[at : at + len(g)].tolist() == pytest.approx([rewards.mean()] * len(g))
        for i in range(len(g)):
            own = np.array(
                [reward for reward, subset in zip(rewards, subsets, strict=True) if i in subset]
            )
            expected = 0.0 if rewards.std() == 0 else (own.mean() - rewards.mean()) / rewards.std()
            assert gains[at + i] == pytest.approx(expected, abs=1e-9)
        at += len(g)


def test_pass_at_k_needs_k_completions() -> None:
    with pytest.raises(
        ConfigError, match=r"pass@3 needs 3 completions of each prompt, and one has 2"
    ):
        compute_pass_at_k(np.zeros(2), np.zeros(2, int), 3)


def test_gpg_makes_up_for_groups_that_teach_nothing() -> None:
    rewards, group = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0]), np.repeat(np.arange(3), 2)
    assert compute_informative_factor(rewards, group) == 3.0
    assert compute_informative_factor(np.ones(4), np.repeat(np.arange(2), 2)) == 1.0


def test_gdpo_by_hand_and_as_trl_does_it() -> None:
    parts = np.array(
        [[1.0, 10.0], [0.0, 30.0], [1.0, 20.0], [1.0, 40.0], [0.0, np.nan], [0.0, 10.0]]
    )
    group, weights = np.repeat(np.arange(2), 3), np.array([1.0, 0.5])
    total = np.zeros(6)
    for column, weight in zip(parts.T, weights, strict=True):
        for first in (0, 3):
            own = column[first : first + 3]
            std = np.nanstd(own, ddof=1)
            total[first : first + 3] += weight * np.nan_to_num(
                (own - np.nanmean(own)) / (std + 1e-4)
            )
    expected = (total - total.mean()) / (total.std(ddof=1) + 1e-4)
    assert compute_decoupled_advantages(parts, weights, group).tolist() == pytest.approx(
        expected.tolist()
    )


def test_steps_by_hand() -> None:
    # Two completions of one prompt: steps end at tokens 1 and 3 of the first, at token 0 of the
    # second. Rewards 1, 0 and 2.
    nan = np.nan
    rewards, lengths = np.array([nan, 1.0, nan, 0.0, 2.0, nan]), np.array([4, 2])
    found = compute_step_advantages(rewards, lengths, np.array([0, 0]), "none")
    assert found.tolist() == pytest.approx([-1.0, -1.0, -1.0, -1.0, 1.0, 0.0])
    scaled = compute_step_advantages(rewards, lengths, np.array([0, 0]), "group", eps=0.0)
    assert scaled.tolist() == pytest.approx(found.tolist()), "the deviation of 0, 1, 2 is 1"
    apart = compute_step_advantages(rewards, lengths, np.array([0, 1]), "none")
    assert apart.tolist() == pytest.approx([0.0, 0.0, -0.5, -0.5, 0.0, 0.0]), (
        "a group with one step has nothing to compare"
    )
    assert (
        compute_step_advantages(np.full(3, nan), np.array([3]), np.array([0]), "group").tolist()
        == [0.0] * 3
    )
