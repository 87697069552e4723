"""DPO and its kin: by hand, by naive loops, and against TRL."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loss_cases import evaluate, gradients, make_sample

from tests.bounds import unit
from tests.wide import in_float64
from weft.algorithms import dpo, preferences
from weft.algorithms.dpo import TRANSPORTED, build_preference_loss
from weft.algorithms.preferences import is_above
from weft.errors import ConfigError, DataError
from weft.host.base import HostContext
from weft.host.bco_shift import BCOShift
from weft.host.optimal_transport import optimal_transport

LENGTHS = [(3, 2), (1, 4), (5, 5), (2, 1)]  # (better, worse) of four pairs


def pairs_sample(seed: int = 0) -> tuple[Any, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    tokens = sum(a + b for a, b in LENGTHS)
    logprobs = -rng.gamma(1.0, 1.0, tokens) - 0.1
    reference = logprobs + rng.normal(0, 0.5, tokens)
    keys = {
        "rank": [0, 1] * 4,
        "comparison": [0] * 8,
        "ref_logprobs": reference,
        "label": [1.0, 0.0] * 4,
    }
    keys |= {"kl_baseline": [0.3] * 8}
    return make_sample(LENGTHS, keys), {"logprobs": logprobs}


def padded(rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """([8, 1 + longest], mask) as TRL lays pairs out: the better four, then the worse four; one
    prompt token in front.
    """
    bounds = np.cumsum([0, *(n for pair in LENGTHS for n in pair)])
    longest = max(n for pair in LENGTHS for n in pair)
    values, mask = (
        torch.zeros(8, 1 + longest, dtype=torch.float64),
        torch.zeros(8, 1 + longest, dtype=torch.int64),
    )
    for pair in range(4):
        for side in range(2):
            part = rows[bounds[2 * pair + side] : bounds[2 * pair + side + 1]]
            values[pair + 4 * side, 1 : 1 + len(part)] = torch.as_tensor(part)
            mask[pair + 4 * side, 1 : 1 + len(part)] = 1
    return values, mask


def trl_dpo(
    loss_type: str, beta: float, smoothing: float, divergence: str = "reverse_kl"
) -> tuple[float, dict[str, float], np.ndarray]:
    """(loss, metrics, gradient by row) of TRL's own `_compute_loss` on the same pairs."""
    trainer = pytest.importorskip("trl.trainer.dpo_trainer", reason="trl is a test dependency")
    sample, out = pairs_sample()
    values, mask = padded(out["logprobs"])
    reference, _ = padded(np.asarray(sample.data["ref_logprobs"]))
    values.requires_grad_(True)

    def model(**_: Any) -> SimpleNamespace:
        zeros = torch.zeros(8, mask.shape[1] - 1)
        return SimpleNamespace(
            log_probs=values[:, 1:],
            entropy=zeros,
            mean_logits=zeros,
            is_top1=zeros.bool(),
            log_sum_sq_probs=zeros,
        )

    from collections import defaultdict

    sums = reference[:, 1:].sum(-1)
    metrics: dict[str, defaultdict[str, list[float]]] = {"train": defaultdict(list)}
    stand_in = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x
        ),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type=divergence,
        f_alpha_divergence_coef=0.5,
        args=SimpleNamespace(discopop_tau=0.05),
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=smoothing,
        use_weighting=False,
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": mask.clone(),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
    }
    inputs |= {"ref_chosen_logps": sums[:4], "ref_rejected_logps": sums[4:]}
    with in_float64(trainer):
        loss = trainer.DPOTrainer._compute_loss(stand_in, model, inputs, False)
        loss.backward()
    assert values.grad is not None
    order = [
        values.grad[pair + 4 * side, 1 : 1 + LENGTHS[pair][side]]
        for pair in range(4)
        for side in range(2)
    ]
    return (
        float(loss.detach()),
        {k: v[-1] for k, v in metrics["train"].items()},
        torch.cat(order).numpy(),
    )


PAIRWISE = (
    "sigmoid",
    "ipo",
    "hinge",
    "robust",
    "sigmoid_norm",
    "exo_pair",
    "nca_pair",
    "sppo_hard",
    "bco_pair",
    "apo_zero",
    "apo_down",
    "discopop",
    "aot",
    "aot_unpaired",
)
SMOOTHED = {"robust": 0.15, "exo_pair": 0.15, "aot": 0.1, "aot_unpaired": 0.1}


