"""PPO and GRPO: by hand, by naive loops, and against TRL."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loss_cases import evaluate, gradients, make_sample

from tests.wide import in_float64
from weft.algorithms.base import LOG_RATIO_BOUND
from weft.algorithms.grpo import GRPOLoss
from weft.algorithms.ppo import (
    PPOActorLoss,
    PPOCriticLoss,
    RatioClip,
    compute_clipped_surrogate,
)
from weft.errors import ConfigError

LENGTHS = [3, 1, 5, 2]


def policy_sample(seed: int = 1) -> tuple[Any, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    tokens = sum(LENGTHS)
    logprobs = -rng.gamma(1.0, 1.0, tokens)
    keys = {
        "logprobs": logprobs + rng.normal(0, 0.4, tokens),
        "ref_logprobs": logprobs + rng.normal(0, 0.4, tokens),
        "advantages": np.repeat(rng.normal(size=len(LENGTHS)), LENGTHS),
    }
    return make_sample([LENGTHS[:2], LENGTHS[2:]], keys), {
        "logprobs": logprobs,
        "entropy": rng.gamma(1.0, 1.0, tokens),
    }


def padded(rows: Any) -> torch.Tensor:
    parts = torch.split(torch.as_tensor(np.asarray(rows), dtype=torch.float64), LENGTHS)
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def trl_grpo(**options: Any) -> tuple[float, np.ndarray, dict[str, list[float]]]:
    """(loss, gradient by row, metrics) of TRL's own `_compute_loss` on the same batch."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="trl is a test dependency")
    sample, out = policy_sample()
    mask = padded(np.ones(sum(LENGTHS))).long()
    live, entropy = padded(out["logprobs"]).requires_grad_(True), padded(out["entropy"])
    metrics: dict[str, defaultdict[str, list[float]]] = {"train": defaultdict(list)}
    settings = {
        "beta": 0.0,
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
    }
    settings |= {"epsilon_high": 0.2, "max_completion_length": 16}
    stand_in = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        args=SimpleNamespace(
            delta=options.pop("delta", None),
            use_bias_correction_kl=False,
            steps_per_generation=1,
            **options.pop("arguments", {}),
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (live, entropy, None),
        _metrics=metrics,
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        **(settings | options),
    )
    inputs = {
        "prompt_ids": torch.zeros(4, 1),
        "prompt_mask": torch.ones(4, 1),
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": padded(sample.data["advantages"])[:, 0],
        "old_per_token_logps": padded(sample.data["logprobs"]),
        "ref_per_token_logps": padded(sample.data["ref_logprobs"]),
        "num_items_in_batch": mask.sum(),
    }
    with in_float64(trainer):
        loss = trainer.GRPOTrainer._compute_loss(stand_in, None, inputs)
        loss.backward()
    assert live.grad is not None
    return float(loss.detach()), live.grad[mask.bool()].numpy(), metrics["train"]


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "bnpo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_grpo_equals_trl(loss_type: str, level: str, beta: float) -> None:
    loss, gradient, metrics = trl_grpo(
        loss_type=loss_type, importance_sampling_level=level, beta=beta
    )
    sample, out = policy_sample()
    ours = GRPOLoss(
        loss_type=loss_type,
        importance_level=level,
        kl_coef=beta,
        max_completion_length=16,
        eps_clip=0.2,
    )
    value, stats, found = gradients(ours, sample, out)
    assert value == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(found["logprobs"], gradient, rtol=1e-11, atol=1e-15)
    assert stats["entropy"] == pytest.approx(metrics["entropy"][0], rel=1e-12)
    if beta:
        assert stats["kl"] == pytest.approx(metrics["kl"][0], rel=1e-12)
    if level == "token":
        assert stats["clip_ratio"] == pytest.approx(metrics["clip_ratio/region_mean"][0], rel=1e-12)


def test_clip_higher_and_dual_clip_equal_trl() -> None:
    loss, gradient, _ = trl_grpo(epsilon_low=0.1, epsilon_high=0.3, delta=1.35)
    sample, out = policy_sample()
    value, _, found = gradients(
        GRPOLoss(eps_clip=0.1, eps_clip_high=0.3, dual_clip=1.35), sample, out
    )
    assert value == pytest.approx(loss)
    np.testing.assert_allclose(found["logprobs"], gradient, atol=1e-15)
    # the dual clip bound somewhere
    assert trl_grpo(epsilon_low=0.1, epsilon_high=0.3)[0] != pytest.approx(loss)


