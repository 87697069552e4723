"""A block over a pack in one call is the one that goes part by part, to the bit: its states, and its gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.models.common import sequences, tiny
from weft.engine.spec import LoRASpec
from weft.models import lora
from weft.models.config import Rope
from weft.models.dropout import Noise
from weft.models.native import block
from weft.models.packed import Dense, Join, Packed, Prefixed, pack
from weft.models.transformer import Transformer


def dense(lengths: list[int]) -> Packed:
    return pack(sequences(lengths))


def prefixed(scale: int = 1) -> Packed:
    """Two continuations of one prefix, a whole sequence, and a prefix with one continuation."""
    sizes = [scale * n for n in (6, 3, 5, 14, 2, 4)]
    ends = torch.tensor([0, *sizes]).cumsum(0)
    starts = [0, sizes[0], sizes[0], 0, 0, sizes[4]]
    positions = torch.cat([torch.arange(first, first + n) for first, n in zip(starts, sizes, strict=True)])
    at = ends.tolist()
    joins = (Join((at[0], at[1]), (at[1], at[3])), Join((at[4], at[5]), (at[5], at[6])))
    attention = Prefixed(Dense(ends.int(), max(sizes)), joins, ends[[2, 3, 4, 6]] - 1)
    tokens, rows = torch.cat(sequences(sizes)), torch.arange(len(positions) - 1)
    return Packed(tokens, positions, attention, rows, tokens[rows + 1])


PACKS: dict[str, Callable[[], Packed]] = {
    "few": lambda: dense([9, 3, 14, 1]),
    "many": lambda: dense([190, 3, 70, 1]),
    "one": lambda: dense([1]),
    "prefix": prefixed,
    "long prefix": lambda: prefixed(20),
}
# Ends; in any order, one twice; the first alone; more than there are.
WANTED: dict[str, Callable[[int], list[int] | None]] = {
    "all": lambda count: None,
    "ends": lambda count: sorted({0, count // 2, count - 1}),
    "any": lambda count: [count - 1, count // 3, 0, count // 3],
    "first": lambda count: [0],
    "more": lambda count: [count - 1, 0] * count,
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no rotation": {"rope": None},
    "half rotated": {"rope": Rope(theta=10000.0, dim=4)},
    "wide heads": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 12, "rope": Rope(theta=10000.0, dim=12)},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "one key head": {"num_kv_heads": 1},
    "weights from one": {"norm": "rms_plus_one"},
    "odd sizes": {"hidden_size": 37, "intermediate_size": 53},
}


def network_of(form: str) -> Transformer:
    network = Transformer(dataclasses.replace(tiny("llama").config, **FORMS[form])).eval()
    torch.manual_seed(0)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return network


def results(network: Transformer, x: Packed, rows: list[int] | None) -> dict[str, Tensor]:
    """Hidden states, and the gradient of a weighted sum of them by every parameter."""
    network.zero_grad()
    states = network.hidden(x, None if rows is None else torch.tensor(rows))
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(0))
    (states * weights).sum().backward()
    gradients = {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}
    return {"states": states.detach(), **gradients}


def by_parts(network: Transformer, x: Packed, rows: list[int] | None) -> dict[str, Tensor]:
    """`results`, with blocks computed part by part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "serves", lambda *given: False)
        return results(network, x, rows)