def with_partners(sample: Any, out: dict[str, np.ndarray], loss_type: str) -> Any:
    """The sample with what AOT compares each completion with."""
    old = make_sample(LENGTHS, {"old_logprobs": out["logprobs"]}).select(keys=["old_logprobs"])
    return sample.update(optimal_transport(sample.update(old), HostContext(), loss_type))


@pytest.mark.parametrize("loss_type", PAIRWISE)
def test_equals_trl(loss_type: str) -> None:
    smoothing = SMOOTHED.get(loss_type, 0.0)
    loss, metrics, gradient = trl_dpo(loss_type, 0.3, smoothing)
    sample, out = pairs_sample()
    partners = loss_type in TRANSPORTED
    if partners:
        sample = with_partners(sample, out, loss_type)
    ours = gradients(
        build_preference_loss(loss_type=loss_type, beta=0.3, label_smoothing=smoothing), sample, out
    )
    # Partners are float32, as every key of a run. The loss, a mean of -log sigmoid(0.3 (a - b)),
    # changes with a partner by 0.3 of that change at most, and its slopes by 0.3^2 / 4.
    moved = unit(torch.float32) * float(sample.data["partner"].abs().max()) if partners else 0.0
    assert ours[0] == pytest.approx(loss, rel=1e-12, abs=0.3 * moved)
    np.testing.assert_allclose(
        ours[2]["logprobs"], gradient, rtol=1e-11, atol=1e-15 + 0.3**2 / 4 * moved
    )
    for name in (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "rewards/accuracies",
        "logps/chosen",
    ):
        assert ours[1][name] == pytest.approx(metrics[name], rel=1e-12), name


