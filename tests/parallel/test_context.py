"""A network whose ranks share the tokens of every pack is the network of one rank: outputs,
gradients, three steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.models.common import sequences, tiny
from tests.parallel.exact import bound, same
from tests.parallel.test_tensor import Run
from tests.ranks import Ranks
from weft.kernels.cpu import library
from weft.models.network import lora
from weft.models.network.dropout import DropoutKeys
from weft.models.network.linear import find_canonical_values
from weft.models.network.moe import MoEAuxLoss
from weft.models.network.packed import Packed, SamplingSupport, TopIds, pack
from weft.models.network.transformer import Head, Transformer
from weft.parallel import context

WANT = {
    "lm": frozenset({"logprobs", "entropy", "top1"}),
    "value": frozenset({"values"}),
    "score": frozenset({"scores"}),
}
STEPS, RATE, BALANCE = 3, 0.02, 0.1
PACKS = ([9, 17, 5], [40], [1, 2], [3, 3, 3, 3, 21])  # tokens of each sequence
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    family: str = "llama"
    head: Head = "lm"
    dtype: torch.dtype = torch.float64
    kernels: bool = True
    changes: dict[str, Any] = field(default_factory=dict)
    recomputes: bool = False
    drops: bool = False
    padding: int | None = None
    pooling: str = "last"


CASES = {
    "llama": Case(),
    "gemma2": Case("gemma2"),  # windows, capped scores
    "gpt2": Case("gpt2"),  # learned positions
    "mistral": Case("mistral", changes={"sliding_window": 7}),
    "dropout": Case(
        "gpt2", drops=True, changes={"attn_pdrop": 0.3, "resid_pdrop": 0.2, "embd_pdrop": 0.1}
    ),
    "mixtral": Case("mixtral"),
    "by length": Case(
        changes={
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        }
    ),
    "recomputed": Case("mixtral", recomputes=True),
    "values": Case("qwen2", "value"),
    "scores": Case("llama", "score", padding=3),
    "mean scores": Case("llama", "score", pooling="mean"),
    "kernels": Case(dtype=torch.float32),
    "kernels with windows": Case("mistral", changes={"sliding_window": 7}, dtype=torch.float32),
    "no kernels": Case(kernels=False),
}


def build(case: Case) -> Transformer:
    network = tiny(case.family, case.head, dtype=case.dtype, **case.changes)
    network.recompute_every, network.padding = int(case.recomputes), case.padding
    network.pooling = case.pooling  # type: ignore[assignment]
    return network


def packs(case: Case) -> list[Packed]:
    made = []
    for seed, lengths in enumerate(PACKS, 1):
        drawn = sequences(lengths, seed=seed)
        if case.padding is not None:
            for row in drawn:
                row[-(len(row) // 2) :] = case.padding
        packed = pack(drawn)
        if case.drops:
            keys = DropoutKeys.from_sequences(
                3, 0, [(str(number), 0) for number in range(len(lengths))]
            )
            packed = replace(packed, dropout=keys)
        if case.family == "mixtral":
            packed = replace(packed, aux_loss=MoEAuxLoss(torch.tensor(lengths)))
        made.append(packed)
    return made


def run(case: Case, network: Transformer, complete: Callable[[], None] = lambda: None) -> Run:
    """Three steps over the packs; `complete` is called before each step of the optimizer."""
    rule = torch.optim.SGD(network.parameters(), lr=RATE, momentum=0.9)
    outputs: list[Values] = []
    gradients: Values = {}
    for number in range(STEPS):
        for packed in packs(case):
            found = network(packed, WANT[case.head])
            assert isinstance(found, dict)
            loss = sum(
                (torch.cos(torch.arange(len(v)) + 0.1) * v).sum()
                for v in found.values()
                if v.requires_grad
            )
            if packed.aux_loss is not None:
                loss = loss + BALANCE * packed.aux_loss.compute_by_sequence().sum()
            assert isinstance(loss, Tensor)
            loss.backward()
            if number == 0:
                outputs.append({str(name): value.detach() for name, value in found.items()})
        complete()
        if number == 0:
            gradients = {
                name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None
            }
        rule.step()
        rule.zero_grad()
    return Run(
        outputs,
        gradients,
        {name: value.clone() for name, value in find_canonical_values(network).items()},
    )


def shared(case: Case) -> Run:
    """On each rank: its part of every pack."""
    network, group = build(case), dist.group.WORLD
    assert group is not None
    context.join(network, group)

    def complete() -> None:
        for parameter in network.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=group)

    return on_rank(case, network, complete)


def on_rank(case: Case, network: Transformer, complete: Callable[[], None] = lambda: None) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        if not case.kernels:
            patch.setattr(library, "load_library", lambda: None)
        return run(case, network, complete)


def check(case: Case, ranks: Ranks) -> None:
    if case.dtype == torch.float64:
        expected, far = on_rank(case, build(case)), None
    else:
        expected, far = bound(lambda: run(case, build(case).double()))
    for found in ranks.run(shared, case):
        for part in ("gradients", "parameters"):
            same(getattr(found, part), getattr(expected, part), far and getattr(far, part), part)
        for number, (one, other) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
            same(one, other, far and far.outputs[number], "outputs of")


@pytest.mark.default_cases(
    "by length", "gpt2", "llama", "mixtral", "recomputed", "scores", "values"
)
@pytest.mark.parametrize("name", list(CASES))
def test_two_ranks_are_as_one(name: str, ranks: Ranks) -> None:
    check(CASES[name], ranks)


@pytest.mark.slow_cases("llama", "dropout", "recomputed", "mean scores", "kernels with windows")
@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_four_ranks_are_as_one(name: str, four_ranks: Ranks) -> None:
    check(CASES[name], four_ranks)


def asked(joined: bool) -> list[dict[str, Tensor]]:
    """Outputs of several ids a row, log-probs over a support, and with adapters."""
    network = tiny(dtype=torch.float64)
    lora.attach(network, r=3, seed=1)
    if joined:
        group = dist.group.WORLD
        assert group is not None
        context.join(network, group)
    (packed, *_) = packs(Case())
    generator = torch.Generator().manual_seed(2)
    ids = torch.stack(
        [torch.randperm(131, generator=generator)[:4] for _ in range(len(packed.rows))]
    )
    counts = torch.arange(len(packed.rows)) % 3
    support = SamplingSupport(
        torch.randint(0, 131, (int(counts.sum()),), generator=generator), counts
    )
    top = network(replace(packed, ids=TopIds(3)), frozenset({"top_ids", "top_logprobs"}))
    given_ids = network(replace(packed, ids=ids), frozenset({"given_logprobs", "logprobs"}), 0.7)
    supported = network(packed, frozenset({"logprobs"}), 1.3, support)
    return [{str(k): v.detach() for k, v in found.items()} for found in (top, given_ids, supported)]  # type: ignore[union-attr]


def test_other_outputs(ranks: Ranks) -> None:
    expected = asked(False)
    for found in ranks.run(asked, True):
        for one, other in zip(found, expected, strict=True):
            same(one, other)


@given(st.integers(1, 200), st.integers(2, 9))
def test_every_token_has_one_rank_and_ranks_have_as_many(length: int, size: int) -> None:
    each = [
        [t for run in context.find_token_runs(length, size, rank) for t in range(*run)]
        for rank in range(size)
    ]
    assert sorted(t for tokens in each for t in tokens) == list(range(length))
    assert max(map(len, each)) - min(map(len, each)) <= 2


def test_long_sequences_cost_ranks_alike() -> None:
    """(query, key) pairs of one sequence."""
    pairs = [
        sum(t + 1 for run in context.find_token_runs(800, 4, rank) for t in range(*run))
        for rank in range(4)
    ]
    assert max(pairs) < 1.01 * min(pairs)
