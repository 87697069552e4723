"""Adapters: what they compute, and what they train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.bounds import assert_within, probable_gamma
from tests.models import common
from tests.models.common import adapted, roundings, sequences, tiny
from weft.checkpoints import hf_io
from weft.errors import ConfigError
from weft.models.network import lora
from weft.models.network.linear import find_canonical_parameters, find_canonical_values
from weft.models.network.packed import pack
from weft.models.network.transformer import Transformer

ROW = sequences([18])[0].clamp_min(1)


def logits(network: Transformer) -> Tensor:
    return common.logits(network, ROW)


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_new_adapters_change_nothing_and_train_alone(name: str) -> None:
    network = tiny(name)
    before = logits(network)
    base = {n: value.clone() for n, value in find_canonical_values(network).items()}
    stored = {n for n, _ in network.named_parameters()}
    lora.attach(network, r=2, alpha=4.0, seed=1)
    assert torch.equal(logits(network), before)
    trained = {n for n, at in find_canonical_parameters(network).items() if at.requires_grad}
    assert trained and all(lora.is_adapter(n) for n in trained)
    assert find_canonical_parameters(network).keys() - trained == base.keys(), (
        "the base keeps its names"
    )
    assert {n for n, p in network.named_parameters() if not p.requires_grad} == stored, (
        "those of what is stored, too"
    )
    network(pack([ROW]), frozenset({"logprobs"}))["logprobs"].sum().backward()
    for n, at in find_canonical_parameters(network).items():
        assert (at.grad is not None) == lora.is_adapter(n), n
        assert n in trained or torch.equal(at.data, base[n])
    grads = {
        n: at.grad for n, at in find_canonical_parameters(network).items() if n.endswith(lora.B)
    }
    assert all(g is not None and g.abs().sum() > 0 for g in grads.values())


def test_the_formula() -> None:
    network = adapted(targets=("v",), dtype=torch.float64)
    layer, found = network.blocks[1].attention.qkv, find_canonical_values(network)
    weight, a, b = (
        found[f"blocks.1.attention.v.{name}"] for name in ("weight", "lora_a", "lora_b")
    )
    x = torch.randn(4, 32, dtype=torch.float64)
    expected = x @ layer.weight.T
    expected[:, layer.find_rows("v")] = x @ weight.T + 2.0 * (x @ a.T) @ b.T
    assert_close(layer(x, None), expected, rtol=1e-12, atol=1e-12)


def test_off_is_the_base_and_on_again_is_not() -> None:
    network = adapted()
    base = tiny()
    on = logits(network)
    with lora.disable_adapters(network):
        assert torch.equal(logits(network), logits(base))
    assert torch.equal(logits(network), on) and not torch.allclose(on, logits(base), atol=0.1)


@pytest.mark.parametrize("name", ["llama", "phi3", "mixtral", "qwen3_moe"])
def test_merged_is_adapted(name: str) -> None:
    """As far as two passes in float32 can agree, each of which loses a share of the largest logit
    to its roundings; that of a sum of weights is one more in each of a block's seven products.
    """
    network = adapted(name)
    merged = hf_io.init_random(network.config, seed=0)
    sums, read = (
        lora.merge(find_canonical_values(network), lora.collect_scales(network)),
        find_canonical_values(merged),
    )
    assert sums.keys() == read.keys()
    for name, value in sums.items():
        read[name].copy_(value)
    wanted, n = logits(network), roundings(network, len(ROW)) + 7 * network.config.num_layers
    assert_within(logits(merged), wanted, 2 * probable_gamma(n) * float(wanted.abs().max()))


@pytest.mark.parametrize("name", ["mixtral", "phi3"])
def test_each_matrix_is_merged_once_for_a_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has a tensor for each expert, whose matrices are one parameter."""
    network = adapted(name)
    scales = lora.collect_scales(network)
    shapes = []
    merge_weight = lora.merge_weight

    def record_and_merge(weight: Tensor, *given: Any) -> Tensor:
        shapes.append(weight.shape)
        return merge_weight(weight, *given)

    monkeypatch.setattr(lora, "merge_weight", record_and_merge)
    merged = lora.merge(find_canonical_values(network), scales)
    hf_io.save(tmp_path, merged, network.config, dtype=torch.float32)
    assert len(shapes) == len(scales)


def test_targets() -> None:
    network = tiny("gpt2")
    lora.attach(network, r=2, targets=["q", "down"])
    assert {n.rsplit(".", 1)[1] for n in lora.collect_scales(network)} == {"q", "down"}
    with pytest.raises(ConfigError, match=r"no layers 'gate'"):
        lora.attach(tiny("gpt2"), r=2, targets=["gate"])
    everything = tiny()
    lora.attach(everything, r=2)
    assert len(lora.collect_scales(everything)) == 7 * 3


def test_a_score_head_is_trained_in_full() -> None:
    network = adapted(head="score")
    assert network.score.weight.requires_grad and not network.norm.weight.requires_grad


def test_new_adapters_depend_on_seed_and_name() -> None:
    networks, up = (tiny(), tiny(), tiny()), "blocks.0.mlp.up.lora_a"
    for network, seed in zip(networks, (1, 1, 2), strict=True):
        lora.attach(network, r=2, seed=seed)
    one, other, third = map(find_canonical_values, networks)
    assert torch.equal(one[up], other[up])
    assert not torch.equal(one[up], third[up])
