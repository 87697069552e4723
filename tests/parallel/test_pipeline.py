"""Networks whose blocks lie on several processes are the whole network: outputs, gradients, three
steps of an optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from tests.bounds import assert_within
from tests.models.common import sequences, tiny
from tests.parallel.exact import bound
from tests.ranks import Ranks
from weft.errors import ConfigError, RunError
from weft.models.network import lora
from weft.models.network.dropout import DropoutKeys
from weft.models.network.linear import find_canonical_parameters
from weft.models.network.moe import MoEAuxLoss
from weft.models.network.packed import Microbatch, pack
from weft.models.network.transformer import Transformer
from weft.parallel.pipeline import Outputs, Pipeline, sum_tied_gradients
from weft.parallel.schedule import Kind, build_placement
from weft.topology import compute_stage, find_stages

WANT = frozenset({"logprobs", "entropy", "top1"})
STEPS, RATE = 3, 0.02
LENGTHS = ([9, 17, 5], [3], [12, 2], [21], [4, 4, 4])  # tokens of the sequences of each micro-batch
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    family: str = "llama"
    kind: Kind = "1f1b"
    count: int = 5
    tied: bool = False
    recompute: bool = False
    # lora, dropout, balance (of experts), unmoved (the first micro-batch trains nothing)
    form: str = ""
    dtype: torch.dtype = torch.float64
    stages_per_rank: int | None = None


@dataclass(frozen=True)
class Run:
    """Outputs of the first step, gradients of the first step, parameters after the last."""

    outputs: list[Outputs]
    gradients: Values
    parameters: Values


def build(case: Case) -> Transformer:
    changes = {"tie_word_embeddings": case.tied} if case.family in ("llama", "mixtral") else {}
    network = (
        tiny(case.family, dtype=case.dtype, num_hidden_layers=8, **changes)
        if case.family != "gpt2"
        else tiny(case.family, dtype=case.dtype, n_layer=8)
    )
    if case.form == "lora":
        adapt(network)
    if case.form == "dropout":
        network = with_dropout(network)
    network.recompute_every = int(case.recompute)
    return network


def with_dropout(network: Transformer) -> Transformer:
    other = Transformer.build_empty(network.config.with_dropout(0.2), dtype=torch.float64)
    other.load_state_dict(network.state_dict())
    return other


def adapt(network: Transformer) -> None:
    lora.attach(network, r=4, alpha=8.0, seed=3)
    for name, part in find_canonical_parameters(network).items():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(
                part.data, std=0.1, generator=torch.Generator().manual_seed(len(name))
            )


def stage(known: Transformer, case: Case, layers: range) -> Transformer:
    """These blocks of a network."""
    network = Transformer.build_empty(known.config, dtype=case.dtype, layers=layers)
    if case.form == "lora":
        adapt(network)
    network.recompute_every = known.recompute_every
    values = {name: part.data for name, part in find_canonical_parameters(known).items()}
    for name, part in find_canonical_parameters(network).items():
        part.data.copy_(values[name])
    return network


def microbatches(case: Case, step: int) -> list[Microbatch]:
    """Other lengths in every step."""
    made = []
    for number in range(case.count):
        lengths = LENGTHS[(number + step) % len(LENGTHS)]
        x = pack(sequences(lengths, seed=10 * step + number))
        if case.form == "balance":
            x = replace(x, aux_loss=MoEAuxLoss(torch.tensor(lengths)))
        if case.form == "dropout":
            keys = [(f"sample {number}", k) for k in range(len(lengths))]
            x = replace(x, dropout=DropoutKeys.from_sequences(3, step, keys, torch.device("cpu")))
        made.append(Microbatch(x, WANT))
    return made


def loss_of(case: Case, number: int, found: Outputs) -> Tensor:
    weights = torch.cos(torch.arange(len(found["logprobs"])) * 1.0 + number)
    value = (found["logprobs"] * weights).sum() + 0.1 * found["entropy"].sum()
    return value.detach() if case.form == "unmoved" and number == 0 else value


def balance(case: Case, known: Transformer, given: list[Microbatch], number: int) -> Tensor | None:
    """What the layers since the last call add to the loss."""
    aux_loss = given[number].x.aux_loss
    if aux_loss is None:
        return None
    layers, aux_loss.layers = aux_loss.layers, []
    return 0.5 * torch.stack(layers).sum() / known.config.num_layers


def alone(case: Case, *, exactly: bool = False) -> Run:
    """The whole network in one process, one micro-batch after the other; `exactly`: in float64."""
    network = build(case).double() if exactly else build(case)
    rule = torch.optim.SGD(
        [p for p in network.parameters() if p.requires_grad], lr=RATE, momentum=0.9
    )
    outputs: list[Outputs] = []
    gradients: Values = {}
    for step in range(STEPS):
        given = microbatches(case, step)
        for number, one in enumerate(given):
            found = network(one.x, one.want)
            assert isinstance(found, dict)
            value, own = loss_of(case, number, found), balance(case, network, given, number)
            value = value if own is None else value + own
            if value.requires_grad:
                value.backward()
            if step == 0:
                outputs.append({name: x.detach() for name, x in found.items()})
        if step == 0:
            gradients = gradients_of(network)
        rule.step()
        rule.zero_grad()
    return Run(
        outputs,
        gradients,
        {name: part.data for name, part in find_canonical_parameters(network).items()},
    )


def gradients_of(network: Transformer) -> Values:
    return {
        name: part.grad.clone()
        for name, part in find_canonical_parameters(network).items()
        if part.grad is not None
    }


def tied_copies(networks: Mapping[int, Transformer]) -> list[Tensor]:
    """The trained embeddings of the first and last stage that are copies of one tied matrix."""
    ends = [n for n in networks.values() if n.is_first_stage != n.is_last_stage]
    held = [n.embed.weight for n in ends if n.config.tied and n.kind == "lm"]
    return [weight for weight in held if weight.requires_grad]


def staged(case: Case) -> list[Run]:
    """On each rank: its stages."""
    group = dist.group.WORLD
    assert group is not None
    known, placement = build(case), build_placement(case.kind, group.size(), case.stages_per_rank)
    count, layers = placement.num_stages, known.config.num_layers
    networks = {
        s: stage(known, case, compute_stage(layers, count, s))
        for s in placement.list_stages(group.rank())
    }
    pipeline = Pipeline(networks, case.kind, group)
    last = placement.last_rank
    ends = dist.new_group([0, last]) if last != 0 else None
    trained = [p for network in networks.values() for p in network.parameters() if p.requires_grad]
    rule = torch.optim.SGD(trained, lr=RATE, momentum=0.9)
    outputs = pipeline.share_outputs(pipeline.forward(microbatches(case, 0)))
    gradients: list[Values] = []
    for step in range(STEPS):
        given = microbatches(case, step)
        pipeline.train(
            given,
            lambda number, found: loss_of(case, number, found),
            lambda _, number, given=given: balance(case, known, given, number),
        )
        if group.rank() in (0, last):
            sum_tied_gradients(tied_copies(networks), ends, torch.device("cpu"))
        if step == 0:
            gradients = [gradients_of(network) for network in networks.values()]
        rule.step()
        rule.zero_grad()
    return [
        Run(
            outputs,
            own,
            {name: part.data for name, part in find_canonical_parameters(network).items()},
        )
        for own, network in zip(gradients, networks.values(), strict=True)
    ]


def same(found: Values, expected: Values, name: str, errors: Values | None = None) -> None:
    """In float64, or within these largest errors."""
    assert found.keys() == expected.keys(), name
    for key, value in expected.items():
        if errors is not None:
            assert_within(found[key], value, errors[key], f"{name} {key}")
            continue
        assert_close(
            found[key], value, rtol=1e-12, atol=1e-12, msg=lambda m, key=key: f"{name} {key}: {m}"
        )


def check(case: Case, ranks: Ranks, size: int) -> None:
    expected, far = alone(case), None
    if case.dtype == torch.float32:
        expected, far = bound(lambda: alone(case, exactly=True))
    placement, known = build_placement(case.kind, size, case.stages_per_rank), build(case)
    count = placement.num_stages
    for rank, found in enumerate(ranks.run(staged, case)):
        for number, run in zip(placement.list_stages(rank), found, strict=True):
            for n, (one, other) in enumerate(zip(run.outputs, expected.outputs, strict=True)):
                same(one, other, "outputs of", far and far.outputs[n])
            for what in ("gradients", "parameters"):
                every: Values = getattr(expected, what)
                sizes, tied = Even(known.config.num_layers), known.config.tied
                own = {
                    n: v
                    for n, v in every.items()
                    if number in find_stages(n, sizes, count, tied=tied)
                }
                errors = far and getattr(far, what)
                same(getattr(run, what), own, f"{what} of stage {number}", errors)


@dataclass(frozen=True)
class Even:
    """Sizes of a network whose stages have equally many blocks."""

    num_layers: int
    head_layers: float = 0.0
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 1


def named(case: Case) -> str:
    said = [
        case.family,
        case.kind,
        f"m{case.count}",
        "tied" * case.tied,
        "recomputed" * case.recompute,
        case.form,
    ]
    said += [
        "float32" if case.dtype == torch.float32 else "",
        f"v{case.stages_per_rank}" if case.stages_per_rank else "",
    ]
    return "-".join(filter(None, said))


CASES = [
    Case(kind="gpipe"),
    Case(),
    Case(kind="interleaved_1f1b"),
    Case("mixtral", kind="zero_bubble"),
    Case("gpt2", kind="zbv", count=1),
    Case(tied=True),
    Case(kind="zbv", tied=True),
    Case("mixtral", form="balance", recompute=True),
]
MORE = [
    Case("gpt2"),
    Case("gpt2", kind="zero_bubble"),
    Case("mixtral"),
    Case("mixtral", kind="zbv", form="balance"),
    Case(kind="interleaved_zero_bubble"),
    Case(count=1),
    Case(kind="interleaved_1f1b", count=1),
    Case(recompute=True),
    Case(kind="zero_bubble", recompute=True),
    Case(form="lora"),
    Case(kind="zero_bubble", form="lora"),
    Case(form="unmoved"),
    Case(kind="zbv", form="unmoved"),
    Case(form="dropout"),
]


@pytest.mark.default_cases(
    "gpt2-zbv-m1", "llama-1f1b-m5-tied", "llama-interleaved", "mixtral-zero_bubble"
)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_two_ranks_are_one_network(case: Case, ranks: Ranks) -> None:
    check(case, ranks, 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=named)
def test_two_ranks_in_every_form(case: Case, ranks: Ranks) -> None:
    check(case, ranks, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [Case(kind=kind, count=count) for kind in get_args(Kind) for count in (2, 9)]
    + [
        Case(family, tied=tied)
        for family, tied in (("llama", True), ("gpt2", False), ("mixtral", False))
    ]
    + [
        Case(kind="zbv", tied=True),
        Case("mixtral", "zero_bubble", form="balance"),
        Case("gpt2", "interleaved_1f1b"),
    ],
    ids=named,
)
def test_four_ranks_are_one_network(case: Case, four_ranks: Ranks) -> None:
    check(case, four_ranks, 4)


@pytest.mark.slow_cases("zero_bubble-mixtral", "1f1b-llama")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("kind", ["1f1b", "zero_bubble"])
def test_with_weft_s_kernels(family: str, kind: Kind, ranks: Ranks) -> None:
    """In float32, whose products are functions of weft's own; a zero-bubble schedule goes through
    their backward twice.
    """
    check(Case(family, kind, dtype=torch.float32), ranks, 2)


def late(folder: str) -> str:
    """On rank 0: what the pipeline says where rank 1 never computes. On rank 1 nothing."""
    store = dist.FileStore(f"{folder}/late", 2)
    rank = dist.get_rank()
    group = dist.distributed_c10d.ProcessGroupGloo(store, rank, 2, timedelta(seconds=5))
    if rank == 1:
        store.wait(["said"], timedelta(seconds=300))
        return ""
    case = Case(count=2)
    pipeline = Pipeline({0: stage(build(case), case, range(4))}, "1f1b", group)
    try:
        pipeline.train(microbatches(case, 0), lambda number, found: loss_of(case, number, found))
    except RunError as error:
        return str(error)
    finally:
        store.set("said", "")
    return "nothing"


@pytest.mark.slow
def test_a_rank_that_is_late_is_named(ranks: Ranks, tmp_path: Path) -> None:
    said, _ = ranks.run(late, str(tmp_path))
    assert said.startswith(
        "pipeline stage 0 (rank 0), micro-batch 0: the gradient did not come from stage 1 (rank "
        "1); that rank failed"
    )


def test_one_rank_holds_all_stages() -> None:
    """Without a process group: two stages, whose states go from one to the other as they are."""
    case = Case(kind="zbv", count=2, tied=True)
    known, expected = build(case), alone(case)
    networks = {s: stage(known, case, compute_stage(8, 2, s)) for s in (0, 1)}
    pipeline = Pipeline(networks, "zbv")
    found = pipeline.share_outputs(pipeline.forward(microbatches(case, 0)))
    assert len(found) == 2
    for one, other in zip(found, expected.outputs, strict=True):
        same(one, other, "outputs of")
    pipeline.train(microbatches(case, 0), lambda number, outputs: loss_of(case, number, outputs))
    sum_tied_gradients(tied_copies(networks), None, torch.device("cpu"))
    same(
        gradients_of(networks[0]) | gradients_of(networks[1]),
        expected.gradients,
        "gradient of",
    )


def test_hooks_of_parameters_see_both_halves() -> None:
    """Master weights take gradients out of what the network computes with by such hooks."""
    case = Case(kind="zbv", count=3)
    known, expected = build(case), alone(case)
    networks = {s: stage(known, case, compute_stage(8, 2, s)) for s in (0, 1)}
    taken: dict[Tensor, Tensor] = {}

    def take(parameter: Tensor) -> None:
        assert parameter.grad is not None
        taken[parameter] = taken.get(parameter, torch.zeros_like(parameter)) + parameter.grad
        parameter.grad = None

    for network in networks.values():
        for parameter in network.parameters():
            parameter.register_post_accumulate_grad_hook(take)
    Pipeline(networks, "zbv").train(
        microbatches(case, 0), lambda number, outputs: loss_of(case, number, outputs)
    )
    for network in networks.values():
        for name, part in find_canonical_parameters(network).items():
            assert_close(
                part.select_rows(taken[part.parameter]),
                expected.gradients[name],
                rtol=1e-12,
                atol=1e-12,
            )


def test_stages_of_another_rank_are_refused() -> None:
    case = Case()
    with pytest.raises(ConfigError, match=r"rank 0 of 1 holds stages \[0, 1\], not \[0, 2\]"):
        network = stage(build(case), case, range(4))
        Pipeline({0: network, 2: network}, "zbv")
