"""A network whose blocks are sharded over two processes, or of which each holds a part of every
layer, is the whole network.

Log-probs, gradients, and the parameters after three steps of an optimizer: with weft's kernels in
float32, within what the roundings of float32 probably lose, and without them in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from tests.models.common import sequences, tiny
from tests.parallel.exact import bound, same
from tests.ranks import Ranks
from weft.kernels.cpu import library
from weft.models.attention.contexts import Dense, PrefixContinuation, Prefixed
from weft.models.network import lora
from weft.models.network.linear import find_canonical_parameters
from weft.models.network.packed import Packed, pack
from weft.models.network.transformer import Transformer
from weft.parallel import tensor
from weft.registry import families
from weft.topology import compute_tensor_slice

FAMILIES = ("llama", "gemma2", "gpt2", "mixtral")
FORMS = ("packed", "prefixes", "lora", "recomputed")
WANT = frozenset({"logprobs", "entropy", "top1"})
STEPS, RATE = 3, 0.02
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    family: str
    form: str
    kernels: bool
    shares_rows: bool = True


@dataclass(frozen=True)
class Run:
    """What one rank saw: outputs of its first pass over each pack, gradients of the first step,
    parameters after the last.
    """

    outputs: list[Values]
    gradients: Values
    parameters: Values


def build(case: Case) -> Transformer:
    network = tiny(case.family)
    if case.form == "lora":
        adapt(network)
    network.recompute_every = int(case.form == "recomputed")
    return network if case.kernels else network.double()


def adapt(network: Transformer) -> None:
    lora.attach(network, r=4, alpha=8.0, seed=3)
    for name, part in find_canonical_parameters(network).items():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(
                part.data, std=0.1, generator=torch.Generator().manual_seed(len(name))
            )


def packs(case: Case) -> list[tuple[Packed, Tensor]]:
    """Two packs, and how much the log-prob of each token weighs."""
    made = [
        prefixed(seed) if case.form == "prefixes" else pack(sequences([9, 17, 5], seed=seed))
        for seed in (1, 2)
    ]
    return [(packed, torch.cos(torch.arange(len(packed.rows)) * 1.0)) for packed in made]


def prefixed(seed: int) -> Packed:
    """20 tokens, two continuations of them of 10 and 14, and 13 tokens that stand alone."""
    (tokens,) = sequences([57], seed=seed)
    starts = torch.tensor([0, 20, 30, 44, 57], dtype=torch.int32)
    positions = torch.cat(
        [torch.arange(20), torch.arange(20, 30), torch.arange(20, 34), torch.arange(13)]
    )
    context = Prefixed(
        Dense(starts, 20), (PrefixContinuation((0, 20), (20, 44)),), torch.tensor([29, 43, 56])
    )
    rows = torch.tensor([19, *range(20, 29), 19, *range(30, 43), *range(44, 56)])
    labels = torch.tensor([20, *range(21, 30), 30, *range(31, 44), *range(45, 57)])
    return Packed(tokens, positions, context, rows, tokens[labels])


def run(
    network: Transformer,
    given: list[tuple[Packed, Tensor]],
    complete: Callable[[], None] = lambda: None,
) -> Run:
    """Three steps over the packs; `complete` is called before each step of the optimizer."""
    rule = torch.optim.SGD(
        [p for p in network.parameters() if p.requires_grad], lr=RATE, momentum=0.9
    )
    outputs: list[Values] = []
    gradients: Values = {}
    for number in range(STEPS):
        for packed, weights in given:
            found = network(packed, WANT)
            ((found["logprobs"] * weights).sum() + 0.1 * found["entropy"].sum()).backward()
            if number == 0:
                outputs.append({name: value.detach() for name, value in found.items()})
        complete()
        if number == 0:
            gradients = {
                name: whole(part.grad)
                for name, part in find_canonical_parameters(network).items()
                if part.grad is not None
            }
        rule.step()
        rule.zero_grad()
    return Run(
        outputs,
        gradients,
        {name: whole(part.data) for name, part in find_canonical_parameters(network).items()},
    )


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def sharded(case: Case) -> Run:
    """On each rank: every block's parameters are sharded over both, and each computes one of the
    packs.
    """
    network = build(case)
    for block in network.blocks:
        fully_shard(block)
    fully_shard(network)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return run(network, [packs(case)[dist.get_rank()]])


def narrowed(case: Case) -> Run:
    """On each rank: a part of the heads, of the MLP's width and of the vocabulary."""
    known, rank, size = build(case), dist.get_rank(), dist.get_world_size()
    config = known.config
    network = Transformer.build_empty(tensor.narrow_config(config, size, rank))
    if case.form == "lora":
        adapt(network)
    if not case.kernels:
        network.double()
    network.recompute_every = known.recompute_every
    values = {name: part.data for name, part in find_canonical_parameters(known).items()}
    for name, part in find_canonical_parameters(network).items():
        part.data.copy_(
            values[name][compute_tensor_slice(name, tuple(values[name].shape), config, size, rank)]
        )
    group = dist.group.WORLD
    assert group is not None
    shares, device = case.shares_rows, torch.device("cpu")
    tensor.join(network, config, group, shares_rows=shares)
    return run(
        network,
        packs(case),
        lambda: tensor.sum_gradients(
            find_canonical_parameters(network), config, group, device, shares_rows=shares
        ),
    )


