"""A block over a pack in one call is the one that goes part by part, to the bit: its states, and gradients but of biases."""

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
from weft.models.native import attention, block
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
    "scaled": {"attention_scale": 0.7, "layer_scaled_attention": True},
}


def network_of(form: str) -> Transformer:
    network = Transformer(dataclasses.replace(tiny("llama").config, **FORMS[form])).eval()
    torch.manual_seed(0)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return network


def weighted(states: Tensor) -> Tensor:
    return (states * torch.randn(states.shape, generator=torch.Generator().manual_seed(0), dtype=states.dtype)).sum()


def gradients(network: Transformer) -> dict[str, Tensor]:
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def results(network: Transformer, x: Packed, rows: list[int] | None) -> dict[str, Tensor]:
    """Hidden states, and the gradient of a weighted sum of them by every parameter."""
    network.zero_grad()
    states = network.hidden(x, None if rows is None else torch.tensor(rows))
    weighted(states).backward()
    return {"states": states.detach(), **{name: value.clone() for name, value in gradients(network).items()}}


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


def test_the_last_block_goes_on_with_what_is_wanted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    wants: list[int] = []
    call = block.library.call

    def seen(name: str, *given: Any) -> int:
        if name == "weft_block_forward":
            wants.append(given[-1].wants)
        return call(name, *given)

    monkeypatch.setattr(block.library, "call", seen)
    network = tiny()
    network.hidden(dense([9, 3]), torch.tensor([3, 11]))
    assert wants == [12] * (network.config.num_layers - 1) + [2]


def test_no_rows_are_wanted() -> None:
    network, x = tiny(), dense([9, 3])
    states = network.hidden(x, torch.zeros(0, dtype=torch.int64))
    assert states.shape == (0, network.config.hidden_size)
    states.sum().backward()
    assert not any(p.grad.any() for p in network.parameters() if p.grad is not None)


@pytest.mark.parametrize("row", [12, -1, 200_000])
def test_rows_that_are_not_there_are_refused(row: int) -> None:
    with pytest.raises(IndexError, match="not among the 12 of the pack"):
        tiny().hidden(dense([9, 3]), torch.tensor([0, row]))


def test_rows_may_be_of_another_type() -> None:
    network, x = tiny(), dense([9, 3])
    assert torch.equal(network.hidden(x, torch.tensor([7, 2], dtype=torch.int32)), network.hidden(x)[[7, 2]])


def test_the_default_dtype_changes_nothing() -> None:
    network, x = tiny(), dense([9, 3])
    expected = results(network, x, None)
    network.zero_grad()
    torch.set_default_dtype(torch.bfloat16)
    try:
        weighted(network.hidden(x)).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(value, expected[name]) for name, value in gradients(network).items())


def test_weights_that_went_elsewhere_between_the_passes_are_read_where_they_were() -> None:
    network, x = tiny(), dense([9, 3])
    expected = results(network, x, None)
    network.zero_grad()
    states = network.hidden(x)
    for parameter in network.blocks.parameters():
        parameter.data = torch.full_like(parameter, torch.nan)
    weighted(states).backward()
    assert all(torch.equal(value, expected[name]) for name, value in gradients(network).items())


def test_other_passes_in_between_and_a_second_way_back() -> None:
    network, x = tiny(), dense([9, 3])
    expected = results(network, x, [3])
    network.zero_grad()
    total = weighted(network.hidden(x, torch.tensor([3])))
    weighted(network.hidden(dense([40, 7]))).detach()
    for times in (1, 2):
        total.backward(retain_graph=True)
        assert all(torch.equal(value, times * expected[name]) for name, value in gradients(network).items())


def test_gradients_of_biases_are_sums_of_blocks() -> None:
    """Of the last bias it is the sum of what comes in: of thousands of rows one after the other it would be 1e-5 off."""
    network = network_of("biases")
    one, seen = network.get_submodule("blocks.0"), attention.Seen(torch.tensor([[0, 8192, 0, 8192]]), window=1)
    made = block.run(one, torch.randn(8192, network.config.hidden_size), None, seen, None)
    by_out = torch.rand(made.shape, generator=torch.Generator().manual_seed(1))
    made.backward(by_out)
    assert_close(one.mlp.down.bias.grad.double(), by_out.double().sum(0), rtol=5e-7, atol=0.0)


