"""Blocks over packs: by weft's kernels what they are by torch; gradients whatever is frozen,
recomputed or done in between.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.bounds import assert_within, gamma, probable_gamma, unit
from tests.models.common import roundings, sequences, tiny
from weft import kernels
from weft.kernels.cpu import library
from weft.models.attention.contexts import Dense, PrefixContinuation, Prefixed
from weft.models.network.config import Rope
from weft.models.network.linear import find_canonical_parameters
from weft.models.network.packed import Packed, pack
from weft.models.network.transformer import Transformer


def dense(lengths: list[int]) -> Packed:
    return pack(sequences(lengths))


def prefixed(scale: int = 1) -> Packed:
    """Two continuations of one prefix, a whole sequence, and a prefix with one continuation."""
    sizes = [scale * n for n in (6, 3, 5, 14, 2, 4)]
    ends = torch.tensor([0, *sizes]).cumsum(0)
    starts = [0, sizes[0], sizes[0], 0, 0, sizes[4]]
    positions = torch.cat(
        [torch.arange(first, first + n) for first, n in zip(starts, sizes, strict=True)]
    )
    at = ends.tolist()
    joins = (
        PrefixContinuation((at[0], at[1]), (at[1], at[3])),
        PrefixContinuation((at[4], at[5]), (at[5], at[6])),
    )
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
    "wide heads": {
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 12,
        "rope": Rope(theta=10000.0, dim=12),
    },
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "one key head": {"num_kv_heads": 1},
    "weights from one": {"norm": "rms_plus_one"},
    "odd sizes": {"hidden_size": 37, "intermediate_size": 53},
    "scaled": {"attention_scale": 0.7, "layer_scaled_attention": True},
}


def network_of(form: str) -> Transformer:
    network = Transformer(dataclasses.replace(tiny("llama").config, **FORMS[form])).eval()
    torch.manual_seed(0)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return network


def weighted(states: Tensor) -> Tensor:
    weights = torch.randn(
        states.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32
    )
    return (states * weights.to(states.dtype)).sum()


def gradients(network: Transformer) -> dict[str, Tensor]:
    return {
        name: at.grad
        for name, at in find_canonical_parameters(network).items()
        if at.grad is not None
    }


def results(network: Transformer, x: Packed, rows: list[int] | None) -> dict[str, Tensor]:
    """Hidden states, and the gradient of a weighted sum of them by every parameter."""
    network.zero_grad()
    states = network.compute_hidden(x, None if rows is None else torch.tensor(rows))
    weighted(states).backward()
    return {
        "states": states.detach(),
        **{name: value.clone() for name, value in gradients(network).items()},
    }


def exact(network: Transformer, x: Packed, rows: list[int] | None) -> dict[str, Tensor]:
    """`results` in float64, which torch computes."""
    return results(copy.deepcopy(network).double(), x, rows)


def check(
    network: Transformer, x: Packed, ours: dict[str, Tensor], theirs: dict[str, Tensor]
) -> None:
    """Float32 against float64, up to what so many roundings probably lose of each tensor's largest
    number. Some gradients cancel to nothing beside the others: they lose two units in the last
    place of the largest of all.
    """
    assert ours.keys() == theirs.keys()
    # The way back multiplies the same matrices once for the states and once for the parameters, and
    # computes the softmax again.
    lost = probable_gamma(3 * roundings(network, len(x.tokens)))
    largest = max(float(value.abs().max()) for value in theirs.values())
    for key, value in ours.items():
        assert value.dtype == torch.float32
        allowed = lost * float(theirs[key].abs().max()) + 2 * unit(torch.float32) * largest
        assert_close(
            value.double(),
            theirs[key],
            rtol=0.0,
            atol=allowed,
            msg=lambda said, key=key: f"{key}: {said}",
        )


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that were called."""
    if library.load_library() is None:
        pytest.skip("needs g++")
    names: list[str] = []
    call = library.call

    def counting(name: str, *given: Any) -> int:
        names.append(name)
        return call(name, *given)

    monkeypatch.setattr(library, "call", counting)
    return names


# they share no prefix
WINDOWED = [(name, packs) for name in ("qwen2", "mistral") for packs in ("few", "many")]
KERNELS = {
    "weft_rms_norm",
    "weft_rms_norm_backward",
    "weft_attend",
    "weft_attend_backward",
    "weft_silu",
    "weft_silu_backward",
}


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize(("name", "packs"), [*(("llama", packs) for packs in PACKS), *WINDOWED])
def test_the_kernels_compute_what_torch_does(
    name: str, packs: str, wanted: str, ran: list[str]
) -> None:
    network, x = tiny(name), PACKS[packs]()
    rows = WANTED[wanted](len(x.tokens))
    ours = results(network, x, rows)
    assert set(ran) >= KERNELS
    ran.clear()
    check(network, x, ours, exact(network, x, rows))
    assert not ran
    with torch.no_grad():  # where nothing is kept
        assert torch.equal(
            network.compute_hidden(x, None if rows is None else torch.tensor(rows)), ours["states"]
        )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packs", ["many", "prefix"])