def check(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        if key.endswith("bias"):  # torch adds rows up in another order
            assert_close(value, theirs[key], rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(value, theirs[key]), key


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that blocks were computed by."""
    names: list[str] = []
    call = block.library.call

    def counting(name: str, *given: Any) -> int:
        names.append(name)
        return call(name, *given)

    monkeypatch.setattr(block.library, "call", counting)
    return names


WINDOWED = [(name, packs) for name in ("qwen2", "mistral") for packs in ("few", "many")]  # they share no prefix


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize(("name", "packs"), [*(("llama", packs) for packs in PACKS), *WINDOWED])
def test_the_bits_are_those_of_the_parts(name: str, packs: str, wanted: str, ran: list[str]) -> None:
    network, x = tiny(name), PACKS[packs]()
    rows = WANTED[wanted](len(x.tokens))
    at_once = results(network, x, rows)
    layers = network.config.num_layers
    assert ran.count("weft_block_forward") == ran.count("weft_block_backward") == layers
    check(at_once, by_parts(network, x, rows))
    assert ran.count("weft_block_forward") == layers
    with torch.no_grad():  # where nothing is kept
        assert torch.equal(network.hidden(x, None if rows is None else torch.tensor(rows)), at_once["states"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packs", ["many", "prefix"])
def test_networks_of_other_forms(form: str, packs: str, ran: list[str]) -> None:
    network, x = network_of(form), PACKS[packs]()
    rows = WANTED["any"](len(x.tokens))
    check(results(network, x, rows), by_parts(network, x, rows))
    assert "weft_block_backward" in ran


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_bit(threads: int) -> None:
    network, x = network_of("biases"), dense([190, 3, 70, 1])
    rows, before = WANTED["any"](len(x.tokens)), torch.get_num_threads()
    expected = results(network, x, rows)
    torch.set_num_threads(threads)
    try:
        assert all(torch.equal(value, expected[key]) for key, value in results(network, x, rows).items())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "frozen", ["norm1", "norm2", "attention.q", "attention", "mlp.down", "mlp", "embed", "blocks.0"]
)
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen: str) -> None:
    network, x = network_of("biases"), PACKS["prefix"]()
    expected = results(network, x, None)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(frozen not in name)
    made = results(network, x, None)
    assert made.keys() == {key for key in expected if frozen not in key}
    assert all(torch.equal(value, expected[key]) for key, value in made.items())


def test_two_passes_add_their_gradients_up() -> None:
    network, x = tiny(), dense([9, 3])
    once = results(network, x, None)
    network.zero_grad()
    for _ in range(2):
        states = network.hidden(x)
        (states * torch.randn(states.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    assert all(torch.equal(p.grad, 2 * once[name]) for name, p in network.named_parameters() if p.grad is not None)


@pytest.mark.parametrize("every", [1, 2])
def test_recomputed_blocks_have_the_same_gradients(every: int) -> None:
    network, x = tiny(), dense([9, 3, 14])
    expected = results(network, x, [3, 25])
    network.checkpointing = every
    check(results(network, x, [3, 25]), expected)


def test_weights_that_changed_between_the_passes_are_refused() -> None:
    network = tiny()
    states = network.hidden(dense([9, 3]))
    with torch.no_grad():
        next(iter(network.blocks)).mlp.up.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        states.sum().backward()


def other_dtype() -> tuple[Transformer, Packed]:
    return tiny(dtype=torch.float64), dense([9, 3])


def with_adapters() -> tuple[Transformer, Packed]:
    network = tiny()
    lora.attach(network, LoRASpec(r=2, targets=["k"]))
    return network, dense([9, 3])


def with_dropout() -> tuple[Transformer, Packed]:
    return tiny(), dataclasses.replace(dense([9, 3]), noise=Noise.of(0, 1, [("a", 0), ("b", 0)]))


def without_gate() -> tuple[Transformer, Packed]:
    return tiny("gpt2"), dense([9, 3])


def with_norms_of_heads() -> tuple[Transformer, Packed]:
    return tiny("qwen3"), dense([9, 3])


def with_a_matrix_that_lies_otherwise() -> tuple[Transformer, Packed]:
    network = tiny()
    down = network.get_submodule("blocks.0.mlp.down")
    down.weight = torch.nn.Parameter(down.weight.detach().T.contiguous().T)
    return network, dense([9, 3])


@pytest.mark.parametrize(
    "case",
    [
        other_dtype, with_adapters, with_dropout, without_gate, with_norms_of_heads, with_a_matrix_that_lies_otherwise
    ],
)  # fmt: skip
def test_what_the_kernels_do_not_take_goes_part_by_part(
    case: Callable[[], tuple[Transformer, Packed]], ran: list[str]
) -> None:
    network, x = case()
    network.hidden(x).sum().backward()
    assert not any("block" in name for name in ran)
