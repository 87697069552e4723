"""Which part of each parameter a rank holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.checkpoints.hf_io import compute_parameter_shapes
from weft.errors import ConfigError
from weft.models.network.config import TransformerConfig
from weft.parallel.tensor import narrow_config
from weft.registry import families
from weft.topology import (
    Layout,
    MeshCoordinates,
    compute_holdings,
    compute_kv_heads,
    compute_stage,
    compute_tensor_slice,
    compute_vocabulary,
)


def config_of(family: str) -> TransformerConfig:
    found = families.get(family)
    config: TransformerConfig = found.config(dict(found.tiny))
    return config


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("family", families.list_names())
def test_the_parts_are_the_whole_and_make_the_narrowed_network(family: str, t: int) -> None:
    config = config_of(family)
    if config.num_heads % t:
        pytest.skip(f"{config.num_heads} heads")
    copies = max(1, t // config.num_kv_heads)
    narrow = [compute_parameter_shapes(narrow_config(config, t, rank)) for rank in range(t)]
    for name, shape in compute_parameter_shapes(config).items():
        held = np.zeros(shape, int)
        for rank in range(t):
            part = compute_tensor_slice(name, shape, config, t, rank)
            held[part] += 1
            assert held[part].shape == narrow[rank][name], name
        split = (held == 1).all()
        own_copies = (held == copies).all() and (".k" in name or ".v." in name)
        assert split or own_copies or (held == t).all(), f"{name} is held {np.unique(held)} times"
        if "proj" not in name and ".q.weight" in name:
            assert split


def test_a_hand_worked_example() -> None:
    """Llama: 4 heads of 8, 2 of keys and values, an MLP of 48, 131 ids; the tiny model's."""
    config = config_of("llama")
    d, kv, inner = config.head_dim, config.num_kv_heads, config.intermediate_size
    assert (config.num_heads, kv) == (4, 2)
    name = "blocks.1.attention.{}.weight".format
    hidden = config.hidden_size
    assert compute_tensor_slice(name("q"), (4 * d, hidden), config, 2, 1) == (
        slice(2 * d, 4 * d),
        slice(0, hidden),
    )
    assert compute_tensor_slice(name("k"), (2 * d, hidden), config, 4, 3) == (
        slice(d, 2 * d),
        slice(0, hidden),
    )
    assert compute_tensor_slice(name("o"), (hidden, 4 * d), config, 2, 0) == (
        slice(0, hidden),
        slice(0, 2 * d),
    )
    down = compute_tensor_slice("blocks.0.mlp.down.weight", (hidden, inner), config, 2, 1)
    assert down == (slice(0, hidden), slice(inner // 2, inner))
    assert compute_tensor_slice("blocks.0.mlp.down.bias", (hidden,), config, 2, 1) == (
        slice(0, hidden),
    )
    assert compute_tensor_slice("embed.weight", (131, hidden), config, 2, 0) == (
        slice(0, 65),
        slice(0, hidden),
    )
    assert compute_tensor_slice("head.weight", (131, hidden), config, 2, 1) == (
        slice(65, 131),
        slice(0, hidden),
    )
    assert compute_tensor_slice("norm.weight", (hidden,), config, 2, 1) == (slice(0, hidden),)


def test_adapters_are_split_with_their_layer() -> None:
    config = config_of("llama")
    d, r, hidden = config.head_dim, 4, config.hidden_size
    rows = compute_tensor_slice("blocks.0.attention.q.lora_b", (4 * d, r), config, 2, 1)
    assert rows == (slice(2 * d, 4 * d), slice(0, r))
    assert compute_tensor_slice("blocks.0.attention.q.lora_a", (r, hidden), config, 2, 1) == (
        slice(0, r),
        slice(0, hidden),
    )
    columns = compute_tensor_slice("blocks.0.attention.o.lora_a", (r, 4 * d), config, 2, 1)
    assert columns == (slice(0, r), slice(2 * d, 4 * d))
    experts = compute_tensor_slice("blocks.0.mlp.experts.down.lora_a", (8, r, 64), config, 2, 1)
    assert experts == (slice(0, 8), slice(0, r), slice(32, 64))


@pytest.mark.parametrize(("t", "word"), [(3, "attention heads"), (8, "attention heads")])
def test_heads_that_do_not_split(t: int, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        narrow_config(config_of("llama"), t, 0)


@given(st.integers(1, 40), st.integers(1, 12))
def test_stages_hold_every_block_once(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(ConfigError, match="every stage"):
            compute_stage(layers, stages, 0)
        return
    held = [compute_stage(layers, stages, stage) for stage in range(stages)]
    assert [block for stage in held for block in stage] == list(range(layers))
    assert max(map(len, held)) - min(map(len, held)) <= 1


@given(st.integers(1, 40), st.integers(1, 8), st.floats(0.0, 12.0))
def test_the_last_stage_has_fewer_blocks_for_the_output_matrix(
    layers: int, stages: int, head: float
) -> None:
    if stages > layers:
        return
    held = [compute_stage(layers, stages, stage, head) for stage in range(stages)]
    assert [block for stage in held for block in stage] == list(range(layers)) and all(held)
    even = [(stage + 1) * layers // stages - stage * layers // stages for stage in range(stages)]
    costs = [
        [count + head * (stage == stages - 1) for stage, count in enumerate(counts)]
        for counts in (map(len, held), even)
    ]
    assert max(costs[0]) <= max(costs[1]) + 0.5


@given(st.integers(1, 300), st.integers(1, 9))
def test_ids_are_held_once(size: int, t: int) -> None:
    parts = [compute_vocabulary(size, t, rank) for rank in range(t)]
    assert [id for part in parts for id in range(part.start, part.stop)] == list(range(size))


def test_queries_read_the_heads_that_their_rank_holds() -> None:
    config = config_of("llama")
    assert [compute_kv_heads(config, 4, rank) for rank in range(4)] == [slice(0, 1)] * 2 + [
        slice(1, 2)
    ] * 2


@pytest.mark.parametrize(
    ("turns", "blocks"),
    [(False, [[0, 1, 4, 5], [2, 3, 6, 7]]), (True, [[0, 1, 6, 7], [2, 3, 4, 5]])],
)
def test_a_rank_holds_the_blocks_of_all_its_stages(turns: bool, blocks: list[list[int]]) -> None:
    """Round robin, or there and back: then the first rank has both ends."""
    names = [*(f"blocks.{layer}.norm1.weight" for layer in range(8)), "embed.weight", "norm.weight"]
    config = replace(config_of("llama"), num_layers=8, vocab_size=8)
    layout = Layout(pipeline=2, stages_per_rank=2, turns=turns)
    for tied in (False, True):
        for rank, own in enumerate(blocks):
            held = compute_holdings(
                dict.fromkeys(names, (8,)),
                config,
                layout,
                MeshCoordinates(pipeline=rank),
                tied=tied,
            )
            last = rank == layout.placement.last_rank
            ends = ["embed.weight"] * (rank == 0 or (tied and last)) + ["norm.weight"] * last
            assert list(held) == [*(names[layer] for layer in own), *ends]


def test_experts_are_held_whole_by_some_of_the_data_ranks() -> None:
    layout = Layout.parse("d4t2e2", trained=True)
    assert (layout.fsdp, layout.num_devices) == (1, 8)
    shapes = dict.fromkeys(
        ("blocks.1.mlp.experts.gate.weight", "blocks.1.mlp.experts.up.lora_a"), (6, 8, 4)
    )
    shapes["blocks.1.mlp.router.weight"] = (6, 4)
    config = config_of("mixtral")
    for data in range(4):
        held = compute_holdings(shapes, config, layout, MeshCoordinates(data=data, tensor=1))
        own = slice(3 * (data % 2), 3 * (data % 2) + 3)
        assert held["blocks.1.mlp.experts.gate.weight"] == (own, slice(4, 8), slice(0, 4))
        assert held["blocks.1.mlp.experts.up.lora_a"] == (own, slice(0, 8), slice(0, 4))
        assert held["blocks.1.mlp.router.weight"] == (slice(0, 6), slice(0, 4))


@pytest.mark.parametrize(
    ("layout", "shards"), [("d8f8e2", 4), ("d8f4e2", 2), ("d8f2e4", 1), ("d8f4e4", 1)]
)
def test_experts_are_shared_by_the_ranks_that_have_the_same_ones(layout: str, shards: int) -> None:
    """Of each sharded copy; all else by all of its ranks."""
    parsed, config = Layout.parse(layout), config_of("mixtral")
    expert, dense = "blocks.1.mlp.experts.gate.weight", "blocks.1.mlp.router.weight"
    held = [
        compute_holdings(
            {expert: (16, 8, 4), dense: (16, 4)}, config, parsed, MeshCoordinates(data=data)
        )
        for data in range(8)
    ]
    size = 16 // parsed.expert // shards
    for data, parts in enumerate(held):
        first = 16 // parsed.expert * (data % parsed.expert) + size * (
            data % parsed.fsdp // parsed.expert
        )
        assert parts[expert] == (slice(first, first + size), slice(0, 8), slice(0, 4))
        first = 16 // parsed.fsdp * (data % parsed.fsdp)
        assert parts[dense] == (slice(first, first + 16 // parsed.fsdp), slice(0, 4))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("d2e4", "e=4 does not divide d=2"),
        ("e2", "does not divide d=1"),
        ("d6f2e3", "f=2 and e=3: one must divide the other"),
    ],
)
def test_experts_that_do_not_fit(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Layout.parse(text)
