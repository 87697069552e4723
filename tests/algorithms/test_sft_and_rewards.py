"""SFT and reward-model losses: by hand, by naive loops, and against TRL."""

from __future__ import annotations

import math
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import evaluate, gradients, make_sample

from tests.wide import in_float64
from weft.algorithms.reward import RewardLoss, count_pairs
from weft.algorithms.sft import SFTLoss
from weft.errors import ConfigError
from weft.registry import losses

LOG2 = math.log(2.0)


def test_sft_by_hand() -> None:
    # Two answers: log-probs -1, -2, -3 (the middle one not trained) and -5. Token mean (1+3+5)/3,
    # sequence mean (2+5)/2.
    sample = make_sample([[3], [1]], {"loss_mask": [1.0, 0.0, 1.0, 1.0]})
    out = {"logprobs": [-1.0, -2.0, -3.0, -5.0], "top1": [1.0, 1.0, 0.0, 0.0]}
    token = evaluate(SFTLoss(), sample, out)
    assert token.loss == pytest.approx(3.0)
    assert token.stats == pytest.approx(
        {"nll": 3.0, "accuracy": 1 / 3, "perplexity": math.exp(3.0)}
    )
    assert evaluate(SFTLoss(average="sequence"), sample, out).loss == pytest.approx(3.5)


def test_sft_leaves_out_the_token_that_nothing_precedes() -> None:
    sample = make_sample([[2], [2]], {}, prompts=[0, 1])
    result = evaluate(
        SFTLoss(), sample, {"logprobs": [0.0, -2.0, -3.0, -4.0], "top1": [0.0, 1.0, 1.0, 1.0]}
    )
    assert result.loss == pytest.approx(3.0)
    assert result.stats["accuracy"] == 1.0


def test_poly_loss_by_hand() -> None:
    sample = make_sample([[3], [1]], {"loss_mask": [1.0, 0.0, 1.0, 1.0]})
    logprobs = [-1.0, -2.0, -3.0, -5.0]
    out = {"logprobs": logprobs, "top1": [1.0, 1.0, 0.0, 0.0]}
    kept = [-1.0, -3.0, -5.0]
    wanted = sum(0.7 * (1 - math.exp(x)) - x for x in kept) / 3
    found = evaluate(SFTLoss(loss_type="poly", poly_eps=0.7), sample, out)
    assert found.loss == pytest.approx(wanted, rel=1e-12) and found.stats["nll"] == pytest.approx(
        3.0
    )
    assert evaluate(SFTLoss(loss_type="poly", poly_eps=0.0), sample, out).loss == pytest.approx(3.0)
    with pytest.raises(ConfigError, match="poly"):
        SFTLoss(loss_type="pol")


def test_poly_loss_of_logits() -> None:
    """As Open-Assistant writes it: cross-entropy plus eps times 1 less the softmax at the target, a
    mean over tokens.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    targets = torch.tensor([0, 3, 6, 2, 2])
    chosen = torch.softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    wanted = (
        torch.nn.functional.cross_entropy(logits, targets, reduction="none") + 1.0 - chosen
    ).mean()
    sample = make_sample([[5]], {})
    found = evaluate(
        SFTLoss(loss_type="poly"), sample, {"logprobs": chosen.log().tolist(), "top1": [0.0] * 5}
    )
    assert found.loss == pytest.approx(float(wanted), rel=1e-12)


def test_classification_weighs_every_pair_alike() -> None:
    """The mean over all pairs: a ranking of three counts three times a pair; cross-entropy over the
    two scores of each.
    """
    sample = make_sample([[1, 1], [1, 1, 1]], {"rank": [0, 1, 0, 1, 2], "comparison": [0] * 5})
    scores = [0.5, 2.0, 1.0, -1.0, 0.25]
    pairs = torch.tensor([[0.5, 2.0], [1.0, -1.0], [1.0, 0.25], [-1.0, 0.25]], dtype=torch.float64)
    wanted = torch.nn.functional.cross_entropy(pairs, torch.zeros(4, dtype=torch.long))
    assert evaluate(
        RewardLoss(loss_type="classification"), sample, {"scores": scores}
    ).loss == pytest.approx(float(wanted), rel=1e-12)
    assert evaluate(RewardLoss(), sample, {"scores": scores}).loss != pytest.approx(float(wanted))


def test_accuracy_is_over_all_pairs_of_a_ranking() -> None:
    """Open-Assistant's looked at the best and the worst reply alone (defect 7)."""
    sample = make_sample([[1, 1, 1]], {"rank": [0, 1, 2], "comparison": [0] * 3})
    # best above worst, but below the second
    found = evaluate(RewardLoss(), sample, {"scores": [1.0, 3.0, 0.0]})
    assert found.stats["accuracy"] == pytest.approx(2 / 3)


def test_reward_loss_by_hand() -> None:
    # One pair with scores 2 > 0.5 and margin 0.5 (sigmoid argument 1); one ranking of three with
    # scores 0, 0, 0 (all ln 2).
    sample = make_sample(
        [[1, 1], [1, 1, 1]],
        {"rank": [1, 0, 0, 1, 2], "comparison": [0] * 5, "margin": [0.5, 0.5, 0.0, 0.0, 0.0]},
    )
    result = evaluate(RewardLoss(), sample, {"scores": [0.5, 2.0, 0.0, 0.0, 0.0]})
    assert result.loss == pytest.approx((math.log(1 + math.exp(-1.0)) + LOG2) / 2)
    assert result.stats == pytest.approx(
        {"accuracy": 1 / 4, "margin": 1.5 / 4, "kendalltau": (1.0 + 0.0) / 2, "score": 0.5}
    )


