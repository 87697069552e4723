"""Softmax by torch is softmax by the kernels, and both are the formula's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.bounds import SoftmaxErrors, assert_within
from weft import kernels
from weft.kernels.cpu import library


def rows(size: int) -> Tensor:
    x = torch.randn(6, size, generator=torch.Generator().manual_seed(size)) * 4
    x[1, ::2] = -torch.inf
    x[2, 1:3] = x[2].max() + 1  # two equal ones: the first counts
    return x


@pytest.fixture(params=["kernel", "torch"])
def _by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(library, "load_library", lambda: None)
    elif library.load_library() is None:
        pytest.skip("needs g++")


def by_autograd(
    x: Tensor, labels: Tensor, grad_logprob: Tensor, grad_entropy: Tensor | None
) -> Tensor:
    """The gradient by the logits, in float64."""
    wide = x.double().requires_grad_()
    logp = wide.masked_fill(wide == -torch.inf, -1e30).log_softmax(-1)
    at_label = logp.gather(1, labels.clamp_min(0)[:, None])[:, 0]
    elsewhere = -wide.logsumexp(-1)  # less the logit that is not here
    value = (grad_logprob * torch.where(labels >= 0, at_label, elsewhere)).sum()
    if grad_entropy is not None:
        value = value - (grad_entropy * (logp.exp() * logp).sum(-1)).sum()
    (expected,) = torch.autograd.grad(value, wide)
    return expected


@pytest.mark.usefixtures("_by")
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("size", [7, 300])
def test_gradients_are_those_of_autograd(size: int, with_entropy: bool, contiguous: bool) -> None:
    """A label below 0 is none of these ids."""
    x = rows(size)
    labels = torch.tensor([3, 1, 2, -1, size - 1, 0])
    grad_logprob, grad_entropy = (
        torch.linspace(-1, 2, 6),
        torch.linspace(1, -2, 6) if with_entropy else None,
    )
    expected = by_autograd(x, labels, grad_logprob, grad_entropy)
    found = kernels.statistics(x, entropy=with_entropy)
    made = x.clone() if contiguous else torch.stack([x, x], dim=-1)[..., 0]
    assert made.is_contiguous() == contiguous
    kernels.to_gradients(made, found, labels, grad_logprob, grad_entropy)
    bound = SoftmaxErrors(x, size).of_gradients(labels, grad_logprob, grad_entropy)
    assert_within(made, expected.nan_to_num(), bound)


@pytest.mark.usefixtures("_by")
@pytest.mark.parametrize("with_entropy", [True, False])
def test_gradients_of_a_part_of_the_ids_are_that_part(with_entropy: bool) -> None:
    """The statistics may be of a softmax over more ids, as where the vocabulary lies on several
    ranks.
    """
    x, labels, grad = rows(30), torch.tensor([3, 1, 12, 29, 20, 0]), torch.linspace(-1, 2, 6)
    found = kernels.statistics(x, entropy=with_entropy)
    whole, first, second = x.clone(), x[:, :17].clone(), x[:, 17:].clone()
    grad_entropy = grad.flip(0) if with_entropy else None
    kernels.to_gradients(whole, found, labels, grad, grad_entropy)
    kernels.to_gradients(first, found, torch.where(labels < 17, labels, -1), grad, grad_entropy)
    kernels.to_gradients(second, found, (labels - 17).clamp_min(-1), grad, grad_entropy)
    exact = by_autograd(x, labels, grad, grad_entropy).nan_to_num()
    bound = SoftmaxErrors(x, 30).of_gradients(labels, grad, grad_entropy)
    assert_within(whole, exact, bound)
    assert_within(torch.cat([first, second], dim=1), exact, bound)


@pytest.mark.usefixtures("_by")
def test_statistics_are_the_formulas() -> None:
    x = rows(300)
    found, wide = kernels.statistics(x, entropy=True, best=True), x.double()
    logp = wide.log_softmax(-1)
    assert found.entropy is not None and found.best is not None
    errors = SoftmaxErrors(x, 300)
    assert_within(found.lse, wide.logsumexp(-1), errors.of_lse)
    entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0)).sum(-1)
    assert_within(found.entropy, entropy, errors.of_entropy)
    assert found.best.tolist() == wide.argmax(-1).tolist() and found.best[2] == 1
