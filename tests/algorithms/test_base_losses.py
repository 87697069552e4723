"""What every loss owes: numpy equals torch, gradients are right, cuts do not matter, masked rows do
not matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import Rows, evaluate, finite_differences, gradients, make_sample

from weft.algorithms import base
from weft.algorithms.base import Loss, Max, Min, Sum, count_trained_rows, reduce_stats
from weft.registry import losses


@dataclass(frozen=True)
class Case:
    """A loss by its registered name, and the outputs it trains."""

    name: str
    args: dict[str, Any]
    trains: str = "logprobs"
    halved: bool = (
        # a comparison is counted at both ends, with the other end constant: gradients are twice the
        # slope
        False
    )

    def build(self) -> Loss:
        return losses.get(self.name)(**self.args)

    def __str__(self) -> str:
        return f"{self.name}-{'-'.join(map(str, self.args.values()))}"


CASES = [
    Case("sft", {"average": "token"}),
    Case("sft", {"average": "sequence"}),
    Case("rw", {}, "scores"),
    Case("rw", {"score_l2": 0.1, "center": 0.02}, "scores"),
    *(
        Case("dpo", {"loss_type": t, "beta": 0.3})
        for t in ("sigmoid", "sigmoid_norm", "hinge", "ipo", "orpo", "kto")
    ),
    *(
        Case("dpo", {"loss_type": t, "beta": 0.3})
        for t in (
            "exo_pair",
            "discopop",
            "nca_pair",
            "sppo_hard",
            "bco_pair",
            "apo_zero",
            "apo_down",
            "bco",
            "aot",
        )
    ),
    Case("dpo", {"loss_type": "aot_unpaired", "beta": 0.3}, halved=True),
    *(
        Case("dpo", {"loss_type": "sigmoid", "beta": 0.3, "f_divergence": f})
        for f in ("forward_kl", "js", "alpha")
    ),
    Case("dpo", {"loss_type": "sigmoid", "beta": 0.3, "rpo_alpha": 0.5}),
    Case("dpo", {"loss_type": "robust", "beta": 0.3, "label_smoothing": 0.1}),
    Case("dpo", {"loss_type": "sigmoid", "beta": 0.3, "label_smoothing": 0.2}),
    Case("dpo", {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0}),
    Case(
        "dpo", {"loss_type": "kto", "beta": 0.3, "desirable_weight": 2.0, "undesirable_weight": 0.5}
    ),
    Case("ppo_actor", {}),
    Case(
        "ppo_actor", {"eps_clip": 0.1, "eps_clip_high": 0.3, "dual_clip": 1.5, "entropy_coef": 0.01}
    ),
    Case("ppo_critic", {}, "values"),
    Case("ppo_critic", {"value_eps_clip": None}, "values"),
    *(
        Case("grpo", {"loss_type": t, "max_completion_length": 16})
        for t in ("grpo", "dr_grpo", "dapo", "bnpo")
    ),
    Case("grpo", {"importance_level": "sequence", "loss_type": "grpo", "eps_clip": 0.02}),
    Case("grpo", {"surrogate": "reinforce"}),
    *(Case("grpo", {"kl_coef": 0.2, "kl_estimator": k}) for k in ("k1", "k2", "k3")),
    *(Case("gkd", {"divergence_beta": b}, "given_logprobs") for b in (0.0, 0.3, 1.0)),
    Case("gkd", {"divergence_beta": 0.5, "sft_coef": 0.2}, "given_logprobs"),
    Case("gkd", {"divergence_beta": 0.0, "sft_coef": 0.2}, "logprobs"),
]


def minibatch(
    seed: int, groups: int = 4, *, masks: bool = True, empty_prompt: bool = False
) -> tuple[Any, dict[str, Any]]:
    """(sample with every key any loss reads, outputs) of random ragged groups."""
    rng = np.random.default_rng(seed)
    completions = [
        [int(rng.integers(1, 6)) for _ in range(int(rng.integers(2, 5)))] for _ in range(groups)
    ]
    tokens, sequences = sum(map(sum, completions)), sum(map(len, completions))
    logprobs = -rng.gamma(1.0, 1.0, tokens) - 0.05
    keys: dict[str, Any] = {
        "logprobs": logprobs + rng.normal(0, 0.3, tokens),
        "ref_logprobs": logprobs + rng.normal(0, 0.3, tokens),
        "advantages": rng.normal(0, 1, tokens),
        "values": rng.normal(0, 1, tokens),
        "returns": rng.normal(0, 1, tokens),
        "rank": np.concatenate([rng.permutation(len(group)) for group in completions]),
        "comparison": np.zeros(sequences, dtype=np.int64),
        "margin": np.abs(rng.normal(0, 1, sequences)),
        "label": rng.integers(0, 2, sequences).astype(np.float64),
        "kl_baseline": np.full(sequences, 0.2),
        "reward_shift": np.full(sequences, 0.1),
        "partner": rng.normal(0, 1, sequences),
        **teacher_of(tokens, seed),
        "sampled": np.arange(sequences) % 2.0,
    }
    if masks:
        keys["loss_mask"] = (rng.random(tokens) < 0.8).astype(np.float64)
    prompts = [0 if empty_prompt else 2, *([2] * (groups - 1))]
    sample = make_sample(completions, keys, prompts)
    out = {
        "logprobs": logprobs,
        "entropy": rng.gamma(1.0, 1.0, tokens),
        "top1": rng.integers(0, 2, tokens).astype(np.float64),
        "values": rng.normal(0, 1, tokens),
        "scores": rng.normal(0, 1, sequences),
        "given_logprobs": distributions(tokens, seed + 1),
    }
    return sample, out


def distributions(rows: int, seed: int, events: int = 4) -> np.ndarray:
    """Log-probs [rows, events] that sum to 1."""
    logits = np.random.default_rng(seed).normal(0, 1.5, (rows, events))
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def teacher_of(rows: int, seed: int) -> dict[str, np.ndarray]:
    """What a teacher says of each token: three ids, and log-probs of these and of any other."""
    return {
        "given_ids": np.tile(np.arange(3), (rows, 1)),
        "teacher_logprobs": distributions(rows, seed + 2),
    }


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), masks=st.booleans(), empty_prompt=st.booleans())
def test_numpy_equals_torch(case: Case, seed: int, masks: bool, empty_prompt: bool) -> None:
    sample, out = minibatch(seed, masks=masks, empty_prompt=empty_prompt)
    loss = case.build()
    one, other = evaluate(loss, sample, out), evaluate(loss, sample, out, torch_arrays=True)
    assert math.isclose(one.loss, other.loss, rel_tol=1e-12, abs_tol=1e-14)
    assert one.stats.keys() == other.stats.keys()
    for name, value in one.stats.items():
        assert math.isclose(value, other.stats[name], rel_tol=1e-9, abs_tol=1e-12), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_equals_finite_differences(case: Case) -> None:
    sample, out = minibatch(11, groups=3)
    loss = case.build()
    _, _, found = gradients(loss, sample, out)
    slope = finite_differences(loss, sample, out, case.trains)
    # A loss of at most 10 that a hundred roundings reach, over a step of 1e-6, is wrong by 1e-7 in
    # float64; the third derivative, times the step's square, adds far less.
    np.testing.assert_allclose(found[case.trains], slope * (2 if case.halved else 1), atol=1e-7)
    assert np.abs(found[case.trains]).max() > 0
    also = {"entropy_coef": {"entropy"}, "sft_coef": {"logprobs", "given_logprobs"}}
    others = (
        set(found) - {case.trains} - set().union(*(also.get(name, set()) for name in case.args))
    )
    assert all((found[key] == 0).all() for key in others)


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), parts=st.integers(2, 6), empty_prompt=st.booleans())
def test_the_cut_does_not_matter(case: Case, seed: int, parts: int, empty_prompt: bool) -> None:
    sample, out = minibatch(seed, groups=6, empty_prompt=empty_prompt)
    loss = case.build()
    whole, cut = gradients(loss, sample, out), gradients(loss, sample, out, parts)
    assert math.isclose(whole[0], cut[0], rel_tol=1e-10, abs_tol=1e-12)
    for key, gradient in whole[2].items():
        np.testing.assert_allclose(gradient, cut[2][key], rtol=1e-10, atol=1e-13)
    assert whole[1].keys() == cut[1].keys()
    for name, value in whole[1].items():
        assert math.isclose(value, cut[1][name], rel_tol=1e-8, abs_tol=1e-10), name


def spoilt(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """-40 in the rows."""
    made = values.copy()
    made[rows] = -40.0
    return made


@pytest.mark.parametrize("case", [c for c in CASES if c.trains != "scores"], ids=str)
def test_masked_rows_do_not_matter(case: Case) -> None:
    sample, out = minibatch(5)
    loss = case.build()
    dead = np.asarray(sample.data["loss_mask"]) == 0
    wild = {
        key: spoilt(value, dead) if len(value) == len(dead) else value for key, value in out.items()
    }
    one, other = gradients(loss, sample, out), gradients(loss, sample, wild)
    assert one[0] == pytest.approx(other[0], rel=1e-12)
    np.testing.assert_allclose(one[2][case.trains][~dead], other[2][case.trains][~dead], rtol=1e-12)
    assert (other[2][case.trains][dead] == 0).all()
    assert one[1] == pytest.approx(other[1], rel=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_trained_is_a_loss_of_zero(case: Case) -> None:
    sample, out = minibatch(5, masks=False)
    empty = sample.update(
        sample.select(keys=["completion"]).remap_keys({"completion": "loss_mask"})
    )
    empty.data["loss_mask"].zero_()
    if case.trains == "scores":
        empty.data["rank"].zero_()
    value, stats, found = gradients(case.build(), empty, out)
    if case.name != "dpo":  # pairs without trained tokens still compare 0 with 0
        assert value == 0.0
    assert (found[case.trains] == 0).all()
    assert all(math.isfinite(v) for v in stats.values())


@pytest.mark.parametrize("case", [c for c in CASES if c.trains == "logprobs"], ids=str)
def test_far_apart_policies_stay_finite(case: Case) -> None:
    sample, out = minibatch(5)
    for shift in (-1e4, 1e4):
        moved = {**out, "logprobs": np.minimum(out["logprobs"] + shift, 0.0)}
        value, stats, found = gradients(case.build(), sample, moved)
        assert math.isfinite(value)
        assert np.isfinite(found["logprobs"]).all()
        assert all(math.isfinite(v) for v in stats.values())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), masks=st.booleans(), empty_prompt=st.booleans())
def test_trained_rows_are_the_lengths_a_loss_sees(
    seed: int, masks: bool, empty_prompt: bool
) -> None:
    sample, _ = minibatch(seed, masks=masks, empty_prompt=empty_prompt)
    assert count_trained_rows(sample).tolist() == Rows(sample).lengths.tolist()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), case=st.sampled_from(CASES))
def test_denominators_add_up_over_ids(seed: int, case: Case) -> None:
    sample, _ = minibatch(seed)
    loss = case.build()
    whole = loss.denominators(sample)
    parts = [loss.denominators(part) for part in sample.unpack()]
    assert whole == pytest.approx(
        {key: sum(part[key] for part in parts) for key in whole}, rel=1e-12
    )


def test_the_engines_rows_are_these_rows() -> None:
    rows_of = pytest.importorskip("weft.engine.rows")
    sample, out = minibatch(3, empty_prompt=True)
    device = torch.device("cpu")
    theirs = rows_of.SampleRows(
        sample, rows_of.PackLayout.from_sample(sample), device, torch.float64
    )
    ours = Rows(sample, torch_arrays=True)
    assert theirs.mask.tolist() == ours.mask.tolist()
    for case in CASES:
        loss = case.build()
        tensors = {k: torch.as_tensor(np.asarray(v)) for k, v in out.items()}
        total = loss.denominators(sample)
        assert float(loss(tensors, theirs, total)[0]) == pytest.approx(
            float(loss(tensors, ours, total)[0]), rel=1e-12
        )


def test_statistics_join() -> None:
    parts = [
        {"a": Sum(3.0, 2.0), "b": Max(1.0), "c": Min(4.0)},
        {"a": Sum(5.0, 2.0), "b": Max(7.0), "c": Min(2.0)},
    ]
    assert reduce_stats(parts) == {"a": 2.0, "b": 7.0, "c": 2.0}
    assert reduce_stats([{"a": Sum(0.0, 0.0)}]) == {}


def test_log_sigmoid_has_the_true_slope_at_zero() -> None:
    x = torch.tensor([0.0, 800.0, -800.0], dtype=torch.float64, requires_grad=True)
    y = base.log_sigmoid(x)
    y.sum().backward()
    assert y.tolist() == pytest.approx([-math.log(2), 0.0, -800.0])
    assert x.grad is not None and x.grad.tolist() == pytest.approx([0.5, 0.0, 1.0])


def test_shapes_are_checked_here() -> None:
    """The import hook of conftest.py is in force; without it every shape annotation would be
    decoration.
    """
    from weft.algorithms.preferences import compute_sigmoid_loss

    assert compute_sigmoid_loss(np.zeros(3), 0.1).shape == (3,)
    with pytest.raises(Exception, match="delta"):
        compute_sigmoid_loss(np.zeros((3, 2)), 0.1)