def test_ppo_is_the_token_mean_of_the_same_surrogate() -> None:
    sample, out = policy_sample()
    ppo, grpo = (
        gradients(PPOActorLoss(), sample, out),
        gradients(GRPOLoss(loss_type="dapo"), sample, out),
    )
    assert ppo[0] == pytest.approx(grpo[0], rel=1e-12)
    np.testing.assert_allclose(ppo[2]["logprobs"], grpo[2]["logprobs"], rtol=1e-12)


def test_the_surrogate_by_hand() -> None:
    # ratio 1.5, 0.5, 1.5, 0.5, 4 with advantages 2, 2, -1, -1, -1; clip 0.2, dual clip 3.
    ratio = np.array([1.5, 0.5, 1.5, 0.5, 4.0])
    advantages = np.array([2.0, 2.0, -1.0, -1.0, -1.0])
    loss, held = compute_clipped_surrogate(np.log(ratio), advantages, RatioClip(0.2))
    assert loss.tolist() == pytest.approx([-2.4, -1.0, 1.5, 0.8, 4.0])
    assert held.tolist() == [1.0, 0.0, 0.0, 1.0, 0.0]
    loss, held = compute_clipped_surrogate(np.log(ratio), advantages, RatioClip(0.2, 0.6, 3.0))
    assert loss.tolist() == pytest.approx([-3.0, -1.0, 1.5, 0.8, 3.0])
    assert held.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_statistics_by_hand() -> None:
    # One completion of three tokens, the last masked: ratios 2 and 1 (log 0.693, 0), reference 1
    # and 0 nats below.
    keys = {"logprobs": [-2.0, -1.0, -9.0], "ref_logprobs": [-3.0 + math.log(2), -1.0, -9.0]}
    keys |= {"advantages": [1.0, 1.0, 1.0], "loss_mask": [1.0, 1.0, 0.0]}
    out = {"logprobs": [-2.0 + math.log(2), -1.0, -1.0], "entropy": [0.5, 1.5, 99.0]}
    result = evaluate(PPOActorLoss(entropy_coef=0.1), make_sample([[3]], keys), out)
    assert result.loss == pytest.approx((-1.2 - 1.0) / 2 - 0.1 * 1.0)
    expected = {
        "policy_loss": -1.1,
        "entropy": 1.0,
        "clip_ratio": 0.5,
        "approx_kl": (1.0 - math.log(2)) / 2,
        "importance_ratio": 1.5,
        "importance_ratio_max": 2.0,
        "sampler_logprob_diff": math.log(2) / 2,
        "sampler_logprob_diff_max": math.log(2),
        "kl": (math.exp(-1.0) - 1 + 1.0) / 2,
    }
    assert result.stats == pytest.approx(expected)
    del keys["ref_logprobs"]
    alone = evaluate(PPOActorLoss(entropy_coef=0.1), make_sample([[3]], keys), out)
    assert alone.stats == pytest.approx(expected | {"kl": expected["approx_kl"]}), (
        "the policy that sampled is left"
    )


def test_gspo_by_hand() -> None:
    # Ratios e^0.3 and e^-0.1 in one completion: both tokens get e^0.1, within the clip of 0.2.
    keys = {"logprobs": [-1.3, -0.9], "advantages": [2.0, 2.0]}
    sample, out = make_sample([[2]], keys), {"logprobs": [-1.0, -1.0], "entropy": [0.0, 0.0]}
    loss = GRPOLoss(loss_type="grpo", importance_level="sequence", eps_clip=0.2)
    value, _, found = gradients(loss, sample, out)
    assert value == pytest.approx(-2.0 * math.exp(0.1))
    assert found["logprobs"].tolist() == pytest.approx([-math.exp(0.1)] * 2)


def test_reinforce_by_hand() -> None:
    keys = {"logprobs": [-1.3, -0.9, -1.0], "advantages": [2.0, 2.0, -1.0]}
    sample, out = (
        make_sample([[2], [1]], keys),
        {"logprobs": [-1.0, -1.5, -2.0], "entropy": [0.0] * 3},
    )
    value, _, found = gradients(GRPOLoss(surrogate="reinforce"), sample, out)
    assert value == pytest.approx((2.0 + 3.0 - 2.0) / 3)
    assert found["logprobs"].tolist() == pytest.approx([-2 / 3, -2 / 3, 1 / 3])


