"""Statistics, gradients and draws of rows of logits, against torch in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from weft.kernels.cpu import softmax


@pytest.mark.parametrize("size", [7, 128, 300, 1029])
def test_statistics_and_gradients_of_logits(size: int) -> None:
    torch.manual_seed(size)
    x, labels = torch.randn(6, size) * 4, torch.randint(0, size, (6,))
    x[0, 1:3] = x[0].max() + 1  # two equal ones: the first counts
    x[1, ::2] = -torch.inf
    labels[1] = 1
    wide = x.double().requires_grad_()
    logp = wide.log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0)).sum(-1)
    found = softmax.statistics(x, entropy=True, best=True)
    assert found.entropy is not None and found.best is not None
    assert_close(found.lse.double(), wide.logsumexp(-1), atol=1e-6, rtol=1e-6)
    assert_close(found.entropy.double(), entropy, atol=2e-6, rtol=1e-6)
    assert found.best.tolist() == [1, *x[1:].argmax(-1).tolist()]
    grad_logprob, grad_entropy = torch.randn(6), torch.randn(6)
    at_label = logp.gather(1, labels[:, None])[:, 0]
    finite = wide.masked_fill(wide == -torch.inf, -1e30)
    logp = finite.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    for wanted_entropy in (grad_entropy, None):
        value = (grad_logprob * at_label).sum() + (
            0.0 if wanted_entropy is None else (wanted_entropy * entropy).sum()
        )
        (expected,) = torch.autograd.grad(value, wide, retain_graph=True)
        made = x.clone()
        softmax.to_gradients(made, found, labels, grad_logprob, wanted_entropy)
        assert_close(made.double(), expected.nan_to_num(), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("size", [2, 40, 300])
def test_rows_of_which_nothing_is_possible(size: int) -> None:
    x = torch.full((3, size), -torch.inf)
    x[1] = 0.0
    x[2, -1] = torch.nan
    found = softmax.statistics(x, entropy=True)
    assert found.entropy is not None
    assert found.lse[0] == -torch.inf and found.entropy[0] == 0.0
    assert_close(found.lse[1], torch.tensor(float(size)).log())
    assert found.lse[2].isnan() and found.entropy[2].isnan()


def test_logits_that_are_no_numbers_show() -> None:
    x = torch.zeros(3, 40)
    x[1, 7], x[2, 39] = torch.nan, torch.inf
    lse = softmax.statistics(x).lse
    assert lse.isfinite().tolist() == [True, False, False]
    assert softmax.draw(x, torch.full((3,), 0.5, dtype=torch.float64))[1].isfinite().tolist() == [
        True,
        False,
        False,
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(0, 99), st.floats(0, 1, exclude_max=True))
def test_draws_are_the_inverse_of_the_running_sum(size: int, seed: int, uniform: float) -> None:
    torch.manual_seed(seed)
    x = torch.randn(3, size) * 3
    x[1, torch.randperm(size)[: size // 2]] = -torch.inf
    uniforms = torch.tensor([uniform, uniform / 2, 0.0], dtype=torch.float64)
    ids, logprobs = softmax.draw(x, uniforms)
    assert torch.equal(logprobs, x.gather(-1, ids[:, None])[:, 0] - softmax.statistics(x).lse)
    sums = x.double().softmax(-1).cumsum(-1)
    for row, id in enumerate(ids.tolist()):
        assert x[row, id] > -torch.inf
        before = float(sums[row, id - 1]) if id else 0.0
        assert before - 1e-6 <= uniforms[row] <= float(sums[row, id]) + 1e-6
    alone, _ = softmax.draw(x[1:2], uniforms[1:2])
    assert alone[0] == ids[1]
