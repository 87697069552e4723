"""Ranks that hold some experts each compute what one rank with all of them does: outputs and
gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from tests.models.common import sequences, tiny
from tests.ranks import Ranks
from weft.models.network import lora
from weft.models.network.dropout import DropoutKeys
from weft.models.network.linear import find_canonical_parameters
from weft.models.network.packed import Packed, pack
from weft.models.network.transformer import Transformer
from weft.parallel import experts, shard
from weft.topology import build_whole_slice, compute_expert_slice, is_expert_weight

WANT = frozenset({"logprobs"})
PACKS = ([9, 17, 5], [2], [30], [4, 4])  # tokens of each sequence, of each rank's pack
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    family: str
    adapters: bool = False
    recomputes: bool = False


CASES = {
    "mixtral": Case("mixtral"),
    "qwen3_moe": Case("qwen3_moe"),
    "adapters that drop": Case("mixtral", adapters=True),
    "recomputed": Case("mixtral", recomputes=True),
}


def packed(case: Case, rank: int) -> Packed:
    made = pack(sequences(PACKS[rank], seed=rank))
    if not case.adapters:
        return made
    return replace(
        made,
        dropout=DropoutKeys.from_sequences(
            1, 2, [(f"{rank}/{n}", 0) for n in range(len(PACKS[rank]))]
        ),
    )


def adapt(network: Transformer, case: Case) -> None:
    network.recompute_every = int(case.recomputes)
    if case.adapters:
        lora.add(network, r=3, alpha=6.0, dropout=0.3)


def filled(case: Case) -> tuple[Transformer, Values]:
    """The whole network, and the values of its parameters."""
    network = tiny(case.family, dtype=torch.float64)
    adapt(network, case)
    generator = torch.Generator().manual_seed(4)
    for name, part in find_canonical_parameters(network).items():
        if lora.is_adapter(name):
            part.data.normal_(std=0.2, generator=generator)
    return network, {name: part.data for name, part in find_canonical_parameters(network).items()}


def apart(case: Case) -> tuple[Values, Values, Values]:
    """On each rank: log-probs of its own pack, gradients, and all parameters as they are gathered
    to generate.
    """
    known, values = filled(case)
    group = dist.group.WORLD
    assert group is not None
    network = Transformer(known.config).double()
    experts.join(network, group)
    adapt(network, case)
    for name, part in find_canonical_parameters(network).items():
        own = compute_expert_slice(
            name, build_whole_slice(tuple(values[name].shape)), group.size(), group.rank()
        )
        part.data.copy_(values[name][own])
    found = network(packed(case, group.rank()), WANT)
    (torch.cos(torch.arange(len(found["logprobs"])) * 1.0) * found["logprobs"]).sum().backward()
    shard.gather(network, known, group)
    gradients = {
        name: part.grad
        for name, part in find_canonical_parameters(network).items()
        if part.grad is not None
    }
    outputs = {"logprobs": found["logprobs"].detach()}
    return (
        outputs,
        gradients,
        {name: part.data for name, part in find_canonical_parameters(known).items()},
    )


@pytest.mark.parametrize("name", list(CASES))
def test_two_ranks_are_as_one(name: str, ranks: Ranks) -> None:
    case = CASES[name]
    network, values = filled(case)
    outputs = [network(packed(case, rank), WANT)["logprobs"] for rank in range(2)]
    sum((torch.cos(torch.arange(len(each)) * 1.0) * each).sum() for each in outputs).backward()  # type: ignore[union-attr]
    expected = {
        name: part.grad
        for name, part in find_canonical_parameters(network).items()
        if part.grad is not None
    }
    found = ranks.run(apart, case)
    for rank, (own, gradients, gathered) in enumerate(found):
        assert_close(own["logprobs"], outputs[rank].detach(), rtol=1e-11, atol=1e-12)
        assert gradients.keys() == expected.keys()
        for key, value in expected.items():
            if is_expert_weight(key):
                where = compute_expert_slice(key, build_whole_slice(tuple(value.shape)), 2, rank)
                assert_close(
                    gradients[key],
                    value[where],
                    rtol=1e-10,
                    atol=1e-12,
                    msg=lambda m, key=key: f"{key}: {m}",
                )
            else:
                total = found[0][1][key] + found[1][1][key]
                assert_close(
                    total, value, rtol=1e-10, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}"
                )
        for key, value in values.items():
            assert torch.equal(gathered[key], value), key