def test_penalties_by_hand() -> None:
    sample = make_sample([[1, 1]], {"rank": [0, 1], "comparison": [0, 0]})
    plain = evaluate(RewardLoss(), sample, {"scores": [3.0, 1.0]}).loss
    assert evaluate(
        RewardLoss(score_l2=0.1), sample, {"scores": [3.0, 1.0]}
    ).loss - plain == pytest.approx(0.5)
    assert evaluate(
        RewardLoss(center=0.1), sample, {"scores": [3.0, 1.0]}
    ).loss - plain == pytest.approx(1.6)


def naive_reward_loss(groups: list[list[tuple[float, int, int]]]) -> tuple[float, float, float]:
    """(loss, accuracy, tau) with loops over groups of (score, rank, comparison)."""
    means, taus, right, count = [], [], 0, 0
    for group in groups:
        terms, signs = [], []
        for one, other in combinations(group, 2):
            if one[2] != other[2] or one[1] == other[1]:
                continue
            high, low = sorted((one, other), key=lambda entry: entry[1])
            gap = high[0] - low[0]
            terms.append(math.log1p(math.exp(-gap)))
            signs.append((gap > 0) - (gap < 0))
        if terms:
            means.append(sum(terms) / len(terms))
            taus.append(sum(signs) / len(signs))
        right, count = right + sum(s > 0 for s in signs), count + len(signs)
    return sum(means) / len(means), right / count, sum(taus) / len(taus)


entries = st.tuples(st.floats(-3, 3), st.integers(0, 2), st.integers(0, 1))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(entries, min_size=1, max_size=5), min_size=1, max_size=5))
def test_reward_loss_equals_the_naive_form(groups: list[list[tuple[float, int, int]]]) -> None:
    flat = [entry for group in groups for entry in group]
    scores, ranks, comparisons = (list(column) for column in zip(*flat, strict=True))
    sample = make_sample([[1] * len(g) for g in groups], {"rank": ranks, "comparison": comparisons})
    naive_pairs = [
        sum(a[2] == b[2] and a[1] != b[1] for a, b in combinations(group, 2)) for group in groups
    ]
    assert count_pairs(sample).tolist() == naive_pairs
    result = evaluate(RewardLoss(), sample, {"scores": scores})
    if sum(naive_pairs) == 0:
        assert result.loss == 0.0
        return
    loss, accuracy, tau = naive_reward_loss(groups)
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert (result.stats["accuracy"], result.stats["kendalltau"]) == pytest.approx((accuracy, tau))


@pytest.mark.parametrize("center", [None, 0.05])
@pytest.mark.parametrize("with_margin", [False, True])
def test_reward_loss_equals_trl(center: float | None, with_margin: bool) -> None:
    trl = pytest.importorskip("trl.trainer.reward_trainer", reason="trl is a test dependency")
    rng = np.random.default_rng(2)
    chosen, rejected, margin = rng.normal(size=(3, 7))
    logits = torch.tensor(np.concatenate([chosen, rejected]), requires_grad=True)
    metrics: dict[str, dict[str, list[float]]] = {
        "train": {k: [] for k in ("min_reward", "mean_reward", "max_reward")}
    }
    metrics["train"] |= {"accuracy": [], "margin": []}
    stand_in = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(center_rewards_coefficient=center),
        accelerator=SimpleNamespace(gather_for_metrics=lambda x: x, gather=lambda x: x),
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"attention_mask": torch.ones(14, 1)} | (
        {"margin": torch.tensor(margin)} if with_margin else {}
    )
    model = lambda **_: SimpleNamespace(logits=logits.unsqueeze(-1))  # noqa: E731
    with in_float64(trl):
        theirs = trl.RewardTrainer.compute_loss(stand_in, model, inputs)
        theirs.backward()

    keys = {"rank": [0, 1] * 7, "comparison": [0] * 14}
    keys |= {"margin": np.repeat(margin, 2)} if with_margin else {}
    sample = make_sample([[1, 1]] * 7, keys)
    scores = np.stack([chosen, rejected], axis=1).ravel()
    loss, stats, found = gradients(RewardLoss(center=center or 0.0), sample, {"scores": scores})
    assert loss == pytest.approx(float(theirs.detach()), rel=1e-12)
    assert logits.grad is not None
    np.testing.assert_allclose(
        found["scores"].reshape(7, 2).T.ravel(), logits.grad.numpy(), rtol=1e-10
    )
    assert stats["accuracy"] == pytest.approx(metrics["train"]["accuracy"][0], rel=1e-12)
    assert stats["margin"] == pytest.approx(metrics["train"]["margin"][0], rel=1e-12)


def test_kendalltau_counts_the_pairs_in_order() -> None:
    sample = make_sample([[1] * 4], {"rank": [1, 0, 2, 3], "comparison": [0] * 4})
    # Best first the scores are -0.2, 0.3, 0.9, 0.1: of six pairs, (0.3, 0.1) and (0.9, 0.1) are in
    # order.
    assert evaluate(RewardLoss(), sample, {"scores": [0.3, -0.2, 0.9, 0.1]}).stats[
        "kendalltau"
    ] == pytest.approx(-2 / 6)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("sft", {"average": "tokens"}, "did you mean token"),
        ("rw", {"score_l2": -1.0}, "rw.score_l2"),
        ("rm", {}, "unknown loss 'rm'"),
    ],
)
def test_wrong_options_are_refused(name: str, args: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        losses.get(name)(**args)
