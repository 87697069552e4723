"""Advantages from a teacher's log-probs: by hand, and that their gradient is that of the reverse
KL.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.bounds import assert_within, gamma
from weft.algorithms.grpo import GRPOLoss
from weft.data.sample import SequenceSample
from weft.engine.rows import PackLayout, SampleRows
from weft.errors import ConfigError
from weft.host.base import HostContext, make_host_function


def sample(lengths: list[list[int]], **keys: list[float]) -> SequenceSample:
    total = sum(map(sum, lengths))
    data = {
        "prompt": torch.zeros(len(lengths), dtype=torch.int64),
        "completion": torch.zeros(total, dtype=torch.int64),
    }
    data |= {key: torch.tensor(values, dtype=torch.float64) for key, values in keys.items()}
    seqlens = {key: [[1]] * len(lengths) if key == "prompt" else lengths for key in data}
    return SequenceSample.from_groups([f"id{i}" for i in range(len(lengths))], seqlens, data)


def advantages(
    batch: SequenceSample, discount: float = 0.0
) -> tuple[list[float], dict[str, float]]:
    context = HostContext()
    made = make_host_function("teacher_advantages", {"discount": discount})(batch, context)
    assert (
        made is not None
        and made.lengths["advantages"].tolist() == batch.lengths["completion"].tolist()
    )
    return made.data["advantages"].tolist(), context.metrics


BATCH = sample(
    [[3, 1], [2]],
    logprobs=[-1.0, -2.0, -3.0, -1.0, -0.5, -0.5],
    teacher_logprobs=[-1.5, -1.0, -5.0, -1.0, -0.5, -2.5],
    loss_mask=[1.0, 0.0, 1.0, 1.0, 1.0, 1.0],  # the second token was not written by the policy
    teacher_top1=[1.0, 1.0, 0.0, 0.0, 1.0, 0.0],
)


@pytest.mark.parametrize(
    ("discount", "expected"),
    [
        (0.0, [-0.5, 0.0, -2.0, 0.0, 0.0, -2.0]),
        (0.5, [-1.5, 0.0, -2.0, 0.0, -1.0, -2.0]),  # the masked token takes no time step
        (1.0, [-2.5, 0.0, -2.0, 0.0, -2.0, -2.0]),
    ],
)
def test_by_hand(discount: float, expected: list[float]) -> None:
    found, metrics = advantages(BATCH, discount)
    assert found == pytest.approx(expected)
    assert metrics["kl_k1"] == pytest.approx(4.5 / 5)
    assert metrics["kl_k1_per_completion"] == pytest.approx(4.5 / 3)
    assert metrics["teacher_agreement"] == pytest.approx(2 / 5)
    trained = [value for value, mask in zip(expected, BATCH.data["loss_mask"], strict=True) if mask]
    assert metrics["advantage_std"] == pytest.approx(np.std(trained))


def test_without_masks_and_without_trained_tokens() -> None:
    keys = ["prompt", "completion", "logprobs", "teacher_logprobs"]
    found, metrics = advantages(BATCH.select(keys=keys))
    assert found[1] == 1.0 and "teacher_agreement" not in metrics
    nothing = sample(
        [[2]], logprobs=[-1.0, -1.0], teacher_logprobs=[-2.0, -3.0], loss_mask=[0.0, 0.0]
    )
    assert advantages(nothing) == ([0.0, 0.0], {})


def test_a_discount_outside_its_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"discount=1.5 must be"):
        make_host_function("teacher_advantages", {"discount": 1.5})


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """One position, with every token once, weighted by its probability under the sampler.

    The loss is the policy loss that `distill` trains.
    """
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    logp, reference = student.log_softmax(-1), teacher.log_softmax(-1)
    values = {"logprobs": logp.tolist(), "teacher_logprobs": reference.tolist()}
    batch = sample([[1]] * 7, **values)
    found, _ = advantages(batch)
    held = batch.update(sample([[1]] * 7, advantages=found))
    rows = SampleRows(held, PackLayout.from_sample(held), torch.device("cpu"), torch.float64)
    loss = GRPOLoss(loss_type="dapo")
    total = torch.zeros((), dtype=torch.float64)
    for token, weight in enumerate(logp.exp().tolist()):
        others = [id for id in held.ids if id != f"id{token}"]
        masked = held.update(
            SequenceSample.from_default(
                held.ids,
                [1] * 7,
                {"loss_mask": torch.tensor([float(id not in others) for id in held.ids])},
            )
        )
        rows = SampleRows(
            masked, PackLayout.from_sample(masked), torch.device("cpu"), torch.float64
        )
        total = (
            total
            + weight
            * loss({"logprobs": logp, "entropy": logp.detach()}, rows, loss.denominators(masked))[0]
        )
    [ours] = torch.autograd.grad(total, student, retain_graph=True)
    [exact] = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), student)
    # Advantages are stored in float32. One of a token with log-prob l that is wrong by d changes the
    # gradient by p d times that of l, whose elements are at most 1.
    stored = gamma(1) * (logp.exp() * (logp - reference).abs()).sum().item()
    assert_within(ours, exact, stored)
    assert exact.abs().max() > 0.05
