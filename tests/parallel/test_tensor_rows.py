"""Ranks that hold parts of every layer and share the rows between attention and MLP, in float64:
they are the whole network, and take less memory and as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from tests.models.common import sequences, tiny
from tests.parallel.exact import EXACT, same
from tests.parallel.test_context import BALANCE, CASES, RATE, STEPS, WANT, Case, build, packs
from tests.parallel.test_tensor import Run, Values
from tests.ranks import Ranks
from weft.engine.torch.step import AuxLoss
from weft.models.network.linear import find_canonical_parameters
from weft.models.network.packed import Packed, pack
from weft.models.network.transformer import Transformer
from weft.parallel import collectives, tensor
from weft.parallel.collectives import RowAssignment
from weft.topology import compute_tensor_slice

MORE = {
    "no rows shared": Case("gpt2"),
    "norms after": Case("olmo2"),
    "residuals in parallel": Case("gpt_neox", changes={"num_attention_heads": 4}),
    "mean scores, recomputed": Case("llama", "score", pooling="mean", recomputes=True),
}
OWN = {
    name: case
    for name, case in (CASES | MORE).items()
    if case.dtype == torch.float64 and case.kernels
}


def part_of(whole: Transformer, shares_rows: bool) -> Transformer:
    """This rank's part of a network, joined to the others'."""
    group, config = dist.group.WORLD, whole.config
    assert group is not None
    narrow = tensor.narrow_config(config, group.size(), group.rank())
    network = Transformer.build_empty(narrow, whole.kind, whole.pooling, dtype=torch.float64)
    network.recompute_every, network.padding = whole.recompute_every, whole.padding
    values = {name: part.data for name, part in find_canonical_parameters(whole).items()}
    for name, part in find_canonical_parameters(network).items():
        shape = tuple(values[name].shape)
        part.data.copy_(
            values[name][compute_tensor_slice(name, shape, config, group.size(), group.rank())]
        )
    tensor.join(network, config, group, shares_rows=shares_rows)
    return network


def loss_of(network: Transformer, packed: Packed, ranks: int) -> tuple[Tensor, Values]:
    found = network(packed, WANT[network.kind])
    assert isinstance(found, dict)
    made = [
        (torch.cos(torch.arange(len(v)) + 0.1) * v).sum() for v in found.values() if v.requires_grad
    ]
    if packed.aux_loss is not None:
        made.append(AuxLoss(BALANCE, ranks).compute(packed.aux_loss.compute_by_sequence().sum()))
    return torch.stack(made).sum(), {str(name): value.detach() for name, value in found.items()}


def run(
    case: Case, network: Transformer, complete: Callable[[], None] = lambda: None, ranks: int = 1
) -> Run:
    """Three steps over the packs; `complete` is called before each step of the optimizer."""
    rule = torch.optim.SGD(network.parameters(), lr=RATE, momentum=0.9)
    outputs: list[Values] = []
    gradients: Values = {}
    for number in range(STEPS):
        for packed in packs(case):
            loss, found = loss_of(network, packed, ranks)
            loss.backward()
            outputs += [found] if number == 0 else []
        complete()
        if number == 0:
            gradients = {
                n: p.grad.clone()
                for n, p in find_canonical_parameters(network).items()
                if p.grad is not None
            }
        rule.step()
        rule.zero_grad()
    return Run(
        outputs,
        gradients,
        {
            name: part.data.detach().clone()
            for name, part in find_canonical_parameters(network).items()
        },
    )


def shared(case: Case, shares_rows: bool) -> Run:
    whole, group = build(case), dist.group.WORLD
    assert group is not None
    network = part_of(whole, shares_rows)

    def complete() -> None:
        tensor.sum_gradients(
            find_canonical_parameters(network),
            whole.config,
            group,
            torch.device("cpu"),
            shares_rows=shares_rows,
        )

    return run(case, network, complete, group.size())


def check(case: Case, ranks: Ranks, size: int, *, shares_rows: bool = True) -> None:
    expected, config = run(case, build(case)), build(case).config
    for rank, found in enumerate(ranks.run(shared, case, shares_rows)):
        for one, other in zip(found.outputs, expected.outputs, strict=True):
            same(one, other)
        for kind in ("gradients", "parameters"):
            every: Values = getattr(expected, kind)
            parts = {
                n: v[compute_tensor_slice(n, tuple(v.shape), config, size, rank)]
                for n, v in every.items()
            }
            same(getattr(found, kind), parts)


@pytest.mark.default_cases("gpt2", "llama", "mixtral", "recomputed", "scores", "values")
@pytest.mark.parametrize("name", list(OWN))
def test_two_ranks_are_as_one(name: str, ranks: Ranks) -> None:
    check(OWN[name], ranks, 2, shares_rows=name != "no rows shared")


@pytest.mark.slow_cases("llama", "mixtral", "recomputed", "scores", "no rows shared")
@pytest.mark.slow
@pytest.mark.parametrize("name", list(OWN))
def test_four_ranks_are_as_one(name: str, four_ranks: Ranks) -> None:
    """Of a pack with three tokens one of them has none."""
    check(OWN[name], four_ranks, 4, shares_rows=name != "no rows shared")


def short(lengths: list[int]) -> list[tuple[Tensor, Values]]:
    """Of packs of one sequence each: the loss, and the gradients of what every rank has whole."""
    whole, group = tiny(head="score", dtype=torch.float64), dist.group.WORLD
    assert group is not None
    network = part_of(whole, True)

    def complete() -> None:
        tensor.sum_gradients(
            find_canonical_parameters(network),
            whole.config,
            group,
            torch.device("cpu"),
            shares_rows=True,
        )

    return one_by_one(network, lengths, complete)


def one_by_one(
    network: Transformer, lengths: list[int], complete: Callable[[], None] = lambda: None
) -> list[tuple[Tensor, Values]]:
    found = []
    for length in lengths:
        loss, _ = loss_of(network, pack(sequences([length])), 1)
        loss.backward()
        complete()
        whole = {
            name: part.grad
            for name, part in find_canonical_parameters(network).items()
            if "norm" in name or "score" in name
        }
        found.append(
            (
                loss.detach(),
                {name: grad.clone() for name, grad in whole.items() if grad is not None},
            )
        )
        network.zero_grad()
    return found


def test_packs_of_fewer_tokens_than_ranks(ranks: Ranks) -> None:
    lengths = [1, 2, 3]
    expected = one_by_one(tiny(head="score", dtype=torch.float64), lengths)
    assert all("score.weight" in gradients for _, gradients in expected)
    for found in ranks.run(short, lengths):
        for (loss, gradients), (wanted, whole) in zip(found, expected, strict=True):
            assert_close(loss, wanted, **EXACT)
            same(gradients, whole)


# -- memory and traffic

EVEN = [16, 16]  # two ranks have as many tokens, and as many rows that are read


def kept(recompute: int, shares_rows: bool) -> tuple[list[int], int]:
    """Rows that each block hands on, and elements that are kept for the backward pass beside
    parameters.
    """
    network = part_of(tiny(dtype=torch.float64, num_hidden_layers=4), shares_rows)
    network.recompute_every = recompute
    rows: list[int] = []
    for block in network.blocks:
        block.register_forward_hook(lambda _, __, states: rows.append(len(states)))
    parameters = {p.untyped_storage().data_ptr() for p in network.parameters()}
    storages: dict[int, int] = {}
    alive = []  # so that no two have the same address

    def keep(x: Tensor) -> Tensor:
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in parameters:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // 8
            alive.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss_of(network, pack(sequences(EVEN)), 2)
    return rows, sum(storages.values())


def test_states_between_blocks_are_a_part_on_each_rank(ranks: Ranks) -> None:
    """The inputs of recomputed blocks and of the last norm are half as many elements; without
    recomputation those of every norm are.
    """
    hidden, layers, tokens = tiny().config.hidden_size, 4, sum(EVEN)
    norm, wanted = hidden + 1, tokens - 2  # a norm keeps a number a row beside what it reads
    recomputed = layers * tokens * hidden + wanted * norm
    kept_all = ((2 * layers - 1) * tokens + 2 * wanted) * norm
    for recompute, of_streams in ((1, recomputed), (0, kept_all)):
        (whole_rows, whole), (rows, less) = (
            ranks.run(kept, recompute, shares)[0] for shares in (False, True)
        )
        assert whole_rows == [tokens] * 3 + [wanted] and rows == [tokens // 2] * 3 + [wanted // 2]
        assert whole - less == of_streams / 2


@contextmanager
def counted(size: int) -> Iterator[dict[str, float]]:
    """Elements that a rank sends to others, and the number of sums of which it keeps its own rows."""
    found = {"elements": 0.0, "scatters": 0.0}
    # the argument that holds what goes to, or comes from, all ranks; a ring all-reduce sends it twice
    turns = {"all_reduce": (0, 2), "all_to_all_single": (1, 1)}
    with pytest.MonkeyPatch.context() as patch:
        for name, (index, times) in turns.items():
            real = getattr(dist, name)

            def counting(
                *args: Any, index: int = index, times: int = times, real: Any = real, **more: Any
            ) -> Any:
                found["elements"] += times * args[index].numel() * (size - 1) / size
                return real(*args, **more)

            patch.setattr(dist, name, counting)
        reduce_scatter = collectives._reduce_scatter

        def scatter(*args: Any) -> Any:
            found["scatters"] += 1
            return reduce_scatter(*args)

        patch.setattr(collectives, "_reduce_scatter", scatter)
        yield found


def sent(recompute: int, shares_rows: bool) -> dict[str, float]:
    network = part_of(tiny(dtype=torch.float64, num_hidden_layers=4), shares_rows)
    network.recompute_every = recompute
    with counted(2) as found:
        loss, _ = loss_of(network, pack(sequences(EVEN)), 2)
        loss.backward()
    return found


@pytest.mark.parametrize("recompute", [0, 1])
def test_as_many_bytes_are_sent(recompute: int, ranks: Ranks) -> None:
    """A block that is computed again stops before its last sum: of its two sums one is taken, but
    three of the four halves that gather and scatter.
    """
    whole, shared = (ranks.run(sent, recompute, shares)[0] for shares in (False, True))
    hidden, tokens, layers = tiny().config.hidden_size, sum(EVEN), 4
    more = shared["elements"] - whole["elements"]
    assert more == recompute * layers * tokens / 2 * hidden
    assert shared["elements"] <= 1.1 * whole["elements"]
    assert shared["scatters"] > 0 and whole["scatters"] == 0


@pytest.mark.parametrize("count", range(12))
def test_stretches_are_as_owners_say(count: int, ranks: Ranks) -> None:
    for rank, (own, number, places, every) in enumerate(ranks.run(stretches, count)):
        assert (number, places, own) == every[rank]


def stretches(
    count: int,
) -> tuple[list[int], list[int], list[int], list[tuple[list[int], list[int], list[int]]]]:
    group = dist.group.WORLD
    assert group is not None
    rows = RowAssignment.from_equal_runs(count, group, torch.device("cpu"))
    most = max(1, -(-count // group.size()))
    assert tensor.count_rows(count, group) == len(rows.own_rows)
    expected: tuple[list[int], list[int], list[int]] = ([], [], [])
    if count:
        owned = RowAssignment.from_owners(torch.arange(count) // most, group)
        assert owned.max_rows == rows.max_rows
        expected = (owned.local_indices.tolist(), owned.places.tolist(), owned.own_rows.tolist())
    return (
        rows.own_rows.tolist(),
        rows.local_indices.tolist(),
        rows.places.tolist(),
        [expected] * group.size(),
    )