CASES = [
    Case(family, form, kernels)
    for kernels in (True, False)
    for family in FAMILIES
    for form in FORMS
    if (family, form) != ("gemma2", "prefixes")  # its attention is capped, and shares none on a CPU
]


def on_rank(function: Callable[[Case], Run], case: Case) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        if not case.kernels:
            patch.setattr(library, "load_library", lambda: None)
        return function(case)


@cache
def alone(case: Case) -> tuple[Run, Run | None]:
    """The whole network in float64, and how far a rank's kernels in float32 may lie from it."""
    given = packs(case)
    if not case.kernels:
        return run(build(case), given), None
    return bound(lambda: run(build(case).double(), given))


def named(case: Case) -> str:
    return f"{case.family}-{case.form}-{'kernels' if case.kernels else 'torch'}"


@pytest.mark.slow_cases(
    "gemma2-recomputed-kernels",
    "gpt2-lora-kernels",
    "mixtral-prefixes-kernels",
    "llama-packed-kernels",
)
@pytest.mark.default_cases(
    "gemma2-packed-torch",
    "gpt2-prefixes-torch",
    "llama-lora-kernels",
    "llama-recomputed-torch",
    "mixtral-packed-kernels",
    "mixtral-lora-torch",
)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_sharded_by_block(case: Case, ranks: Ranks) -> None:
    expected, far = alone(case)
    for rank, found in enumerate(ranks.run(on_rank, sharded, case)):
        same(found.outputs[0], expected.outputs[rank], far and far.outputs[rank], "outputs of")
        same(found.gradients, expected.gradients, far and far.gradients, "gradient of")
        same(found.parameters, expected.parameters, far and far.parameters, "after three steps")


@pytest.mark.slow_cases(
    "gemma2-recomputed-kernels",
    "gpt2-lora-kernels",
    "mixtral-prefixes-kernels",
    "llama-packed-kernels",
)
@pytest.mark.default_cases(
    "gemma2-packed-torch",
    "gpt2-prefixes-torch",
    "gpt2-packed-kernels",
    "llama-lora-kernels",
    "llama-packed-torch",
    "llama-recomputed-torch",
    "mixtral-packed-kernels",
    "mixtral-lora-torch",
)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_part_of_every_layer(case: Case, ranks: Ranks) -> None:
    check_parts(case, ranks, 2)


@pytest.mark.slow_cases("packed", "llama-lora", "gpt2-lora", "mixtral-lora")
@pytest.mark.slow
@pytest.mark.parametrize("form", ["packed", "lora"])
@pytest.mark.parametrize("family", families.list_names())
def test_every_family(family: str, form: str, ranks: Ranks, four_ranks: Ranks) -> None:
    """On four ranks, which are more than some have heads of keys and values."""
    case = Case(family, form, kernels=True)
    if build(case).config.num_heads % 4:
        check_parts(case, ranks, 2)
    else:
        check_parts(case, four_ranks, 4)


def check_parts(case: Case, ranks: Ranks, size: int) -> None:
    (expected, far), config = alone(case), build(case).config
    for rank, found in enumerate(ranks.run(on_rank, narrowed, case)):
        for number, (one, other) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
            same(one, other, far and far.outputs[number], "outputs of")
        for kind in ("gradients", "parameters"):
            every: Values = getattr(expected, kind)
            parts = {
                n: v[compute_tensor_slice(n, tuple(v.shape), config, size, rank)]
                for n, v in every.items()
            }
            same(getattr(found, kind), parts, far and getattr(far, kind), kind)
