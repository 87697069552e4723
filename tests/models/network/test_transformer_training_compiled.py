"""Blocks that torch compiles compute what they compute without, and are compiled once for all
lengths.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.models.common import adapted, sequences, tiny
from tests.roundings import assert_computed
from weft import kernels
from weft.models.network.dropout import DropoutKeys
from weft.models.network.packed import Packed, pack
from weft.models.network.transformer import Transformer, compile_blocks

WANT: Any = frozenset({"logprobs"})
FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma2", "olmo2", "qwen3", "mixtral")


class Counting:
    """A backend that runs what it is given as it is, forward and backward, and counts how often it
    is asked.
    """

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.debugging import aot_eager

        self.count += 1
        return aot_eager(graph, inputs)


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pair(
    make: Callable[..., Transformer], *given: Any, **changes: Any
) -> tuple[Transformer, Transformer, Counting]:
    """(as it is, compiled, what counts)."""
    plain, other = (make(*given, dtype=torch.float64, **changes) for _ in range(2))
    counting = Counting()
    compile_blocks(other, counting)
    return plain.double(), other.double(), counting


def computed(network: Transformer, x: Packed) -> tuple[Tensor, dict[str, Tensor]]:
    """(log-probs, gradients)."""
    network.zero_grad()
    out = network(x, WANT)["logprobs"]
    (out * torch.linspace(0.5, 1.5, len(out), dtype=out.dtype)).sum().backward()
    return out.detach(), {
        name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None
    }


def alike(plain: Transformer, other: Transformer, x: Packed) -> None:
    one, by_one = computed(plain, x)
    two, by_two = computed(other, x)
    assert_close(two, one, rtol=1e-10, atol=1e-10)
    assert by_one.keys() == by_two.keys() and by_one
    for name in by_one:
        assert_close(
            by_two[name],
            by_one[name],
            rtol=1e-9,
            atol=1e-10,
            msg=lambda said, name=name: f"{name}: {said}",
        )
    with torch.no_grad():
        assert_close(other(x, WANT)["logprobs"], plain(x, WANT)["logprobs"], rtol=1e-10, atol=1e-10)


@pytest.mark.default_cases("gpt2", "llama", "mixtral")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_the_same_compiled(family: str) -> None:
    plain, other, counting = pair(tiny, family)
    alike(plain, other, pack(sequences([33, 17, 5])))
    assert counting.count, "something was compiled"


@pytest.mark.parametrize("every", [1, 2])
def test_recomputed_blocks_and_shared_prefixes(every: int) -> None:
    plain, other, _ = pair(tiny, num_hidden_layers=3)
    plain.recompute_every = other.recompute_every = every
    alike(plain, other, pack(sequences([33, 17, 5])))


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.3, marks=pytest.mark.slow)])
def test_adapters_on_and_off(dropout: float) -> None:
    # The draws of dropout take long to trace, so that it has three adapters alone: before attention
    # two, after it one.
    targets = ("q", "v", "down") if dropout else ()
    plain, other, counting = pair(
        lambda dtype, **changes: adapted(**changes).to(dtype),
        targets=targets,
        dropout=dropout,
        num_hidden_layers=4,
    )
    x = pack(sequences([20, 9]))
    if dropout:
        x = replace(x, dropout=DropoutKeys.from_sequences(3, 1, [("a", 0), ("b", 1)]))
    alike(plain, other, x)
    known = counting.count
    alike(plain, other, replace(x, tokens=x.tokens.flip(0)))
    assert counting.count == known
    assert known <= 6, "the first block, whose input wants no gradient, apart; not one a layer"


def test_packs_of_all_lengths_share_what_is_compiled() -> None:
    plain, other, counting = pair(tiny, num_hidden_layers=3)
    # 64 is the width of the states, too
    packs = [[33, 17, 5], [7], [64], [2, 3], [41, 8, 8, 1], [128]]
    for lengths in packs:
        alike(plain, other, pack(sequences(lengths)))
    assert counting.count == 4, (
        "what is before attention and what is after it, with gradients and without"
    )
    third, *_ = pair(tiny, num_hidden_layers=2, seed=3)
    compile_blocks(third, counting)
    computed(third, pack(sequences([12, 3])))
    assert counting.count == 4, "another network of the same form"
    alike(plain, other, pack(sequences([1])))
    alike(plain, other, pack(sequences([1])))
    assert counting.count == 10, "one token is a case of its own, and so is no row that is wanted"


@pytest.mark.slow
def test_dropout_compiles_no_layer_by_itself() -> None:
    plain, other, counting = pair(tiny, "gpt2", n_layer=5)
    for network in (plain, other):
        for block in network.blocks:
            block.dropout = 0.2
    for seed in range(2):
        x = replace(
            pack(sequences([20, 9], seed=seed)),
            dropout=DropoutKeys.from_sequences(3, seed, [("a", 0), ("b", 1)]),
        )
        alike(plain, other, x)
    assert counting.count == 4


def test_what_keeps_torch_from_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(
        "shutil.which", lambda command: "/usr/bin/g++" if command == "g++" else None
    )
    assert kernels.compiling_obstacle(cpu) is None
    monkeypatch.setattr("shutil.which", lambda command: None)
    assert "no C++ compiler" in str(kernels.compiling_obstacle(cpu))
    monkeypatch.setattr(kernels.flex, "can_compile", lambda: False)
    assert "Triton" in str(kernels.compiling_obstacle(torch.device("cuda", 0)))


@pytest.mark.slow_cases("dtype1")  # float32, in which weft has kernels
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_real_compiler(dtype: torch.dtype) -> None:
    if kernels.compiling_obstacle(torch.device("cpu")) is not None:
        pytest.skip("no C++ compiler")
    plain, other = tiny(num_hidden_layers=2, dtype=dtype), tiny(num_hidden_layers=2, dtype=dtype)
    wide = copy.deepcopy(plain).double()
    compile_blocks(other)
    for lengths in ([33, 17, 5], [40, 8]):
        x = pack(sequences(lengths))
        two, by_two = computed(other, x)

        def exact(x: Packed = x) -> list[Tensor]:
            out, gradients = computed(wide, x)
            return [out, *gradients.values()]

        assert [*by_two] == [*computed(plain, x)[1]]
        assert_computed([two, *by_two.values()], exact, dtype)
