"""Distillation by hand, against TRL's own code, and where it meets its limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from loss_cases import Rows, evaluate, gradients, make_sample

from weft.algorithms.distill import GKDLoss, compute_generalised_jsd, compute_kl_divergence
from weft.data.sample import SequenceSample
from weft.errors import ConfigError
from weft.models.network.event_outputs import compute_given_outputs, compute_top_outputs
from weft.models.network.output_projection import OutputProjection
from weft.models.network.packed import TopIds

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
STUDENT, TEACHER = np.log([[0.5, 0.5]]), np.log([[0.9, 0.1]])


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        (0.0, 0.9 * math.log(1.8) + 0.1 * math.log(0.2)),
        (1.0, 0.5 * math.log(5 / 9) + 0.5 * math.log(5)),
        # M = (0.7, 0.3)
        (
            0.5,
            (
                0.9 * math.log(9 / 7)
                + 0.1 * math.log(1 / 3)
                + 0.5 * math.log(5 / 7)
                + 0.5 * math.log(5 / 3)
            )
            / 2,
        ),
        # M = 0.2 teacher + 0.8 student = (0.58, 0.42)
        (
            0.2,
            0.2 * (0.9 * math.log(0.9 / 0.58) + 0.1 * math.log(0.1 / 0.42))
            + 0.8 * (0.5 * math.log(0.5 / 0.58) + 0.5 * math.log(0.5 / 0.42)),
        ),
    ],
)
def test_divergences_by_hand(beta: float, expected: float) -> None:
    assert compute_generalised_jsd(STUDENT, TEACHER, beta)[0] == pytest.approx(expected, rel=1e-12)


def test_the_ends_are_the_limits() -> None:
    """Near 0 the divergence over beta is the forward KL, near 1 that over 1 - beta the reverse KL."""
    assert compute_generalised_jsd(STUDENT, TEACHER, 1e-6) / 1e-6 == pytest.approx(
        compute_kl_divergence(TEACHER, STUDENT), rel=1e-5
    )
    assert compute_generalised_jsd(STUDENT, TEACHER, 1 - 1e-6) / 1e-6 == pytest.approx(
        compute_kl_divergence(STUDENT, TEACHER), rel=1e-5
    )


def logits_of(rows: int, size: int, seed: int) -> torch.Tensor:
    return 2 * torch.randn(
        rows, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def ours(
    student: torch.Tensor,
    teacher: torch.Tensor,
    mask: list[float],
    *,
    beta: float,
    count: int,
    temperature: float = 1.0,
) -> torch.Tensor:
    """The loss of one completion whose rows have these logits, by way of the head's events."""
    rows, size = student.shape
    identity = OutputProjection(torch.eye(size, dtype=torch.float64))
    top = compute_top_outputs(teacher, identity, TopIds(count), temperature=temperature)
    labels = torch.zeros(rows, dtype=torch.int64)
    out = compute_given_outputs(
        student, labels, top["top_ids"], identity, temperature=temperature, chunk=3
    )
    keys = {
        "loss_mask": mask,
        "given_ids": top["top_ids"].numpy(),
        "teacher_logprobs": top["top_logprobs"].numpy(),
    }
    sample = make_sample([[rows]], keys)
    loss = GKDLoss(divergence_beta=beta)
    value, _ = loss(out, Rows(sample, torch_arrays=True), loss.denominators(sample))
    assert isinstance(value, torch.Tensor)
    return value


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_over_the_whole_vocabulary_loss_and_gradient_are_trls(
    beta: float, temperature: float
) -> None:
    trainer = pytest.importorskip("trl.experimental.gkd").GKDTrainer
    student, teacher = (logits_of(7, 11, seed) for seed in (1, 2))
    mask = [1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    labels = torch.tensor([[5 if each else -100 for each in mask]])
    mine, theirs = student.clone().requires_grad_(), student.clone().requires_grad_()
    loss = ours(mine, teacher, mask, beta=beta, count=11, temperature=temperature)
    wanted = trainer.generalized_jsd_loss(
        theirs[None], teacher[None], labels, beta=beta, temperature=temperature
    )
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    assert mine.grad is not None and theirs.grad is not None and theirs.grad.abs().max() > 1e-3
    torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("beta", BETAS)
def test_with_any_other_id_as_one_event_loss_and_gradient_are_trls(beta: float) -> None:
    """TRL's trainer for a teacher on a server, which has the same K + 1 events."""
    trl = pytest.importorskip("trl.experimental.server_distillation.server_distillation_trainer")
    student, teacher = (logits_of(7, 11, seed) for seed in (1, 2))
    mine, theirs = student.clone().requires_grad_(), student.clone().requires_grad_()
    loss = ours(mine, teacher, [1.0] * 7, beta=beta, count=4)
    ids = teacher.topk(4, dim=-1).indices
    valid = torch.ones_like(ids, dtype=torch.bool)
    events = [
        trl._add_tail_bucket(logits.log_softmax(-1).gather(-1, ids), valid)[0]
        for logits in (theirs, teacher)
    ]
    # its softmax leaves log-probs as they are
    trainer = pytest.importorskip("trl.experimental.gkd").GKDTrainer
    wanted = trainer.generalized_jsd_loss(
        *(each[None] for each in events), torch.ones(1, 7), beta=beta
    )
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("beta", BETAS)
def test_fewer_ids_say_less(beta: float) -> None:
    """The data-processing inequality: what is measured with K ids rises with K up to the divergence
    itself.
    """
    student, teacher = (logits_of(9, 11, seed) for seed in (3, 4))
    found = [
        float(ours(student, teacher, [1.0] * 9, beta=beta, count=count)) for count in range(1, 13)
    ]
    whole = compute_generalised_jsd(student.log_softmax(-1), teacher.log_softmax(-1), beta).mean()
    assert found == sorted(found) and found[0] > 0
    assert found[10] == found[11] == pytest.approx(float(whole), rel=1e-12)
    assert found[3] < 0.999 * found[10]


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("count", [3, 11])
def test_a_student_that_is_its_teacher_learns_nothing(beta: float, count: int) -> None:
    logits = logits_of(5, 11, 6)
    student = logits.clone().requires_grad_()
    loss = ours(student, logits, [1.0] * 5, beta=beta, count=count)
    loss.backward()
    assert abs(loss.item()) < 1e-12
    assert student.grad is not None and student.grad.abs().max() < 1e-12


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("far", [1e3, 1e6])
def test_what_one_finds_impossible_stays_finite(beta: float, far: float) -> None:
    """Each is sure of an id that the other gives no chance, and at one row so are the rest."""
    student, teacher = (
        torch.zeros(3, 11, dtype=torch.float64),
        torch.zeros(3, 11, dtype=torch.float64),
    )
    student[0, 1], teacher[0, 2], student[1, 5], teacher[2, 5] = far, far, far, far
    student.requires_grad_()
    for count in (1, 4, 11):
        student.grad = None
        loss = ours(student, teacher, [1.0] * 3, beta=beta, count=count)
        loss.backward()
        assert (
            bool(torch.isfinite(loss))
            and student.grad is not None
            and bool(torch.isfinite(student.grad).all())
        )


def small(**more: np.ndarray) -> tuple[SequenceSample, dict[str, np.ndarray]]:
    """Two completions of two tokens and of one; the last token is not trained."""
    keys = {
        "completion": np.array([7, 8, 9]),
        "given_ids": np.array([[7, 3], [3, 7], [9, 3]]),
        "teacher_logprobs": np.log([[0.6, 0.3, 0.1], [0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]),
        "loss_mask": np.array([1.0, 1.0, 0.0]),
    }
    out = {
        "given_logprobs": np.log([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]),
        "logprobs": np.log([0.5, 0.05, 0.1]),
    }
    return make_sample([[2], [1]], {**keys, **more}), out


def test_loss_and_metrics_by_hand() -> None:
    sample, out = small()
    found = evaluate(GKDLoss(divergence_beta=1.0), sample, out)
    first = 0.5 * math.log(0.5 / 0.6) + 0.25 * math.log(0.25 / 0.3) + 0.25 * math.log(2.5)
    assert found.loss == pytest.approx(first / 2)  # at the second token they agree
    assert found.stats == pytest.approx(
        {
            "kl_exact": first / 2,
            "forward_kl": (0.6 * math.log(1.2) + 0.3 * math.log(1.2) + 0.1 * math.log(0.4)) / 2,
            "entropy_bound": 1.5 * math.log(2),
            "teacher_entropy_bound": (
                -0.6 * math.log(0.6) - 0.3 * math.log(0.3) - 0.1 * math.log(0.1) + 1.5 * math.log(2)
            )
            / 2,
            "teacher_mass": (0.9 + 0.75) / 2,
            "teacher_agreement": 0.5,
        }
    )


def test_cross_entropy_is_of_what_the_data_wrote() -> None:
    sample, out = small()
    plain = evaluate(GKDLoss(divergence_beta=1.0), sample, out).loss
    loss = GKDLoss(divergence_beta=1.0, sft_coef=0.1)
    assert loss.outputs == {"given_logprobs", "logprobs"}
    nll = -math.log(0.5) - math.log(0.05)
    whole = evaluate(loss, sample, out)
    assert whole.loss == pytest.approx(plain + 0.1 * nll / 2)
    assert whole.stats["nll"] == pytest.approx(nll / 2)
    for first, expected in ((1.0, 0.0), (0.0, 0.1 * nll / 2)):
        marked, _ = small(sampled=np.array([first, 0.0]))
        found = evaluate(loss, marked, out)
        assert found.loss == pytest.approx(plain + expected)
        assert ("nll" in found.stats) == (first == 0.0)
        assert (gradients(loss, marked, out)[2]["logprobs"] != 0).any() == (first == 0.0)


@pytest.mark.parametrize(
    "args", [{"divergence_beta": -0.1}, {"divergence_beta": 1.1}, {"sft_coef": -1.0}]
)
def test_values_outside_their_range_are_refused(args: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(args))):
        GKDLoss(**args)