def test_averages_by_hand() -> None:
    # Token losses 1 1 1 (first completion) and 5 (second), and a completion with nothing trained.
    keys = {"logprobs": [0.0] * 6, "advantages": [-1.0, -1.0, -1.0, -5.0, -9.0, -9.0]}
    keys |= {"loss_mask": [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]}
    sample, out = make_sample([[3, 1, 2]], keys), {"logprobs": [0.0] * 6, "entropy": [0.0] * 6}

    def loss(kind: str) -> float:
        return evaluate(GRPOLoss(loss_type=kind, max_completion_length=10), sample, out).loss

    assert loss("dapo") == loss("bnpo") == pytest.approx(8 / 4)
    assert loss("grpo") == pytest.approx((1 + 5) / 2)
    assert loss("dr_grpo") == pytest.approx(8 / (3 * 10))


def test_log_ratios_are_cut_before_exp() -> None:
    keys = {"logprobs": [-5000.0], "advantages": [-1.0]}
    result = evaluate(
        PPOActorLoss(), make_sample([[1]], keys), {"logprobs": [0.0], "entropy": [0.0]}
    )
    assert result.loss == pytest.approx(math.exp(LOG_RATIO_BOUND))
    assert result.stats["sampler_logprob_diff_max"] == 5000.0


def test_early_stop() -> None:
    loss = PPOActorLoss(early_stop_imp_ratio=5.0, early_stop_kl=0.1)
    assert loss.veto({"importance_ratio": 4.9, "approx_kl": 0.05}) is None
    assert "early_stop_imp_ratio=5.0" in (
        loss.veto({"importance_ratio": 5.1, "approx_kl": 0.05}) or ""
    )
    assert "early_stop_kl=0.1" in (loss.veto({"importance_ratio": 1.0, "approx_kl": 0.2}) or "")
    assert PPOActorLoss(early_stop_imp_ratio=None).veto({"importance_ratio": 1e9}) is None
    assert GRPOLoss().veto({"importance_ratio": 1e9}) is None
    assert PPOCriticLoss().veto({}) is None


def test_value_loss_by_hand() -> None:
    # V 1.0 (old 0, return 2): moved 1 > 0.2, clipped (0.2 - 2)^2 = 3.24 > 1. V 0.1 (old 0, return
    # 0): 0.01, inside.
    keys = {"values": [0.0, 0.0], "returns": [2.0, 0.0]}
    sample, out = make_sample([[2]], keys), {"values": [1.0, 0.1]}
    value, stats, found = gradients(PPOCriticLoss(0.2), sample, out)
    assert value == pytest.approx((3.24 + 0.01) / 4)
    assert found["values"].tolist() == pytest.approx([0.0, 0.05])
    assert stats["value_clip_ratio"] == 0.5
    assert evaluate(PPOCriticLoss(None), sample, out).loss == pytest.approx((1.0 + 0.01) / 4)


def test_the_value_loss_has_a_factor_which_its_metric_leaves_out() -> None:
    keys = {"values": [0.0, 0.0], "returns": [2.0, 0.0]}
    sample, out = make_sample([[2]], keys), {"values": [1.0, 0.1]}
    value, stats, found = gradients(PPOCriticLoss(None, vf_coef=0.1), sample, out)
    assert value == pytest.approx(0.1 * (1.0 + 0.01) / 4)
    assert stats["value_loss"] == pytest.approx((1.0 + 0.01) / 4)
    assert found["values"].tolist() == pytest.approx([0.1 * -0.5, 0.1 * 0.05])


def test_explained_variance_is_the_definition() -> None:
    rng = np.random.default_rng(0)
    returns, values = rng.normal(3.0, 1.0, 50), rng.normal(2.0, 1.0, 50)
    sample = make_sample([[20, 30]], {"values": values, "returns": returns})
    stats = evaluate(PPOCriticLoss(), sample, {"values": values}).stats
    assert stats["explained_variance"] == pytest.approx(
        1.0 - np.var(returns - values) / np.var(returns)
    )
    assert "return_square" not in stats
    alike = make_sample([[2]], {"values": [0.0, 0.0], "returns": [1.0, 1.0]})
    assert (
        "explained_variance" not in evaluate(PPOCriticLoss(), alike, {"values": [0.0, 0.5]}).stats
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PPOActorLoss(eps_clip=1.5), "eps_clip=1.5"),
        (lambda: PPOActorLoss(eps_clip_high=-0.1), "eps_clip_high"),
        (lambda: PPOActorLoss(dual_clip=0.9), "dual_clip"),
        (lambda: PPOCriticLoss(value_eps_clip=0.0), "value_eps_clip"),
        (lambda: GRPOLoss(loss_type="dr_grpo"), "max_completion_length"),
        (lambda: GRPOLoss(loss_type="gropo"), "did you mean"),
        (lambda: GRPOLoss(kl_estimator="k4"), "k1"),
        (lambda: GRPOLoss(kl_coef=-1.0), "kl_coef"),
    ],
)
def test_wrong_options_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