@pytest.mark.parametrize(
    "loss_type", ["sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "discopop"]
)
@pytest.mark.parametrize(
    ("divergence", "name"),
    [("forward_kl", "forward_kl"), ("js", "js_divergence"), ("alpha", "alpha_divergence")],
)
def test_divergences_equal_trl(loss_type: str, divergence: str, name: str) -> None:
    smoothing = SMOOTHED.get(loss_type, 0.0)
    loss, _, gradient = trl_dpo(loss_type, 0.3, smoothing, name)
    sample, out = pairs_sample()
    chosen = build_preference_loss(
        loss_type=loss_type,
        beta=0.3,
        label_smoothing=smoothing,
        f_divergence=divergence,
        f_alpha=0.5,
    )
    ours = gradients(chosen, sample, out)
    assert ours[0] == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(ours[2]["logprobs"], gradient, rtol=1e-11, atol=1e-15)


def test_rpo_adds_the_better_answers_cross_entropy_by_token() -> None:
    # ratios +1 and -1; the better answer's log-probs are -1, -1: its cross-entropy is 1 a token.
    assert hand("sigmoid", 0.5, rpo_alpha=0.25) == pytest.approx(nls(1.0) + 0.25 * 1.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_simpo_and_cdpo_equal_trl(smoothing: float) -> None:
    trainer = pytest.importorskip(
        "trl.experimental.cpo.cpo_trainer", reason="trl is a test dependency"
    )
    rng = np.random.default_rng(4)
    better, worse = torch.tensor(rng.normal(size=(2, 6)))
    options = {
        "alpha": 0.0,
        "label_smoothing": smoothing,
        "accelerator": SimpleNamespace(device="cpu"),
    }
    simpo = SimpleNamespace(loss_type="simpo", beta=2.0, simpo_gamma=0.5, **options)
    theirs, *_ = trainer.CPOTrainer.cpo_loss(simpo, better, worse)
    np.testing.assert_allclose(
        preferences.compute_simpo_loss(better - worse, 2.0, 0.5, smoothing), theirs, rtol=1e-12
    )
    sigmoid = SimpleNamespace(loss_type="sigmoid", beta=0.4, **options)
    theirs, *_ = trainer.CPOTrainer.cpo_loss(sigmoid, better, worse)
    np.testing.assert_allclose(
        preferences.compute_sigmoid_loss(better - worse, 0.4, smoothing), theirs, rtol=1e-12
    )


def test_orpo_equals_trl() -> None:
    trainer = pytest.importorskip(
        "trl.experimental.orpo.orpo_trainer", reason="trl is a test dependency"
    )
    rng = np.random.default_rng(4)
    better, worse = torch.tensor(-rng.gamma(1.0, 1.0, size=(2, 6)))
    stand_in = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu"))
    with in_float64(trainer):
        theirs, *_ = trainer.ORPOTrainer.odds_ratio_loss(stand_in, better, worse)
    np.testing.assert_allclose(
        preferences.compute_orpo_loss(better, worse, 0.3), -better - theirs, rtol=1e-12
    )


def test_kto_equals_trl() -> None:
    trainer = pytest.importorskip("trl.trainer.kto_trainer", reason="trl is a test dependency")
    from collections import defaultdict

    sample, out = pairs_sample()
    values, mask = padded(out["logprobs"])
    reference, _ = padded(np.asarray(sample.data["ref_logprobs"]))
    values.requires_grad_(True)
    zeros = torch.zeros(8, mask.shape[1] - 1)
    # policy - reference of mismatched completions; mean 0.3 is z0
    mismatched = torch.tensor([0.5, 0.1], dtype=torch.float64)
    metrics: dict[str, defaultdict[str, list[float]]] = {"train": defaultdict(list)}
    stand_in = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        _compute_kl_logps=lambda model, batch: mismatched,
        loss_type="kto",
        beta=0.2,
        desirable_weight=1.5,
        undesirable_weight=0.7,
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
    )

    def model(**_: Any) -> SimpleNamespace:
        return SimpleNamespace(log_probs=values[:, 1:], entropy=zeros, mean_logits=zeros)

    inputs = {
        "label": torch.tensor([True] * 4 + [False] * 4),
        "input_ids": mask.clone(),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_logps": reference[:, 1:].sum(-1),
        "ref_KL_logps": torch.zeros(2, dtype=torch.float64),
    }
    with in_float64(trainer):
        loss = trainer.KTOTrainer._compute_loss(stand_in, model, inputs, False)
        loss.backward()
    ours = gradients(
        build_preference_loss("kto", 0.2, desirable_weight=1.5, undesirable_weight=0.7), sample, out
    )
    assert ours[0] == pytest.approx(float(loss.detach()), rel=1e-12)
    assert values.grad is not None
    order = [
        values.grad[pair + 4 * side, 1 : 1 + LENGTHS[pair][side]]
        for pair in range(4)
        for side in range(2)
    ]
    np.testing.assert_allclose(ours[2]["logprobs"], torch.cat(order), rtol=1e-11, atol=1e-15)
    for name in (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
    ):
        assert ours[1][name] == pytest.approx(metrics["train"][name][-1], rel=1e-12), name


# -- by hand: one pair, log-probs -1 -1 (better) and -2 (worse), reference -1.5 -1.5 and -1: ratios +1 (mean 0.5) and -1


def hand(loss_type: str, beta: float, **options: float) -> float:
    keys = {"rank": [1, 0], "comparison": [0, 0], "ref_logprobs": [-1.0, -1.5, -1.5]}
    sample = make_sample([(1, 2)], keys)
    return evaluate(
        build_preference_loss(loss_type, beta, **options), sample, {"logprobs": [-2.0, -1.0, -1.0]}
    ).loss


def nls(x: float) -> float:
    return math.log(1.0 + math.exp(-x))


def test_by_hand() -> None:
    assert hand("sigmoid", 0.5) == pytest.approx(nls(1.0))
    assert hand("sigmoid", 0.5, label_smoothing=0.25) == pytest.approx(
        0.75 * nls(1.0) + 0.25 * nls(-1.0)
    )
    assert hand("robust", 0.5, label_smoothing=0.25) == pytest.approx(
        (0.75 * nls(1.0) - 0.25 * nls(-1.0)) / 0.5
    )
    assert hand("hinge", 0.25) == pytest.approx(0.5)
    assert hand("hinge", 0.5) == 0.0
    assert hand("sigmoid_norm", 1.0) == pytest.approx(nls(1.5))
    assert hand("ipo", 1.0) == pytest.approx((1.5 - 0.5) ** 2)
    assert hand("ipo_sum", 1.0) == pytest.approx((2.0 - 0.5) ** 2)  # sums: 1 and -1
    assert hand("simpo", 2.0, simpo_gamma=0.5) == pytest.approx(nls(2.0 * (-1.0 + 2.0) - 0.5))
    assert hand("nca_pair", 0.5) == pytest.approx(nls(0.5) + 0.5 * nls(-0.5) + 0.5 * nls(0.5))
    assert hand("sppo_hard", 1.0) == pytest.approx((1.0 - 0.5) ** 2 + (-1.0 + 0.5) ** 2)
    assert hand("bco_pair", 0.5) == pytest.approx(2 * nls(0.5))
    sigmoid = 1 / (1 + math.exp(-0.5))
    assert hand("apo_zero", 0.5) == pytest.approx(2 * (1 - sigmoid))
    assert hand("apo_down", 0.5) == pytest.approx(sigmoid + 1 - 1 / (1 + math.exp(-1.0)))
    q = 1 / (1 + math.exp(-1.0))
    assert hand("exo_pair", 0.5, label_smoothing=0.1) == pytest.approx(
        q * math.log(q / 0.9) + (1 - q) * math.log((1 - q) / 0.1)
    )
    share = 1 / (1 + math.exp(-1.0 / 0.5))
    assert hand("discopop", 0.5, discopop_tau=0.5) == pytest.approx(
        (1 - share) * nls(1.0) + share * math.exp(-1.0)
    )
    assert hand("sigmoid", 0.5, f_divergence="forward_kl") == pytest.approx(
        nls(0.5 * (math.e - 1 / math.e))
    )
    # log 2e / (1 + e) - log 2 / (e + 1) is 1
    assert hand("sigmoid", 0.5, f_divergence="js") == pytest.approx(nls(0.5))
    root = math.exp(0.5)
    # alpha 1/2
    assert hand("sigmoid", 0.5, f_divergence="alpha") == pytest.approx(
        nls(0.5 * 2 * (root - 1 / root))
    )
    odds = [math.log(math.exp(x) / (1 - math.exp(x))) for x in (-1.0, -2.0)]
    assert hand("orpo", 0.1) == pytest.approx(1.0 + 0.1 * nls(odds[0] - odds[1]))


def test_aot_by_hand() -> None:
    """Two ids of one pair.

    Policy: -1 and -2, -3 and -1 (better, worse); reference: -2 and -1, -1 and -1.5.
    """
    logprobs = [-1.0, -2.0, -3.0, -1.0]
    keys = {
        "rank": [0, 1, 0, 1],
        "comparison": [0] * 4,
        "ref_logprobs": [-2.0, -1.0, -1.0, -1.5],
        "old_logprobs": logprobs,
    }

    def loss(loss_type: str) -> float:
        sample = make_sample([(1, 1), (1, 1)], keys)
        sample = sample.update(optimal_transport(sample, HostContext(), loss_type))
        return evaluate(build_preference_loss(loss_type, 0.5), sample, {"logprobs": logprobs}).loss

    # Margins 1 and -2 of the policy, -1 and 0.5 of the reference: by rank 1 meets 0.5 and -2 meets
    # -1.
    assert loss("aot") == pytest.approx((nls(0.5 * 0.5) + nls(0.5 * -1.0)) / 2)
    # Ratios 1 and -2 of the better, -1 and 0.5 of the worse: by rank -2 meets -1 and 1 meets 0.5.
    assert loss("aot_unpaired") == pytest.approx((nls(0.5 * -1.0) + nls(0.5 * 0.5)) / 2)


@pytest.mark.parametrize("loss_type", ["sigmoid", "kto"])
def test_rewards_that_rounding_alone_makes_unequal_are_ties(loss_type: str) -> None:
    """The policy is its reference, whose log-probs ranks have added up in another order: 0 on any
    layout.
    """
    base = np.array([-0.7, -1.3, -0.2, -2.1])
    keys = {"rank": [0, 1], "label": [1.0, 0.0], "kl_baseline": [0.0, 0.0], "ref_logprobs": base}
    sample = make_sample([(2, 2)], keys)

    def share(by: float) -> float:
        return evaluate(
            build_preference_loss(loss_type, 0.5),
            sample,
            {"logprobs": base + np.array([by, 0, 0, -by])},
        ).stats["rewards/accuracies"]

    assert share(0.0) == share(5e-16) == 0.0
    assert share(1e-6) == 1.0 and share(-1e-6) == 0.0


def test_ties_are_as_wide_as_the_dtype_is_coarse() -> None:
    one, terms = np.array([1e-6]), np.array([2.0])
    assert is_above(one, np.zeros(1), terms).all()
    assert not is_above(
        one.astype(np.float32), np.zeros(1, np.float32), terms.astype(np.float32)
    ).any()


def test_kto_by_hand() -> None:
    # Desirable: score 1; undesirable: score -1; z0 = 0.2, beta = 0.5.
    keys = {"label": [0.0, 1.0], "kl_baseline": [0.2, 0.2], "ref_logprobs": [-1.0, -1.5, -1.5]}
    sample = make_sample([(1, 2)], keys)
    result = evaluate(
        build_preference_loss("kto", 0.5, desirable_weight=3.0),
        sample,
        {"logprobs": [-2.0, -1.0, -1.0]},
    )
    sigmoid = [1 / (1 + math.exp(-x)) for x in (0.5 * (1 - 0.2), 0.5 * (0.2 + 1))]
    assert result.loss == pytest.approx((3.0 * (1 - sigmoid[0]) + (1 - sigmoid[1])) / 2)
    expected = {
        "rewards/chosen": 0.5,
        "rewards/rejected": -0.5,
        "rewards/margins": 1.0,
        "rewards/accuracies": 1.0,
    }
    expected |= {"logps/chosen": -2.0, "logps/rejected": -2.0, "kl_baseline": 0.2}
    assert result.stats == pytest.approx(expected)


def test_bco_by_hand_and_its_running_shift() -> None:
    # Rewards are beta times +1 (desirable) and -1 (undesirable); their midpoint is 0, then moves
    # with what comes.
    keys = {
        "label": [0.0, 1.0],
        "old_logprobs": [-2.0, -1.0, -1.0],
        "ref_logprobs": [-1.0, -1.5, -1.5],
    }
    sample, shift = make_sample([(1, 2)], keys), BCOShift(beta=0.5)
    context = HostContext()
    first = shift(sample, context)
    assert (
        first.data["reward_shift"].tolist() == [0.0, 0.0] and context.metrics["reward_shift"] == 0.0
    )
    result = evaluate(
        build_preference_loss("bco", 0.5), sample.update(first), {"logprobs": [-2.0, -1.0, -1.0]}
    )
    assert result.loss == pytest.approx(nls(0.5))
    # rewards +1 (desirable) and 0: means (0.5 + 1) / 2 and (-0.5 + 0) / 2
    keys["old_logprobs"] = [-1.0, -0.5, -0.5]
    later = BCOShift(beta=0.5)
    later.load_state_dict(shift.state_dict())
    moved = later(make_sample([(1, 2)], keys), HostContext())
    assert moved.data["reward_shift"].tolist() == pytest.approx([0.25, 0.25])


def test_aot_refuses_rankings() -> None:
    keys = {
        "rank": [0, 2, 1],
        "comparison": [0, 0, 0],
        "ref_logprobs": [0.0] * 3,
        "old_logprobs": [0.0] * 3,
    }
    with pytest.raises(DataError, match="id0: aot and aot_unpaired compare"):
        optimal_transport(make_sample([(1, 1, 1)], keys), HostContext(), "aot")


def test_a_ranking_gives_all_its_pairs() -> None:
    keys = {"rank": [0, 2, 1], "comparison": [0, 0, 0], "ref_logprobs": [0.0, 0.0, 0.0]}
    result = evaluate(
        build_preference_loss("sigmoid", 1.0),
        make_sample([(1, 1, 1)], keys),
        {"logprobs": [-1.0, -3.0, -1.5]},
    )
    assert result.loss == pytest.approx((nls(2.0) + nls(0.5) + nls(1.5)) / 3)


def test_the_first_step_has_the_gradient_of_the_formula() -> None:
    """Policy = reference: the sigmoid's argument is exactly 0, where a careless log-sigmoid has
    slope 0 or 1.
    """
    keys = {"rank": [0, 1], "comparison": [0, 0], "ref_logprobs": [-1.0, -2.0]}
    _, _, found = gradients(
        build_preference_loss("sigmoid", 0.4),
        make_sample([(1, 1)], keys),
        {"logprobs": [-1.0, -2.0]},
    )
    assert found["logprobs"].tolist() == pytest.approx([-0.2, 0.2])


def test_log_odds_is_stable() -> None:
    x = np.array([-1e-5, -0.1, -0.69, -0.7, -5.0, -700.0])
    exact = [math.log(math.exp(v)) - math.log(-math.expm1(v)) for v in x]
    np.testing.assert_allclose(preferences.compute_log_odds(x), exact, rtol=1e-10)
    assert np.isfinite(preferences.compute_log_odds(np.array([0.0, -1e-12]))).all()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"loss_type": "sigmod"}, "did you mean sigmoid"),
        ({"beta": 0.0}, "dpo.beta"),
        ({"label_smoothing": 0.5}, "label_smoothing"),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "no meaning"),
        ({"desirable_weight": 2.0}, "no meaning"),
        ({"gama": 2.0}, "unknown option"),
    ],
)
def test_wrong_options_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_preference_loss(**args)


def test_a_default_may_always_be_given() -> None:
    for loss_type in dpo.LOSS_TYPES:
        build_preference_loss(loss_type, 0.1, **dpo.DEFAULTS)
