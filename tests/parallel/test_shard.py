"""Sharded networks under a pipeline that halves backward passes: gradients, how often they are
summed, what is whole.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from tests.models.common import tiny
from tests.parallel.test_pipeline import Case, gradients_of, loss_of, microbatches
from tests.ranks import Ranks
from weft.models.network.transformer import Transformer
from weft.parallel import backward_halves
from weft.parallel.mesh import ProcessGroups, RankMesh
from weft.parallel.pipeline import Outputs, Pipeline, split_network
from weft.parallel.schedule import Kind
from weft.parallel.shard import LocalShards, list_parameter_groups, shard
from weft.topology import Layout, Mesh

LAYERS, COUNT, WIDTH = 4, 3, torch.float64


@dataclass(frozen=True)
class Seen:
    """`sums` of each parameter's gradient over the ranks; `most`: blocks of a stage that were whole
    while gradients of weights were made; `whole`: parameters that were so after the last pass;
    `second`: second halves, counted by groups of weights; `kept`: the most whole gradients that
    were there between two passes.
    """

    gradients: dict[str, torch.Tensor]
    sums: list[int]
    most: int
    whole: int
    second: int
    kept: int


def build(case: Case) -> Transformer:
    network = tiny("llama", dtype=WIDTH, num_hidden_layers=LAYERS, tie_word_embeddings=case.tied)
    network.recompute_every = int(case.recompute)
    return network


def loss(case: Case, step: int, number: int, found: Outputs) -> torch.Tensor:
    """The last micro-batch trains nothing where the case says so, of both ranks or of the second
    alone.
    """
    value = loss_of(Case(), number + step, found)
    unmoved = case.form == "unmoved" or (case.form == "unmoved by one" and step == 1)
    return value.detach() if unmoved and number == COUNT - 1 else value


def whole_gradients(network: Transformer) -> int:
    groups = [
        group
        for module in network.modules()
        if isinstance(module, FSDPModule)
        for group in list_parameter_groups(module)
    ]
    every = [
        parameter
        for group in groups
        for parameter in group.fsdp_params
        if hasattr(parameter, "_unsharded_param")
    ]
    return sum(
        p.unsharded_accumulated_grad is not None or p._unsharded_param.grad is not None
        for p in every
    )


def trained(case: Case, sums_once: bool) -> Seen:
    """One rank of two that share all parameters; it holds both stages, and has micro-batches of its
    own.
    """
    whole_network, mesh = (
        build(case),
        RankMesh(Mesh.on_first_devices(Layout(data=2, fsdp=2)), dist.get_rank(), ProcessGroups()),
    )
    networks = dict(enumerate(split_network(whole_network, [range(2), range(2, LAYERS)])))
    shard(networks.values(), mesh, torch.device("cpu"), WIDTH)
    sums, second, most, kept = Counter[torch.Tensor](), 0, 0, 0
    for parameter in whole_network.parameters():
        parameter.register_post_accumulate_grad_hook(lambda summed: sums.update([summed]))

    def whole(part: torch.nn.Module) -> int:
        return sum(not isinstance(parameter, DTensor) for parameter in part.parameters())

    halve = backward_halves._accumulate

    def seen(group: dict[str, Any]) -> None:
        nonlocal second, most
        second += 1
        most = max(
            most,
            *(sum(whole(block) > 0 for block in network.blocks) for network in networks.values()),
        )
        halve(group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward_halves, "_accumulate", seen)
        step = dist.get_rank()

        def loss_here(number: int, found: Outputs) -> torch.Tensor:
            nonlocal kept
            kept = max(kept, *map(whole_gradients, networks.values()))
            return loss(case, step, number, found)

        Pipeline(networks, case.kind, sums_once=sums_once).train(
            microbatches(case, step), loss_here
        )
    parameters = list(whole_network.parameters())
    assert sums.keys() == set(parameters)
    shards = LocalShards(whole_network)
    shards.take_gradients()
    gradients = {
        name: part.grad.clone() for name, part in shards.stored.items() if part.grad is not None
    }
    left = whole(whole_network)
    return Seen(gradients, list(sums.values()), most, left, second, kept)


def alone(case: Case) -> dict[str, torch.Tensor]:
    network = build(case)
    for step in range(2):
        for number, one in enumerate(microbatches(case, step)):
            found = network(one.x, one.want)
            assert isinstance(found, dict)
            value = loss(case, step, number, found)
            if value.requires_grad:
                value.backward()
    return gradients_of(network)


@pytest.mark.slow_cases("-unmoved-True-False")
@pytest.mark.default_cases(
    "interleaved_1f1b-False--False-False",
    "interleaved_1f1b-False-unmoved-True-True",
    "zbv-False-unmoved by one-False-True",
    "zbv-False--True-True",
    "zbv-True-unmoved by one-True-True",
    "zbv-True--True-False",
)
@pytest.mark.parametrize("sums_once", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("form", ["", "unmoved", "unmoved by one"])
@pytest.mark.parametrize(
    ("kind", "tied"), [("zbv", False), ("zbv", True), ("interleaved_1f1b", False)]
)
def test_gradients_are_summed_once_or_after_each_pass(
    kind: Kind, tied: bool, form: str, recompute: bool, sums_once: bool, ranks: Ranks
) -> None:
    """Of a matrix that both stages read those of the second may come later than the first one's
    last.
    """
    case = Case(kind=kind, count=COUNT, form=form, recompute=recompute, tied=tied)
    expected, found = alone(case), ranks.run(trained, case, sums_once)
    for name, whole in expected.items():
        parts = [each.gradients[name] for each in found if name in each.gradients]
        assert_close(
            torch.cat(parts), whole, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
        )
    for each in found:
        times = 1 if sums_once else COUNT
        assert sorted(each.sums)[:-1] == [times] * (len(each.sums) - 1) and max(
            each.sums
        ) <= times * (1 + tied)
        assert (each.kept > 0) == sums_once
        assert (each.most <= 1, each.whole) == (True, 0)
        assert (each.second > 0) == (kind == "zbv" and not recompute)