def test_networks_of_other_forms(form: str, packs: str, ran: list[str]) -> None:
    network, x = network_of(form), PACKS[packs]()
    rows = WANTED["any"](len(x.tokens))
    ours = results(network, x, rows)
    assert set(ran) >= KERNELS
    check(network, x, ours, exact(network, x, rows))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_bit(threads: int) -> None:
    network, x = network_of("biases"), dense([190, 3, 70, 1])
    rows, before = WANTED["any"](len(x.tokens)), torch.get_num_threads()
    expected = results(network, x, rows)
    torch.set_num_threads(threads)
    try:
        assert all(
            torch.equal(value, expected[key]) for key, value in results(network, x, rows).items()
        )
    finally:
        torch.set_num_threads(before)


def test_no_rows_are_wanted() -> None:
    network, x = tiny(), dense([9, 3])
    states = network.compute_hidden(x, torch.zeros(0, dtype=torch.int64))
    assert states.shape == (0, network.config.hidden_size)
    states.sum().backward()
    assert not any(p.grad.any() for p in network.parameters() if p.grad is not None)


@pytest.mark.parametrize("row", [12, -1, 200_000])
def test_rows_that_are_not_there_are_refused(row: int) -> None:
    with pytest.raises(IndexError):
        tiny().compute_hidden(dense([9, 3]), torch.tensor([0, row]))


def test_rows_may_be_of_another_type() -> None:
    network, x = tiny(), dense([9, 3])
    assert torch.equal(
        network.compute_hidden(x, torch.tensor([7, 2], dtype=torch.int32)),
        network.compute_hidden(x)[[7, 2]],
    )


def test_the_default_dtype_changes_nothing() -> None:
    network, x = tiny(), dense([9, 3])
    expected = results(network, x, None)
    network.zero_grad()
    torch.set_default_dtype(torch.bfloat16)
    try:
        weighted(network.compute_hidden(x)).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(value, expected[name]) for name, value in gradients(network).items())


def test_other_passes_in_between_and_a_second_way_back() -> None:
    network, x = tiny(), dense([9, 3])
    expected = results(network, x, [3])
    network.zero_grad()
    total = weighted(network.compute_hidden(x, torch.tensor([3])))
    weighted(network.compute_hidden(dense([40, 7]))).detach()
    for times in (1, 2):
        total.backward(retain_graph=True)
        assert all(
            torch.equal(value, times * expected[name]) for name, value in gradients(network).items()
        )


def test_gradients_of_biases_are_sums_of_blocks() -> None:
    """Added up one row after the other, thousands of them would be 1e-5 off."""
    x, weight, bias = torch.randn(8192, 3), torch.randn(32, 3), torch.zeros(32, requires_grad=True)
    grad_out = torch.rand(8192, 32, generator=torch.Generator().manual_seed(1))
    kernels.linear(x, weight, bias).backward(grad_out)
    assert bias.grad is not None
    # torch adds up in four levels of sixteen numbers; none of them is negative
    exact = grad_out.double().sum(0)
    assert_within(bias.grad, exact, gamma(64) * exact)


FROZEN = [
    ["norm1"],
    ["norm2"],
    ["qkv"],
    ["qkv", "o"],
    ["down"],
    ["mlp"],
    ["embed"],
    ["embed", "norm1"],
    ["0"],
    ["embed", "norm1", "qkv"],
]


@pytest.mark.parametrize("rows", [None, [33, 4]], ids=["all", "some"])
@pytest.mark.parametrize("frozen", FROZEN, ids=" ".join)
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(
    frozen: list[str], rows: list[int] | None
) -> None:
    network, x = network_of("biases"), PACKS["prefix"]()
    expected = results(network, x, rows)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(not set(frozen) & set(name.split(".")))
    made = results(network, x, rows)
    left = {
        name
        for name, at in find_canonical_parameters(network).items()
        if not set(frozen) & set(at.name.split("."))
    }
    assert made.keys() == {"states"} | left & expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in made.items())


def test_two_passes_add_their_gradients_up() -> None:
    network, x = tiny(), dense([9, 3])
    once = results(network, x, None)
    network.zero_grad()
    for _ in range(2):
        weighted(network.compute_hidden(x)).backward()
    assert all(torch.equal(value, 2 * once[name]) for name, value in gradients(network).items())


@pytest.mark.parametrize("every", [1, 2])
def test_recomputed_blocks_have_the_same_gradients(every: int) -> None:
    network, x = tiny(), dense([9, 3, 14])
    expected = results(network, x, [3, 25])
    network.recompute_every = every
    assert all(
        torch.equal(value, expected[name]) for name, value in results(network, x, [3, 25]).items()
    )


def test_weights_that_changed_between_the_passes_are_refused() -> None:
    network = tiny()
    states = network.compute_hidden(dense([9, 3]))
    with torch.no_grad():
        next(iter(network.blocks)).mlp.gate_up.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        states.sum().backward()


def strided(x: Tensor) -> Tensor:
    return torch.stack([x, x], dim=-1)[..., 0]


@pytest.mark.parametrize(
    "path",
    [
        "blocks.0.norm1.weight",
        "blocks.1.norm2.weight",
        "blocks.1.attention.o.bias",
        "blocks.0.attention.qkv.bias",
        "blocks.1.mlp.down.weight",
        "blocks.0.mlp.gate_up.weight",
    ],
)
def test_a_parameter_that_lies_otherwise_is_read_as_what_it_is(path: str) -> None:
    network, x = network_of("biases"), dense([9, 3])
    layer, name = path.rsplit(".", 1)
    value = strided(network.get_parameter(path).detach())
    assert not value.is_contiguous()
    setattr(network.get_submodule(layer), name, torch.nn.Parameter(value))
    check(network, x, results(network, x, None), exact(network, x, None))
