"""Advantages, baselines, whitening, KL estimators and controllers: by hand and by naive loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.algorithms.advantages import (
    compute_discounted_sums,
    compute_gae,
    compute_group_stds,
    compute_segment_sums,
    find_zero_variance,
    scale_advantages,
    subtract_baseline,
    whiten,
)
from weft.algorithms.kl import AdaptiveKLController, FixedKLController, ValueNormalizer, estimate_kl
from weft.errors import ConfigError

numbers = st.floats(-5, 5)
ragged = st.lists(st.lists(numbers, max_size=6), min_size=1, max_size=6)
shares = st.floats(0, 1)


def flat(rows: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([x for row in rows for x in row], dtype=np.float64), np.array(
        [len(row) for row in rows]
    )


def test_gae_by_hand() -> None:
    # Rewards 0 0 1, values 0.5 0.6 0.7, ended. discount 0.9, lambda 0.8:
    # delta = [.04, .03, .3], A3 = .3, A2 = .03 + .72 * .3 = .246, A1 = .04 + .72 * .246 = .21712
    lengths = np.array([3])
    values = np.array([0.5, 0.6, 0.7])
    advantages, returns = compute_gae(
        np.array([0.0, 0.0, 1.0]), values, np.array([0.0]), lengths, discount=0.9, lam=0.8
    )
    assert advantages.tolist() == pytest.approx([0.21712, 0.246, 0.3])
    assert returns.tolist() == pytest.approx([0.71712, 0.846, 1.0])
    cut, _ = compute_gae(
        np.array([0.0, 0.0, 1.0]), values, np.array([2.0]), lengths, discount=0.9, lam=0.8
    )
    assert cut[-1] == pytest.approx(1.0 + 0.9 * 2.0 - 0.7)


@settings(max_examples=100, deadline=None)
@given(ragged, st.data(), shares, shares)
def test_gae_equals_the_naive_form(
    rows: list[list[float]], data: st.DataObject, discount: float, lam: float
) -> None:
    rewards, lengths = flat(rows)
    values = np.array(
        data.draw(st.lists(numbers, min_size=len(rewards), max_size=len(rewards))), dtype=np.float64
    )
    last = np.array(
        data.draw(st.lists(numbers, min_size=len(rows), max_size=len(rows))), dtype=np.float64
    )
    advantages, returns = compute_gae(rewards, values, last, lengths, discount=discount, lam=lam)
    start = 0
    for row, bootstrap in zip(rows, last, strict=True):
        v = [*values[start : start + len(row)], bootstrap]
        for t in range(len(row)):
            expected = sum(
                (discount * lam) ** (u - t) * (row[u] + discount * v[u + 1] - v[u])
                for u in range(t, len(row))
            )
            assert advantages[start + t] == pytest.approx(expected, abs=1e-9)
            assert returns[start + t] == pytest.approx(expected + v[t], abs=1e-9)
        start += len(row)


@settings(max_examples=50, deadline=None)
@given(ragged, shares)
def test_reversed_sums(rows: list[list[float]], factor: float) -> None:
    values, lengths = flat(rows)
    found = compute_discounted_sums(values, lengths, factor)
    expected = [
        sum(factor**i * x for i, x in enumerate(row[t:])) for row in rows for t in range(len(row))
    ]
    assert found.tolist() == pytest.approx(expected, abs=1e-9)
    assert compute_segment_sums(values, lengths).tolist() == pytest.approx(
        [sum(row) for row in rows], abs=1e-9
    )


def test_whitening() -> None:
    values, mask = np.array([1.0, 3.0, 99.0, 5.0]), np.array([1.0, 1.0, 0.0, 1.0])
    std = math.sqrt(8 / 2)  # n - 1, as verl and TRL
    assert whiten(values, mask, eps=0.0).tolist() == pytest.approx([-2 / std, 0.0, 0.0, 2 / std])
    kept = whiten(values, mask, shift_mean=False, eps=0.0)
    assert kept.tolist() == pytest.approx([3 - 2 / std, 3.0, 0.0, 3 + 2 / std])
    assert whiten(values, np.zeros(4)).tolist() == [0.0] * 4
    assert np.isfinite(whiten(np.ones(3), np.ones(3))).all()
    assert whiten(np.ones(1), np.ones(1)).tolist() == [0.0]


REWARDS, GROUP = np.array([1.0, 0.0, 0.0, 2.0, 2.0]), np.array([0, 0, 0, 1, 1])


def test_baselines_by_hand() -> None:
    third = 1 / 3
    assert subtract_baseline(REWARDS, GROUP, "group").tolist() == pytest.approx(
        [2 * third, -third, -third, 0, 0]
    )
    assert subtract_baseline(REWARDS, GROUP, "leave_one_out").tolist() == pytest.approx(
        [1.0, -0.5, -0.5, 0, 0]
    )
    greedy = np.array([0.5, 0.5, 0.5, 1.0, 1.0])
    assert subtract_baseline(REWARDS, GROUP, "given", greedy).tolist() == [
        0.5,
        -0.5,
        -0.5,
        1.0,
        1.0,
    ]
    assert subtract_baseline(REWARDS, GROUP, "none").tolist() == REWARDS.tolist()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(numbers, min_size=2, max_size=5), min_size=1, max_size=5))
def test_baselines_equal_the_naive_form(groups: list[list[float]]) -> None:
    rewards, _ = flat(groups)
    group = np.array([g for g, row in enumerate(groups) for _ in row])
    means = [r - sum(row) / len(row) for row in groups for r in row]
    others = [r - (sum(row) - r) / (len(row) - 1) for row in groups for r in row]
    assert subtract_baseline(rewards, group, "group").tolist() == pytest.approx(means, abs=1e-9)
    assert subtract_baseline(rewards, group, "leave_one_out").tolist() == pytest.approx(
        others, abs=1e-9
    )
    stds = [torch.tensor(row, dtype=torch.float64).std().item() for row in groups for _ in row]
    np.testing.assert_allclose(compute_group_stds(rewards, group), stds, rtol=1e-12, atol=1e-12)
    alike = [max(row) == min(row) for row in groups]
    assert find_zero_variance(rewards, group).tolist() == alike


def test_scales_by_hand() -> None:
    centred = subtract_baseline(REWARDS, GROUP, "group")
    std = math.sqrt(1 / 3)  # of 1, 0, 0 with n - 1
    found = scale_advantages(centred, REWARDS, GROUP, "group")
    assert found.tolist() == pytest.approx(
        [2 / 3 / (std + 1e-4), -1 / 3 / (std + 1e-4), -1 / 3 / (std + 1e-4), 0, 0]
    )
    assert scale_advantages(centred, REWARDS, GROUP, "batch").tolist() == pytest.approx(
        (centred / (1.0 + 1e-4)).tolist()
    )
    assert scale_advantages(centred, REWARDS, GROUP, "none").tolist() == centred.tolist()


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
def test_a_group_of_one_is_refused(baseline: str) -> None:
    with pytest.raises(ConfigError, match="group_size"):
        subtract_baseline(np.array([1.0, 2.0, 3.0]), np.array([0, 0, 1]), baseline)


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean group"):
        subtract_baseline(REWARDS, GROUP, "groups")
    with pytest.raises(ConfigError, match="did you mean batch"):
        scale_advantages(REWARDS, REWARDS, GROUP, "batsh")
    with pytest.raises(ConfigError, match="baseline_rewards"):
        subtract_baseline(REWARDS, GROUP, "given")


# -- KL


def test_kl_estimators_by_hand() -> None:
    policy, reference = np.array([-1.0]), np.array([-1.5])
    assert estimate_kl(policy, reference, "k1").tolist() == [0.5]
    assert estimate_kl(policy, reference, "k2").tolist() == [0.125]
    assert estimate_kl(policy, reference, "k3").tolist() == pytest.approx([math.exp(-0.5) - 0.5])
    assert np.isfinite(estimate_kl(np.array([-1e4]), np.array([0.0]), "k3")).all()
    with pytest.raises(ConfigError, match="k1"):
        estimate_kl(policy, reference, "k9")


def test_estimators_estimate_the_kl() -> None:
    """Expectation over the policy itself: k1 and k3 give the KL exactly, k2 to second order; k2's
    gradient is the KL's.
    """
    logits = torch.tensor([0.3, -0.2, 0.5, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.1, 0.1, 0.4, 0.2], dtype=torch.float64), dim=0)
    policy = torch.log_softmax(logits, dim=0)
    kl = (policy.exp() * (policy - reference)).sum()
    weights = policy.exp().detach()
    for estimator, exact in (("k1", True), ("k2", False), ("k3", True)):
        estimate = (weights * estimate_kl(policy, reference, estimator)).sum()
        assert float(estimate.detach()) == pytest.approx(
            float(kl.detach()), rel=1e-9 if exact else 0.1
        )
    gradient = torch.autograd.grad(kl, logits, retain_graph=True)[0]
    by_k2 = torch.autograd.grad(
        (weights * estimate_kl(policy, reference, "k2")).sum(), logits, retain_graph=True
    )[0]
    by_k1 = torch.autograd.grad((weights * estimate_kl(policy, reference, "k1")).sum(), logits)[0]
    np.testing.assert_allclose(by_k2, gradient, rtol=1e-9)
    np.testing.assert_allclose(by_k1, torch.zeros(4), atol=1e-15)


def test_the_adaptive_coefficient_keeps_its_sign_for_any_batch() -> None:
    controller = AdaptiveKLController(0.05, target=6.0, horizon=10.0)
    controller.update(0.0, 64)
    assert controller.value == pytest.approx(0.05 * 0.8)


def test_the_adaptive_controller() -> None:
    controller = AdaptiveKLController(0.1, target=6.0, horizon=1000.0)
    controller.update(12.0, 100)
    assert controller.value == pytest.approx(0.1 * (1 + 0.2 * 0.1))  # the error is cut at 0.2
    controller.update(5.4, 50)
    assert controller.value == pytest.approx(0.102 * (1 - 0.1 * 0.05))
    other = AdaptiveKLController(0.5, target=6.0, horizon=1000.0)
    other.load_state_dict(controller.state_dict())
    assert other.value == controller.value
    fixed = FixedKLController(0.3)
    fixed.update(100.0, 100)
    assert fixed.state_dict() == {"value": 0.3}
    with pytest.raises(ConfigError, match="target"):
        AdaptiveKLController(0.1, target=0.0, horizon=1000.0)


@pytest.mark.parametrize("kind", ["exp", "ma"])
def test_value_normalisation(kind: str) -> None:
    rng = np.random.default_rng(0)
    batches = [rng.normal(4.0, 2.0, n) for n in (5, 40, 3)]
    normalizer = ValueNormalizer(type=kind, beta=0.9, min_std=0.1)
    assert normalizer.normalize(np.array([7.0])).tolist() == [7.0]  # nothing seen, nothing changed
    for batch in batches:
        junk = np.concatenate([batch, [1e9]])
        normalizer.update(junk, np.array([1.0] * len(batch) + [0.0]))
    normalizer.update(np.array([5.0]), np.array([0.0]))
    if kind == "ma":
        mean, square = np.concatenate(batches).mean(), np.square(np.concatenate(batches)).mean()
    else:
        weights = [0.1 * 0.9**back for back in (2, 1, 0)]
        mean = sum(w * b.mean() for w, b in zip(weights, batches, strict=True)) / sum(weights)
        square = sum(w * np.square(b).mean() for w, b in zip(weights, batches, strict=True)) / sum(
            weights
        )
        assert normalizer.weight == pytest.approx(1 - 0.9**3)
    assert (normalizer.mean, normalizer.std) == pytest.approx((mean, math.sqrt(square - mean**2)))
    values = np.array([1.0, 2.0])
    assert normalizer.denormalize(normalizer.normalize(values)).tolist() == pytest.approx(
        [1.0, 2.0]
    )
    other = ValueNormalizer(type=kind, beta=0.9, min_std=0.1)
    other.load_state_dict(normalizer.state_dict())
    assert other.normalize(values).tolist() == normalizer.normalize(values).tolist()


def test_value_normalisation_does_not_blow_up_constant_returns() -> None:
    normalizer = ValueNormalizer("exp", beta=0.9, min_std=0.1)
    normalizer.update(np.full(8, 3.0), np.ones(8))
    assert normalizer.std == 0.1
    assert normalizer.normalize(np.array([3.0])).tolist() == pytest.approx([0.0])
    with pytest.raises(ConfigError, match="exp"):
        ValueNormalizer("expo", beta=0.9, min_std=0.1)