FROZEN = [
    ["norm1"],
    ["norm2"],
    ["q"],
    ["q", "k", "v", "o"],
    ["down"],
    ["mlp"],
    ["embed"],
    ["embed", "norm1"],
    ["0"],
    ["embed", "norm1", "q", "k", "v"],
]


@pytest.mark.parametrize("rows", [None, [33, 4]], ids=["all", "some"])
@pytest.mark.parametrize("frozen", FROZEN, ids=" ".join)
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen: list[str], rows: list[int] | None) -> None:
    network, x = network_of("biases"), PACKS["prefix"]()
    expected = results(network, x, rows)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(not set(frozen) & set(name.split(".")))
    made = results(network, x, rows)
    assert made.keys() == {key for key in expected if not set(frozen) & set(key.split("."))}
    assert all(torch.equal(value, expected[key]) for key, value in made.items())


def test_two_passes_add_their_gradients_up() -> None:
    network, x = tiny(), dense([9, 3])
    once = results(network, x, None)
    network.zero_grad()
    for _ in range(2):
        weighted(network.hidden(x)).backward()
    assert all(torch.equal(value, 2 * once[name]) for name, value in gradients(network).items())


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


def changed(**changes: Any) -> Callable[[], Transformer]:
    return lambda: Transformer(dataclasses.replace(tiny("llama").config, **changes)).eval()


def with_adapters() -> Transformer:
    network = tiny()
    lora.attach(network, LoRASpec(r=2, targets=["k"]))
    return network


def with_another(path: str, make: Callable[[Tensor], Tensor], form: str = "plain") -> Callable[[], Transformer]:
    """A network of which one parameter is `make` of what it was."""

    def made() -> Transformer:
        network = network_of(form)
        layer, name = path.rsplit(".", 1)
        old = network.get_parameter(path).detach()
        setattr(network.get_submodule(layer), name, torch.nn.Parameter(make(old)))
        return network

    return made


def strided(x: Tensor) -> Tensor:
    return torch.stack([x, x], dim=-1)[..., 0]


NOT_SERVED: dict[str, Callable[[], Transformer]] = {
    "other dtype": lambda: tiny(dtype=torch.float64),
    "adapters": with_adapters,
    "no gate": lambda: tiny("gpt2"),
    "norms of heads": lambda: tiny("qwen3"),
    "experts": lambda: tiny("mixtral"),
    "capped scores": changed(attention_softcap=20.0),
    "norms after": changed(placement="after"),
    "two norms": changed(placement="both"),
    "side by side": changed(parallel_residual=True),
    "another activation": changed(activation="gelu"),
    "layer norms": changed(norm="layer"),
    "wider heads": changed(head_dim=272, rope=None),
    "a matrix that lies otherwise": with_another("blocks.0.mlp.down.weight", lambda x: x.T.contiguous().T),
    "a bias that lies otherwise": with_another("blocks.1.attention.o.bias", strided, "biases"),
}


@pytest.mark.parametrize("case", NOT_SERVED)
def test_what_the_kernels_do_not_take_goes_part_by_part(case: str, ran: list[str]) -> None:
    network = NOT_SERVED[case]()
    network.hidden(dense([9, 3])).sum().backward()
    assert not any("block" in name for name in ran)


@pytest.mark.parametrize(
    "path", ["blocks.0.norm1.weight", "blocks.0.norm2.weight", "blocks.1.attention.o.bias", "blocks.1.mlp.up.weight"]
)
def test_parameters_of_another_dtype_are_not_read_as_float32(path: str) -> None:
    network = with_another(path, Tensor.double, "biases")()
    assert not block.serves(network.config, network.blocks, torch.zeros(3, network.config.hidden_size), None)


def test_some_biases_of_a_product_are_not_all() -> None:
    network = network_of("biases")
    network.get_submodule("blocks.0.attention.k").bias = None  # type: ignore[assignment]
    assert not block.serves(network.config, network.blocks, torch.zeros(3, network.config.hidden_size), None)


def test_what_drops_goes_part_by_part(ran: list[str]) -> None:
    tiny().hidden(dataclasses.replace(dense([9, 3]), noise=Noise.of(0, 1, [("a", 0), ("b", 0)])))
    assert not any("block" in name for name in ran)
