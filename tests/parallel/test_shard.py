"""Sharded networks whose backward passes a pipeline takes apart: sums of gradients, when they are sent, what is whole meanwhile."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from tests.models.common import tiny
from tests.parallel.test_pipeline import Case, gradients_of, loss_of, microbatches
from tests.ranks import Ranks
from weft.models.network.parameters import canonical
from weft.models.network.transformer import Transformer
from weft.parallel import pipeline as pipelines
from weft.parallel.mesh import ProcessGroups, RankMesh
from weft.parallel.pipeline import Outputs, Pipeline
from weft.parallel.schedule import Kind
from weft.parallel.shard import Shards, shard
from weft.topology import Layout, Mesh

LAYERS, COUNT, WIDTH = 4, 3, torch.float64


@dataclass(frozen=True)
class Seen:
    """`sums` of a parameter's gradient over the ranks; `most`: blocks of a stage that were whole while gradients of weights were made;
    `whole`: parameters that were so after the last pass; `second`: second halves of a backward pass."""

    gradients: dict[str, torch.Tensor]
    sums: int
    most: int
    whole: int
    second: int


def build() -> Transformer:
    return tiny("llama", dtype=WIDTH, num_hidden_layers=LAYERS)


def halves(known: Transformer, layers: range) -> Transformer:
    network = Transformer.empty(known.config, dtype=WIDTH, layers=layers)
    values = {name: part.data for name, part in canonical(known).items()}
    for name, part in canonical(network).items():
        part.data.copy_(values[name])
    return network


def loss(case: Case, step: int, number: int, found: Outputs) -> torch.Tensor:
    """The last micro-batch trains nothing where the case says so."""
    value = loss_of(Case(), number + step, found)
    return value.detach() if case.form == "unmoved" and number == COUNT - 1 else value


def trained(case: Case) -> Seen:
    """One rank of two that share all parameters; it holds both stages, and has micro-batches of its own."""
    known, mesh = build(), RankMesh(Mesh.first(Layout(data=2, fsdp=2)), dist.get_rank(), ProcessGroups())
    networks = {0: halves(known, range(2)), 1: halves(known, range(2, LAYERS))}
    for network in networks.values():
        network.recompute_every = int(case.recompute)
    shard(networks.values(), mesh, torch.device("cpu"), WIDTH)
    sums, second, most = Counter[torch.Tensor](), 0, 0
    for network in networks.values():
        for parameter in network.parameters():
            parameter.register_post_accumulate_grad_hook(lambda summed: sums.update([summed]))

    def whole(part: torch.nn.Module) -> int:
        return sum(not isinstance(parameter, DTensor) for parameter in part.parameters())

    halve = pipelines._accumulate_group

    def seen(group: dict[str, Any]) -> None:
        nonlocal second, most
        second += 1
        most = max(most, *(sum(whole(block) > 0 for block in network.blocks) for network in networks.values()))
        halve(group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelines, "_accumulate_group", seen)
        step = dist.get_rank()
        Pipeline(networks, case.kind).train(microbatches(case, step), lambda n, found: loss(case, step, n, found))
    gradients = {}
    for network in networks.values():
        shards = Shards(network)
        shards.take_gradients()
        gradients |= {name: part.grad.clone() for name, part in shards.stored.items() if part.grad is not None}
    assert len(sums) == sum(len(list(network.parameters())) for network in networks.values())
    return Seen(gradients, max(sums.values()), most, sum(map(whole, networks.values())), second)


def alone(case: Case) -> dict[str, torch.Tensor]:
    network = build()
    for step in range(2):
        for number, one in enumerate(microbatches(case, step)):
            found = network(one.x, one.want)
            assert isinstance(found, dict)
            value = loss(case, step, number, found)
            if value.requires_grad:
                value.backward()
    return gradients_of(network)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("form", ["", "unmoved"])
@pytest.mark.parametrize("kind", ["zbv", "interleaved_1f1b"])
def test_gradients_of_all_passes_are_summed_once(kind: Kind, form: str, recompute: bool, ranks: Ranks) -> None:
    case = Case(kind=kind, count=COUNT, form=form, recompute=recompute)
    expected, found = alone(case), ranks.run(trained, case)
    for name, whole in expected.items():
        parts = [each.gradients[name] for each in found if name in each.gradients]
        assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
    for each in found:
        assert (each.sums, each.whole) == (1, 0)
        assert each.most <= 1
        assert (each.second > 0) == (kind == "zbv" and not recompute)
