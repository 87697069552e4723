"""Several ids a row over a vocabulary that ranks hold parts of: log-probs of one rank with all of
it, and their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel.exact import same
from tests.ranks import Ranks
from tests.roundings import LIKELY, exactly
from weft.algorithms.base import Output
from weft.models.network.event_outputs import compute_given_outputs, compute_top_outputs
from weft.models.network.output_projection import WHOLE, OutputProjection, OutputVocabulary
from weft.models.network.packed import RowGradient, SamplingSupport, TopIds
from weft.models.network.token_outputs import compute_token_outputs
from weft.parallel.tensor import SplitVocabulary
from weft.topology import compute_vocabulary

N, H, V = 9, 5, 11
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    count: int = 4  # ids a row
    softcap: float | None = None
    bias: bool = False
    below: int | None = None
    labelled: bool = True
    by_row: bool = False  # gradients are made with the outputs
    dtype: torch.dtype = torch.float64


CASES = {
    "plain": Case(),
    "not labelled": Case(labelled=False),
    "cap and bias": Case(softcap=1.5, bias=True),
    "nearly all": Case(count=10),  # all that a rank holds, in some rows
    "all": Case(count=V, bias=True),
    "of the first rank": Case(below=3),
    "with the outputs": Case(by_row=True, bias=True),
    "kernels": Case(dtype=torch.float32),
}


def row_gradient(weights: Tensor, labelled: bool) -> RowGradient:
    def gradient(out: Mapping[Output, Tensor]) -> Mapping[Output, Tensor]:
        made: dict[Output, Tensor] = {"given_logprobs": weights.clone()}
        return (
            {**made, "logprobs": torch.full((N,), 0.5, dtype=weights.dtype)} if labelled else made
        )

    return gradient


def run(case: Case, rank: int, size: int, *, wide: bool = False) -> tuple[Values, Values]:
    """(outputs, gradients) of a rank that holds its part of the vocabulary; `wide`: in float64,
    of the same numbers.
    """
    generator = torch.Generator().manual_seed(3)
    dtype = torch.float64 if wide else case.dtype
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=case.dtype).to(dtype)
        for shape in ((N, H), (V, H), (V,))
    )
    labels = torch.randint(0, V, (N,), generator=generator)
    ids = torch.stack(
        [torch.randperm(V, generator=generator)[: case.count] for _ in range(N)]
    ).int()
    weights = torch.randn(N, case.count + 1, generator=generator, dtype=case.dtype).to(dtype)
    if case.count == V:
        weights[:, -1] = 0.0  # there are no other ids
    own, vocabulary = compute_vocabulary(V, size, rank), cast(OutputVocabulary, WHOLE)
    if size > 1:
        group = dist.group.WORLD
        assert group is not None
        vocabulary = SplitVocabulary(own.start, V, group)
    leaves = {"hidden": hidden, "weight": weight[own].clone()} | (
        {"bias": bias[own].clone()} if case.bias else {}
    )
    for leaf in leaves.values():
        leaf.requires_grad_()
    projection = OutputProjection(leaves["weight"], leaves.get("bias"), case.softcap, vocabulary)
    top = compute_top_outputs(
        hidden, projection, TopIds(case.count, case.below), temperature=0.7, chunk=4
    )
    known = row_gradient(weights, case.labelled) if case.by_row else None
    found = compute_given_outputs(
        leaves["hidden"],
        labels,
        ids,
        projection,
        temperature=0.7,
        labelled=case.labelled,
        chunk=4,
        gradient=known,
    )
    loss = torch.where(weights != 0, weights * found["given_logprobs"], 0.0).sum()
    if case.labelled:
        loss = loss + 0.5 * found["logprobs"].sum()
    loss.backward()
    outputs = {str(name): value.detach() for name, value in (top | found).items()}
    return outputs, {
        name: leaf.grad.clone() for name, leaf in leaves.items() if leaf.grad is not None
    }


def split(case: Case) -> tuple[Values, Values]:
    return run(case, dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize("name", list(CASES))
def test_two_parts_are_as_one(name: str, ranks: Ranks) -> None:
    check(CASES[name], ranks, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_four_parts_are_as_one(name: str, four_ranks: Ranks) -> None:
    check(CASES[name], four_ranks, 4)


def supported(size: int, dtype: torch.dtype, *, wide: bool = False) -> Values:
    """Outputs over two kept ids a row, and gradients of a rank's part of the output matrix."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (
        torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((N, H), (V, H))
    )
    if wide:
        hidden, weight = hidden.double(), weight.double()
    labels = torch.arange(N) % V
    kept = SamplingSupport(
        torch.stack([labels, (labels + 1) % V], dim=1).flatten(), torch.full((N,), 2)
    )
    own, vocabulary, group = slice(0, V), cast(OutputVocabulary, WHOLE), dist.group.WORLD
    if size > 1:
        assert group is not None
        own = compute_vocabulary(V, size, dist.get_rank())
        vocabulary = SplitVocabulary(own.start, V, group)
    part = weight[own].clone().requires_grad_()
    want = frozenset[Output]({"logprobs", "entropy", "top1"})
    found = compute_token_outputs(
        hidden,
        labels,
        OutputProjection(part, vocabulary=vocabulary),
        want,
        temperature=0.7,
        support=kept,
        chunk=4,
    )
    (found["logprobs"].sum() + 0.3 * found["entropy"].sum()).backward()
    assert part.grad is not None
    gradient = torch.zeros_like(weight)
    gradient[own] = part.grad
    return {str(name): value.detach() for name, value in found.items()} | {"gradient": gradient}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_whose_kept_ids_are_all_on_one_rank(dtype: torch.dtype, ranks: Ranks) -> None:
    expected, errors = bound_values(lambda: supported(1, dtype, wide=True), dtype)
    found = ranks.run(supported, 2, dtype)
    total = sum(each["gradient"] for each in found)
    for each in found:
        same({**each, "gradient": total}, expected, errors)


def bound_values(compute: Callable[[], Values], dtype: torch.dtype) -> tuple[Values, Values | None]:
    """Values in float64, and how far those in `dtype` may lie from them if it is another."""
    if dtype == torch.float64:
        return compute(), None
    values = compute()
    found = exactly(lambda: list(compute().values()), dtype)
    errors = [torch.tensor(LIKELY * each.deviation) for each in found]
    return values, dict(zip(values, errors, strict=True))


def check(case: Case, ranks: Ranks, size: int) -> None:
    def compute() -> Values:
        outputs, gradients = run(case, 0, 1, wide=True)
        return outputs | {f"gradient of {name}": value for name, value in gradients.items()}

    expected, errors = bound_values(compute, case.dtype)
    every = ranks.run(split, case)
    total = sum(grads["hidden"] for _, grads in every)
    for rank, (made, grads) in enumerate(every):
        own = compute_vocabulary(V, size, rank)
        wanted = {
            name: value[own] if name in ("gradient of weight", "gradient of bias") else value
            for name, value in expected.items()
        }
        found = made | {f"gradient of {name}": value for name, value in grads.items()}
        same({**found, "gradient of hidden": total}, wanted, errors)
