"""Statistics, gradients and draws of rows of logits, against torch in float64 up to what their
arithmetic may lose.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bounds import SoftmaxErrors, assert_within, gamma
from weft.kernels.cpu import rows

# Exponentials are added up in float32 in blocks of 128, in vectors of 4 floats or more, whose 4 or
# more sums are added two by two; blocks in float64.
ADDITIONS = 128 // 4 + 2


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
    found = rows.statistics(x, entropy=True, best=True)
    assert found.entropy is not None and found.best is not None
    errors = SoftmaxErrors(x, ADDITIONS)
    assert_within(found.lse, wide.logsumexp(-1), errors.of_lse)
    assert_within(found.entropy, entropy, errors.of_entropy)
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
        rows.to_gradients(made, found, labels, grad_logprob, wanted_entropy)
        bound = errors.of_gradients(labels, grad_logprob, wanted_entropy)
        assert_within(made, expected.nan_to_num(), bound)


@pytest.mark.parametrize("size", [2, 40, 300])
def test_rows_of_which_nothing_is_possible(size: int) -> None:
    x = torch.full((3, size), -torch.inf)
    x[1] = 0.0
    x[2, -1] = torch.nan
    found = rows.statistics(x, entropy=True)
    assert found.entropy is not None
    assert found.lse[0] == -torch.inf and found.entropy[0] == 0.0
    # ones, added up exactly; their logarithm is taken in float64 and rounded
    exact = torch.tensor(float(size)).double().log()
    assert_within(found.lse[1], exact, gamma(1) * exact)
    assert found.lse[2].isnan() and found.entropy[2].isnan()


def test_logits_that_are_no_numbers_show() -> None:
    x = torch.zeros(3, 40)
    x[1, 7], x[2, 39] = torch.nan, torch.inf
    lse = rows.statistics(x).lse
    assert lse.isfinite().tolist() == [True, False, False]
    assert rows.draw(x, torch.full((3,), 0.5, dtype=torch.float64))[1].isfinite().tolist() == [
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
    ids, logprobs = rows.draw(x, uniforms)
    assert torch.equal(logprobs, x.gather(-1, ids[:, None])[:, 0] - rows.statistics(x).lse)
    sums, errors = x.double().softmax(-1).cumsum(-1), SoftmaxErrors(x, ADDITIONS)
    for row, (id, lost) in enumerate(
        zip(ids.tolist(), errors.of_probabilities.tolist(), strict=True)
    ):
        assert x[row, id] > -torch.inf
        before = float(sums[row, id - 1]) if id else 0.0
        assert before - lost <= uniforms[row] <= float(sums[row, id]) + lost
    alone, _ = rows.draw(x[1:2], uniforms[1:2])
    assert alone[0] == ids[1]
