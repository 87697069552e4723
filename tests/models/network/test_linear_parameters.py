"""Canonical names: those of the checkpoints, whatever is stored as one matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.common import adapted, sequences, tiny
from weft.checkpoints import hf_io
from weft.models.families.base import Family
from weft.models.network.linear import find_canonical_parameters, find_canonical_values
from weft.models.network.packed import pack
from weft.models.network.transformer import Transformer
from weft.registry import families

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("gpt2", {"tie_word_embeddings": False}),
    ("gpt2", {}),
    ("mixtral", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("gemma2", {}),
    ("qwen3", {}),
]


@pytest.mark.parametrize(
    ("name", "changes"), CASES, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "plain"
)
def test_names_and_values_are_those_of_the_checkpoint(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    network, family = tiny(name, **changes), families.get(name)
    assert isinstance(family, Family)
    hf_io.save(tmp_path, find_canonical_values(network), network.config)
    reader = hf_io.ParameterReader(tmp_path)
    assert (
        find_canonical_values(network).keys()
        == family.keymap(network.config).keys.keys()
        == reader.keymap.keys.keys()
    )
    for key, value in find_canonical_values(network).items():
        assert torch.equal(value, reader.read(key)), key
    assert ("head.weight" in find_canonical_values(network)) != network.config.tied


def test_the_names_of_a_llama() -> None:
    block = [
        "attention.q.weight",
        "attention.k.weight",
        "attention.v.weight",
        "attention.o.weight",
        "mlp.gate.weight",
        "mlp.up.weight",
        "mlp.down.weight",
        "norm1.weight",
        "norm2.weight",
    ]
    found = [f"blocks.{i}.{name}" for i in range(2) for name in block]
    network = tiny(num_hidden_layers=2)
    assert list(find_canonical_parameters(network)) == [
        "embed.weight",
        *found,
        "norm.weight",
        "head.weight",
    ]
    stored = {name for name, _ in network.named_parameters()}
    assert {at.name for at in find_canonical_parameters(network).values()} == stored
    assert "blocks.0.attention.qkv.weight" in stored and "blocks.0.attention.q.weight" not in stored


@pytest.mark.parametrize("make", [tiny, adapted], ids=["plain", "adapters"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_every_number_that_is_stored_has_one_name(name: str, make: Any) -> None:
    network: Transformer = make(name)
    held = dict(network.named_parameters())
    marks = {key: torch.zeros_like(value) for key, value in held.items()}
    for at in find_canonical_parameters(network).values():
        assert held[at.name] is at.parameter and at.select_rows(marks[at.name]).data_ptr() != 0
        at.select_rows(marks[at.name]).add_(1)
    assert all(bool((mark == 1).all()) for mark in marks.values())


def test_values_and_gradients_are_views() -> None:
    network = tiny()
    at = find_canonical_parameters(network)["blocks.1.attention.k.weight"]
    assert at.grad is None and not at.data.requires_grad
    network(pack(sequences([9])), frozenset({"logprobs"}))["logprobs"].sum().backward()
    whole, rows = network.blocks[1].attention.qkv, slice(32, 48)
    assert (
        at.grad is not None
        and torch.equal(at.grad, whole.weight.grad[rows])
        and at.grad.abs().sum() > 0
    )
    at.data.fill_(3.0)
    at.grad.zero_()
    assert bool((whole.weight[rows] == 3).all()) and not bool((whole.weight[:32] == 3).any())
    assert not whole.weight.grad[rows].any() and whole.weight.grad[:32].any()


def test_other_modules_keep_their_names_and_a_tied_tensor_has_one() -> None:
    module = nn.ModuleDict(
        {
            "table": nn.Embedding(5, 3),
            "inner": nn.Sequential(nn.Linear(3, 3)),
            "head": nn.Linear(3, 5),
        }
    )
    assert list(find_canonical_parameters(module)) == [
        name for name, _ in module.named_parameters()
    ]
    module["head"].weight = module["table"].weight
    assert list(find_canonical_parameters(module)) == [
        "table.weight",
        "inner.0.weight",
        "inner.0.bias",
        "head.bias",
    ]


def test_a_part_has_the_names_of_the_whole() -> None:
    config = tiny("gemma2").config
    found: list[str] = []
    for layers in (range(1), range(1, 2), range(2, config.num_layers)):
        found += find_canonical_parameters(Transformer.build_empty(config, layers=layers))
    whole = list(find_canonical_parameters(Transformer.build_empty(config)))
    assert sorted(found) == sorted([*whole, "embed.weight"]), (
        "the last part reads the tied matrix too"
    )
